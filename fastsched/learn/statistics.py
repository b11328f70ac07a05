"""What one update is said to have been: sums over micro-batches, reduced over ranks into `Stats`.

P prompts, G responses a prompt.
"""

from dataclasses import dataclass, field
from typing import Callable, Iterable, Sequence

import numpy as np

from fastsched.groups import flat_groups
from fastsched.learn.objective import SUMS, LossSums
from fastsched.learn.snr import BinGradients, bin_snr, gradient_snr
from fastsched.types import MicroBatch, Response

DECILES = 10
QUANTILE_BINS, QUANTILE_RANGE = 4096, 16.0  # of token entropy: steps of 1/256 nat
AllReduce = Callable[..., np.ndarray]


@dataclass
class Totals:
    """Sums of this rank over the micro-batches of an update or of several."""

    sums: np.ndarray = field(default_factory=lambda: np.zeros(len(SUMS)))
    deciles: np.ndarray = field(default_factory=lambda: np.zeros((3, DECILES)))
    largest_ratio: float = 0.0
    loss: float = 0.0

    def add(self, out: LossSums) -> None:
        self.sums += out.sums.cpu().numpy()
        self.deciles += out.deciles.cpu().numpy()
        self.largest_ratio = max(self.largest_ratio, float(out.largest_ratio))
        self.loss += float(out.loss.detach())


def reduced(totals: Totals, responses: Sequence[Response], rewards: np.ndarray, stale: np.ndarray,
            all_reduce: AllReduce) -> tuple[dict[str, float], np.ndarray]:
    """(scalars by name, [6, 10] by decile: kept tokens, their entropy, their KL, all tokens, surprisal, tokens with surprisal)."""
    deciles = np.concatenate([totals.deciles, _all_tokens(responses)])
    names = (*SUMS, "loss", "all_tokens", "flat", "groups", "stale", "responses")
    scalars = [*totals.sums, totals.loss, sum(len(r.token_ids) for r in responses), flat_groups(rewards).sum(), len(rewards),
               stale.sum(), len(responses)]
    values = all_reduce(np.concatenate([np.array(scalars, np.float64), deciles.ravel()]))
    return dict(zip(names, values.tolist(), strict=False)), values[len(names):].reshape(deciles.shape)


def _all_tokens(responses: Sequence[Response]) -> np.ndarray:
    """[3, 10] by decile: response tokens, sum of -logp(sampler), tokens that have one."""
    decile = np.concatenate([np.arange(len(r.token_ids)) * DECILES // len(r.token_ids) for r in responses] or [np.zeros(0, int)])
    surprisal = -np.concatenate([np.asarray(r.logp, np.float64) for r in responses] or [np.zeros(0)])
    known = np.isfinite(surprisal)
    return np.stack([np.bincount(decile, minlength=DECILES), np.bincount(decile[known], surprisal[known], DECILES),
                     np.bincount(decile[known], minlength=DECILES)]).astype(np.float64)


def decile_columns(sums: np.ndarray) -> dict[str, list[float]]:
    """Means by tenth of the response t / L, NaN where there is no token.

    entropy and kl are over kept tokens; surprisal is -logp(sampler) over all response tokens, whose mean is an unbiased estimate of
    the sampler's entropy at no cost, also where nothing is kept.
    """
    kept, entropy, kl, everything, surprisal, known = sums
    share = lambda part, whole: np.divide(part, whole, out=np.full(DECILES, np.nan), where=whole > 0).tolist()
    return {"kept": share(kept, everything), "entropy": share(entropy, kept), "kl": share(kl, kept), "surprisal": share(surprisal, known)}


def token_quantile(values: np.ndarray, q: float, all_reduce: AllReduce) -> float:
    """q-quantile of non-negative `values` of all ranks, to 1/256, from one reduced histogram; NaN without values."""
    counts, edges = np.histogram(np.clip(values, 0, QUANTILE_RANGE), QUANTILE_BINS, (0, QUANTILE_RANGE))
    below = np.cumsum(all_reduce(counts.astype(np.float64)))
    if below[-1] == 0:
        return float("nan")
    place = int(np.searchsorted(below, q * below[-1]))
    before = below[place - 1] if place else 0.0
    inside = (q * below[-1] - before) / max(below[place] - before, 1.0)
    return float(edges[place] + inside * (edges[1] - edges[0]))


def trained_share(groups: Iterable[tuple[int, bool]], bins: int, all_reduce: AllReduce) -> np.ndarray:
    """[1 + bins] share of the groups of all ranks that are in the loss: of all, and of each of `bins` difficulty bins, 1 of an empty one.

    groups: (bin, in the loss) of every group of this rank that has a score.
    """
    counts = np.zeros((2, 1 + bins))
    for b, trained in groups:
        counts[:, 0] += trained, 1
        if bins:
            counts[:, 1 + b] += trained, 1
    trained, everything = all_reduce(counts)
    return np.divide(trained, everything, out=np.ones(1 + bins), where=everything > 0)


def snr(squares: Sequence[float], micro_batches: Sequence[MicroBatch], grad_norm: float, share: float,
        all_gather: Callable[[object], list]) -> float:
    """Gradient SNR over the micro-batches of all ranks, which hold `share` of the groups; dummies are left out. NaN where a group lies in
    several micro-batches, whose gradients are then not independent."""
    own = [(square, m.groups, m.whole) for square, m in zip(squares, micro_batches, strict=True) if m.groups]
    rows = [row for rank in all_gather(own) for row in rank]
    if not all(whole for _, _, whole in rows):
        return float("nan")
    return gradient_snr(np.array([square for square, _, _ in rows]), np.array([groups for _, groups, _ in rows]), grad_norm, share)


def snr_by_bin(squares: Sequence[float], micro_batches: Sequence[MicroBatch], totals: dict[int, float], shares: np.ndarray,
               all_gather: Callable[[object], list]) -> tuple[float, ...]:
    """The same within each difficulty bin, which hold `shares` [K] of their groups; `totals` holds this rank's squared norm of each bin's
    summed gradient."""
    own, split = {}, {m.bin for m in micro_batches if not m.whole}
    for b, total in totals.items():
        rows = [(s, m.groups) for s, m in zip(squares, micro_batches, strict=True) if m.bin == b and m.groups]
        own[b] = BinGradients(np.array([s for s, _ in rows]), np.array([n for _, n in rows]), total)
    ranks = all_gather((own, split))
    return tuple(float("nan") if any(b in split for _, split in ranks) else bin_snr([own[b] for own, _ in ranks if b in own], share)
                 for b, share in enumerate(shares.tolist()))
