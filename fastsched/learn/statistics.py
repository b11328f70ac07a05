"""What one update is said to have been: sums over micro-batches, reduced over ranks into `Stats`.

P prompts, G responses a prompt.
"""

from dataclasses import dataclass, field
from typing import Callable, Sequence

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


def snr(squares: Sequence[float], micro_batches: Sequence[MicroBatch], grad_norm: float, all_gather: Callable[[object], list]) -> float:
    """Gradient SNR over the micro-batches of all ranks; dummies are left out."""
    own = list(zip(squares, (m.groups for m in micro_batches), strict=True))
    pairs = [pair for rank in all_gather(own) for pair in rank if pair[1]]
    return gradient_snr(np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs]), grad_norm)


def snr_by_bin(squares: Sequence[float], micro_batches: Sequence[MicroBatch], totals: dict[int, float], bins: int,
               all_gather: Callable[[object], list]) -> tuple[float, ...]:
    """The same within each of `bins` difficulty bins; `totals` holds this rank's squared norm of each bin's summed gradient."""
    own = {}
    for b, total in totals.items():
        rows = [(s, m.groups) for s, m in zip(squares, micro_batches, strict=True) if m.bin == b and m.groups]
        own[b] = BinGradients(np.array([s for s, _ in rows]), np.array([n for _, n in rows]), total)
    ranks = all_gather(own)
    return tuple(bin_snr([rank[b] for rank in ranks if b in rank]) for b in range(bins))
