"""Gradient signal-to-noise ratio from micro-batch gradients (control_plane.md 6)."""

from typing import NamedTuple, Sequence

import numpy as np


class BinGradients(NamedTuple):
    """What one rank measured of one difficulty bin in one update."""

    squares: np.ndarray  # [M] squared norms of its micro-batches' shares of the batch gradient
    groups: np.ndarray  # [M] prompt groups in each
    total_square: float  # squared norm of the sum of those shares


def gradient_snr(squares: np.ndarray, groups: np.ndarray, grad_norm: float, share: float = 1.0) -> float:
    """|G|^2 / tr(Sigma) of one prompt group's gradient, by the unbiased two-batch-size form.

    Args:
        squares: [M] squared norms of the micro-batches' shares of the batch gradient; they add up to it as vectors.
        groups: [M] prompt groups in each micro-batch; with unequal sizes their harmonic mean stands for b.
        grad_norm: norm of the whole batch's gradient, before clipping.
        share: of all groups, those that `groups` counts; the others were left out because they have no gradient.
    Returns:
        The ratio; NaN when there are fewer than two micro-batches or a value is not finite. |G|^2 is an estimate and may be
        negative when noise dominates.
    """
    signal, trace = _signal_and_trace(squares, groups, grad_norm**2)
    return _ratio(signal, trace, share)


def bin_snr(ranks: Sequence[BinGradients], share: float = 1.0) -> float:
    """The ratio of one bin over all ranks. Every rank's two estimates, of its own groups, are unbiased; they are averaged by its
    number of groups before the division, so no gradient is exchanged. NaN when no rank has two micro-batches of the bin.
    """
    signal = trace = 0.0
    for rank in ranks:
        n = rank.groups.sum()
        own = _signal_and_trace(rank.squares, rank.groups, rank.total_square)
        if np.all(np.isfinite(own)):  # per group: the shares are of one global sum, whatever the rank's number of groups
            signal, trace = signal + own[0] / n, trace + own[1] / n
    return _ratio(signal, trace, share)


def _ratio(signal: float, trace: float, share: float) -> float:
    """Of groups that are 0 but for a share q: |q G|^2 over E|g|^2 - |q G|^2 = q (tr + |G|^2) - q^2 |G|^2, with G and tr of that share."""
    trace = share * trace + share * (1 - share) * signal
    return float(share**2 * signal / trace) if trace > 0 else float("nan")


def _signal_and_trace(squares: np.ndarray, groups: np.ndarray, total_square: float) -> tuple[float, float]:
    total = groups.sum()
    if len(groups) < 2 or not np.isfinite(total_square) or not np.all(np.isfinite(squares)):
        return float("nan"), float("nan")
    mean_square = np.mean(squares * (total / groups) ** 2)
    small = 1.0 / np.mean(1.0 / groups)
    trace = (mean_square - total_square) / (1.0 / small - 1.0 / total)
    signal = (total * total_square - small * mean_square) / (total - small)
    return float(signal), float(trace)
