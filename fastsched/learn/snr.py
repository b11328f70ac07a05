"""Gradient signal-to-noise ratio of an update, of all groups and by difficulty bin (control_plane.md 6).

The learner drives a `GradientSnr`; below it stand the formulas. The engine counts the squared norms (`take_gradient_squares`,
`take_bin_squares`), of micro-batches that hold groups of one bin where bins are told apart.
"""

from dataclasses import dataclass, field
from typing import Callable, NamedTuple, Sequence

import numpy as np

from fastsched.learn.contract import LearnerEngine
from fastsched.learn.packing import Sample
from fastsched.types import MicroBatch, Ranks

NAN = float("nan")


class BinGradients(NamedTuple):
    """What one rank measured of one difficulty bin in one update."""

    squares: np.ndarray  # [M] squared norms of its micro-batches' shares of the batch gradient
    groups: np.ndarray  # [M] prompt groups in each
    total_square: float  # squared norm of the sum of those shares


@dataclass
class GradientSnr:
    """Of the last update that `take` was told of."""

    shares: np.ndarray  # of `trained_share`
    ranks: Ranks
    squares: list[float] = field(default_factory=list)  # by micro-batch
    of_bins: dict[int, float] = field(default_factory=dict)  # squared norm of each bin's summed gradient
    micro_batches: Sequence[MicroBatch] = ()

    def take(self, engine: LearnerEngine, micro_batches: Sequence[MicroBatch]) -> list[float]:
        """Remember what the engine measured in the update of these micro-batches; returns the squared gradient norm of each."""
        self.squares, self.of_bins, self.micro_batches = engine.take_gradient_squares(), engine.take_bin_squares(), micro_batches
        return self.squares

    def ratio(self, grad_norm: float) -> float:
        """Over the micro-batches of all ranks, dummies left out. NaN where a group lies in several, whose gradients are then not
        independent."""
        own = [(square, len(m.groups)) for square, m in zip(self.squares, self.micro_batches, strict=True) if m.groups]
        ranks = self.ranks.all_gather((own, bool(_split(self.micro_batches))))
        rows = [row for own, _ in ranks for row in own]
        if any(split for _, split in ranks):
            return NAN
        return gradient_snr(np.array([square for square, _ in rows]), np.array([groups for _, groups in rows]), grad_norm, self.shares[0])

    def by_bin(self) -> tuple[float, ...]:
        """The same within each difficulty bin."""
        own = {}
        for b, total in self.of_bins.items():
            rows = [(s, len(m.groups)) for s, m in zip(self.squares, self.micro_batches, strict=True) if m.bin == b and m.groups]
            own[b] = BinGradients(np.array([s for s, _ in rows]), np.array([n for _, n in rows]), total)
        ranks = self.ranks.all_gather((own, _split(self.micro_batches)))
        return tuple(NAN if any(b in split for _, split in ranks) else bin_snr([own[b] for own, _ in ranks if b in own], share)
                     for b, share in enumerate(self.shares[1:].tolist()))


def trained_share(samples: Sequence[Sample], skips_flat: bool, bins: int, all_reduce: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
    """[1 + bins] share of the scored groups of all ranks that are in the loss: of all, and of each of `bins` difficulty bins, 1 of an
    empty one. With `skips_flat` groups without an advantage are not."""
    groups: dict[int, tuple[int, bool]] = {}
    for s in samples:
        groups[s.group] = s.bin, groups.get(s.group, (0, False))[1] or not (skips_flat and s.flat)
    counts = np.zeros((2, 1 + bins))
    for b, trained in groups.values():
        counts[:, 0] += trained, 1
        if bins:
            counts[:, 1 + b] += trained, 1
    trained, everything = all_reduce(counts)
    return np.divide(trained, everything, out=np.ones(1 + bins), where=everything > 0)


def split_by_bin(samples: Sequence[Sample]) -> list[list[Sample]]:
    """The samples of one bin at a time, its groups in two halves, so that each bin has at least two micro-batches."""
    parts = []
    for b in sorted({s.bin for s in samples}):
        groups = sorted({s.group for s in samples if s.bin == b})
        for half in (groups[:len(groups) // 2], groups[len(groups) // 2:]):
            parts.append([s for s in samples if s.bin == b and s.group in set(half)])
    return [part for part in parts if part]


def _split(micro_batches: Sequence[MicroBatch]) -> set[int]:
    """Bins of this rank's groups that lie in several of the micro-batches."""
    seen: set[int] = set()
    split: set[int] = set()
    for micro in micro_batches:
        if not seen.isdisjoint(micro.groups):
            split.add(micro.bin)
        seen.update(micro.groups)
    return split


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
    return float(share**2 * signal / trace) if trace > 0 else NAN


def _signal_and_trace(squares: np.ndarray, groups: np.ndarray, total_square: float) -> tuple[float, float]:
    total = groups.sum()
    if len(groups) < 2 or not np.isfinite(total_square) or not np.all(np.isfinite(squares)):
        return NAN, NAN
    mean_square = np.mean(squares * (total / groups) ** 2)
    small = 1.0 / np.mean(1.0 / groups)
    trace = (mean_square - total_square) / (1.0 / small - 1.0 / total)
    signal = (total * total_square - small * mean_square) / (total - small)
    return float(signal), float(trace)
