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


def test_groups_that_are_left_out_count_as_the_zeros_they_are():
    """A third of the groups has a gradient; leaving the others out tells the same ratio, and without `share` another."""
    rng, dim, ratios, bare, kept = np.random.default_rng(0), 20, [], [], []
    truth = rng.normal(size=dim)
    for _ in range(600):
        groups = (truth + 2.0 * rng.normal(size=(120, dim))) * (rng.random(120) < 1 / 3)[:, None]
        for found, left in ((kept, groups), (ratios, groups[groups.any(1)])):
            parts = np.array_split(left / 120, 8)
            sizes, squares = np.array([len(p) for p in parts]), np.array([p.sum(0) @ p.sum(0) for p in parts])
            norm = float(np.linalg.norm(left.sum(0) / 120))
            found.append(gradient_snr(squares, sizes, norm, len(left) / 120))
        bare.append(gradient_snr(squares, sizes, norm))
    expected = (truth @ truth / 9) / (4 * dim / 3 + truth @ truth * (1 / 3 - 1 / 9))
    assert np.median(kept) == pytest.approx(expected, rel=0.1) and np.median(ratios) == pytest.approx(expected, rel=0.1)
    assert np.median(bare) > 2.5 * expected


def test_undefined_is_nan_not_a_number_to_steer_by():
    assert np.isnan(gradient_snr(np.array([1.0]), np.array([8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, np.nan]), np.array([8, 8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, 1.0]), np.array([8, 8]), float("nan")))
