"""Gradient signal-to-noise ratio from micro-batch gradients (control_plane.md 6)."""

import numpy as np


def gradient_snr(squares: np.ndarray, groups: np.ndarray, grad_norm: float) -> float:
    """|G|^2 / tr(Sigma) of one prompt group's gradient, by the unbiased two-batch-size form.

    Args:
        squares: [M] squared norms of the micro-batches' shares of the batch gradient; they add up to it as vectors.
        groups: [M] prompt groups in each micro-batch; with unequal sizes their harmonic mean stands for b.
        grad_norm: norm of the whole batch's gradient, before clipping.
    Returns:
        The ratio; NaN when there are fewer than two micro-batches or a value is not finite. |G|^2 is an estimate and may be
        negative when noise dominates.
    """
    total = groups.sum()
    if len(groups) < 2 or not np.isfinite(grad_norm) or not np.all(np.isfinite(squares)):
        return float("nan")
    mean_square = np.mean(squares * (total / groups) ** 2)
    small = 1.0 / np.mean(1.0 / groups)
    trace = (mean_square - grad_norm**2) / (1.0 / small - 1.0 / total)
    signal = (total * grad_norm**2 - small * mean_square) / (total - small)
    return float(signal / trace) if trace > 0 else float("nan")
