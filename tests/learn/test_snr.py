import numpy as np
import pytest

from fastsched.learn.snr import gradient_snr


@pytest.mark.parametrize("sizes", [[4] * 12, [1, 2, 5, 8] * 4])
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_recovers_signal_and_noise_of_synthetic_gradients(sizes, noise):
    """The mean of numerator and denominator over many batches against the known |G|^2 and tr(Sigma)."""
    rng, sizes, dim = np.random.default_rng(0), np.array(sizes), 20
    truth = rng.normal(size=dim)
    ratios = []
    for _ in range(400):
        groups = truth + noise * rng.normal(size=(sizes.sum(), dim))
        shares = [part.sum(0) / sizes.sum() for part in np.split(groups, np.cumsum(sizes)[:-1])]
        squares = np.array([s @ s for s in shares])
        ratios.append(gradient_snr(squares, sizes, float(np.linalg.norm(sum(shares)))))
    expected = truth @ truth / (noise**2 * dim)
    assert np.nanmedian(ratios) == pytest.approx(expected, rel=0.2)


def test_undefined_is_nan_not_a_number_to_steer_by():
    assert np.isnan(gradient_snr(np.array([1.0]), np.array([8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, np.nan]), np.array([8, 8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, 1.0]), np.array([8, 8]), float("nan")))
