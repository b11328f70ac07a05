"""What one update is said to have been: sums over micro-batches, reduced over ranks into `Stats`.

P prompts, G responses a prompt.
"""

from dataclasses import dataclass, field
from typing import Callable, Mapping, NamedTuple, Sequence

import numpy as np

from fastsched.groups import flat_groups
from fastsched.learn.objective import SUMS, LossSums, StepObjective
from fastsched.learn.snr import GradientSnr
from fastsched.types import Response, Stats, StepResult

DECILES = 10
QUANTILE_BINS, QUANTILE_RANGE = 4096, 16.0  # of token entropy: steps of 1/256 nat
AllReduce = Callable[..., np.ndarray]
NAN = float("nan")


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


class Steps(NamedTuple):
    """The optimizer steps of one batch."""

    results: Sequence[StepResult]
    drift: float  # ||theta - avg|| / ||avg|| after the last
    lr: float


@dataclass(frozen=True)
class Reduced:
    """Totals of all ranks."""

    sums: Mapping[str, float]
    deciles: np.ndarray  # [6, 10]: kept tokens, their entropy, their KL, all tokens, surprisal, tokens with surprisal
    largest_ratio: float

    def per_token(self, name: str) -> float:
        """Mean over kept tokens; NaN without one."""
        return self.sums[name] / self.sums["tokens"] if self.sums["tokens"] else NAN


def reduced(totals: Totals, responses: Sequence[Response], rewards: np.ndarray, stale: np.ndarray, all_reduce: AllReduce) -> Reduced:
    """Totals and what is counted of this rank's responses, stale [P * G] bool, over all ranks; every rank calls it."""
    deciles = np.concatenate([totals.deciles, _all_tokens(responses)])
    names = (*SUMS, "loss", "all_tokens", "flat", "groups", "stale", "responses")
    scalars = [*totals.sums, totals.loss, sum(len(r.token_ids) for r in responses), flat_groups(rewards).sum(), len(rewards),
               stale.sum(), len(responses)]
    values = all_reduce(np.concatenate([np.array(scalars, np.float64), deciles.ravel()]))
    largest = all_reduce(np.array([totals.largest_ratio], np.float64), "max")
    return Reduced(dict(zip(names, values.tolist(), strict=False)), values[len(names):].reshape(deciles.shape), float(largest[0]))


def stats_of(seen: Reduced, steps: Steps, objective: StepObjective, snr: GradientSnr, entropy_quantile: float) -> Stats:
    """What is logged of the batch; every rank calls it."""
    cfg, sums, norm = objective.learner, seen.sums, steps.results[-1].grad_norm
    corrected = lambda value: value if objective.corrects else NAN
    return Stats(
        loss=sums["loss"] / len(steps.results), entropy=seen.per_token("entropy"),
        kl=seen.per_token("kl") if objective.needs_reference else NAN, kl_kind="k1 to teacher" if cfg.teacher else cfg.kl,
        drift=steps.drift, grad_norm=norm, grad_snr=snr.ratio(norm), snr_bins=snr.by_bin(), clip_fraction=seen.per_token("clipped"),
        ratio_deviation=seen.per_token("deviation"), kept_fraction=sums["tokens"] / sums["all_tokens"] if sums["all_tokens"] else NAN,
        flat_groups=sums["flat"] / sums["groups"], skipped=sum(not r.applied for r in steps.results), lr=steps.lr,
        stale=sums["stale"] / sums["responses"], correction_mean=corrected(seen.per_token("rho")),
        correction_max=corrected(seen.largest_ratio), correction_capped=corrected(seen.per_token("capped")),
        correction_rejected=corrected(seen.per_token("rejected")), entropy_quantile=entropy_quantile, deciles=decile_columns(seen.deciles),
    )


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
