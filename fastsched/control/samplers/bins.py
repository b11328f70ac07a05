"""Which prompts come next: a weight for every bin, exact counts, rows without replacement.

A sampler has `weights` (those of its last draw), `draw(count, success) -> Selection`, `observe(outcomes, success)`,
`state_dict()` and `load_state_dict(state)`; what it decides depends on its state and on `success` alone. K bins, N rows,
P prompts.
"""

from typing import Optional, Union

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.samplers.ads import AdsSampler
from fastsched.control.samplers.bandits import adarft_observe, adarft_start, adarft_weights, sec_observe, sec_start, sec_weights
from fastsched.control.samplers.deck import Deck, apportion
from fastsched.control.samplers.dots import PredictingSampler
from fastsched.control.samplers.greso import SkippingSampler
from fastsched.control.samplers.learned import ProgressSampler
from fastsched.control.samplers.mopps import Posterior, PosteriorSampler
from fastsched.control.samplers.prompts import PromptSampler, one_part
from fastsched.control.samplers.replay import ReplaySampler
from fastsched.control.samplers.speed import ScreeningSampler
from fastsched.control.samplers.vcrl import VarianceSampler
from fastsched.control.window import Success, window_weights
from fastsched.types import Features, Outcomes, Selection

BANDITS = {"sec": (sec_start, sec_weights, sec_observe), "adarft": (adarft_start, adarft_weights, adarft_observe)}

PROMPT_SAMPLERS = {"mopps": PosteriorSampler, "greso": SkippingSampler, "vcrl": VarianceSampler, "replay": ReplaySampler,
                   "speed": ScreeningSampler, "dots": PredictingSampler, "learned": ProgressSampler}

Sampler = Union["BinSampler", PromptSampler, AdsSampler]


def make_sampler(cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Optional[Features] = None) -> Sampler:
    """The sampler of `scheduler.kind`; arguments as BinSampler's, and `features` for the kinds that need them."""
    if cfg.kind == "ads":
        return AdsSampler(cfg, bins, sizes, prompts, seed, features)
    if cfg.kind in PROMPT_SAMPLERS:
        return PROMPT_SAMPLERS[cfg.kind](cfg, bins, sizes, prompts, seed, features)
    return BinSampler(cfg, bins, sizes, prompts, seed)


def fixed_weights(sizes: np.ndarray, prompts: int, cfg: SchedulerConfig) -> np.ndarray:
    """[K] weights of `scheduler.fixed_weights`, equal over the bins that hold prompts by default; they sum to 1."""
    if cfg.fixed_weights is None:
        return (sizes > 0) / np.count_nonzero(sizes)
    weights = np.array(cfg.fixed_weights, dtype=np.float64)
    key = "scheduler.fixed_weights"
    require(len(weights) == len(sizes), f"{key}: {len(weights)} weights for {len(sizes)} difficulty bins")
    empty = np.flatnonzero((weights > 0) & (sizes == 0)).tolist()
    require(not empty, f"{key}: bins {empty} have weight but hold no prompt; set their weight to 0")
    held = int(sizes[weights > 0].sum())
    require(held >= prompts, f"{key}: the bins with weight hold {held} prompts, a batch needs {prompts} distinct ones; "
                             "lower train.prompts_per_step")
    return weights / weights.sum()


class BinSampler:
    """`adaptive`, `fixed`, `uniform`, `sec` and `adarft`: they differ in the bin weights only.

    Inside a bin prompts come in deck order or, with `scheduler.inside_bins posterior`, as MoPPS chooses them: of a random pool of the
    bin those whose sampled success is nearest to 1/2, and `weight_floor` of them in deck order.
    """

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int):
        """bins: [N] unsigned integers in [0, K); sizes: [K] int64; prompts: the batch size P, at most N."""
        self.cfg, self.sizes = cfg, sizes
        self.deck = Deck(bins, sizes, seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        equal = (sizes > 0) / np.count_nonzero(sizes)
        start = {"fixed": fixed_weights(sizes, prompts, cfg), "uniform": sizes / sizes.sum()}
        self.weights = start.get(cfg.kind, equal)
        self.bandit = BANDITS[cfg.kind][0](len(sizes)) if cfg.kind in BANDITS else []
        self.posterior = Posterior(len(bins), cfg.mopps.decay) if cfg.inside_bins == "posterior" else None
        self.drawn = np.zeros(0, np.int64)  # rows since the last `observe`

    def draw(self, count: int, success: Success) -> Selection:
        """`count` distinct rows in random order, so that every rank gets the same mix of difficulties."""
        if success.steps % self.cfg.update_every == 0:
            self.weights = self._weigh(success)
        counts = apportion(self.weights, count, self.sizes, self.rng.random())
        rows = self.rng.permutation(self._near_half(counts) if self.posterior else self.deck.draw_others(counts, self.drawn))
        self.drawn = np.concatenate([self.drawn, rows])
        return Selection(rows=rows, bins=self.deck.bins[rows].astype(np.int64))

    def notes(self) -> list[str]:
        return one_part(f"scheduler.kind {self.cfg.kind}", self.sizes) if self.cfg.kind in ("adaptive", *BANDITS) else []

    def _near_half(self, counts: np.ndarray) -> np.ndarray:
        """[sum(counts)] distinct rows, `counts[b]` of bin b: a share of the floor in deck order, the rest nearest to 1/2 of a pool."""
        floor = np.minimum((self.cfg.weight_floor * counts + self.rng.random(len(counts))).astype(np.int64), counts)
        rows, need = self.deck.draw_others(floor, self.drawn), counts - floor
        pool = self._pool(need, np.concatenate([self.deck.avoidable(counts, self.drawn), rows]))
        pool = pool[np.lexsort((self.posterior.distance(pool, self.rng), self.deck.bins[pool]))]
        bins = self.deck.bins[pool]
        place = np.arange(len(pool)) - np.searchsorted(bins, bins)
        return np.concatenate([rows, pool[place < need[bins]]])

    def _pool(self, need: np.ndarray, taken: np.ndarray) -> np.ndarray:
        """[M] distinct rows at random, none of `taken`, about `mopps.pool` times `need[b]` of bin b: all where a bin is that small."""
        bins = np.repeat(np.arange(len(need)), np.minimum(self.cfg.mopps.pool * need, self.sizes))
        index = self.deck.starts[bins] + (self.rng.random(len(bins)) * self.sizes[bins]).astype(np.int64)
        pool = np.setdiff1d(self.deck.rows[index], taken).astype(np.int64)
        few = np.flatnonzero(np.bincount(self.deck.bins[pool], minlength=len(need)) < need)
        if not len(few):
            return pool
        whole = [self.deck.rows[start:start + size] for start, size in zip(self.deck.starts[few], self.sizes[few], strict=True)]
        return np.union1d(pool, np.setdiff1d(np.concatenate(whole), taken)).astype(np.int64)

    def _weigh(self, success: Success) -> np.ndarray:
        available = self.sizes > 0
        if self.cfg.kind == "adaptive":
            return window_weights(success, available, self.cfg)
        if self.cfg.kind not in BANDITS:
            return self.weights
        weights = BANDITS[self.cfg.kind][1](self.bandit, available, self.cfg)
        return (1 - self.cfg.weight_floor) * weights + self.cfg.weight_floor * available / available.sum()

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        if self.cfg.kind in BANDITS:
            self.bandit = BANDITS[self.cfg.kind][2](self.bandit, outcomes, self.cfg)
        self.drawn = np.zeros(0, np.int64)
        if self.posterior:
            self.posterior.observe(outcomes, success.r_threshold)

    def state_dict(self) -> dict:
        return {"weights": self.weights.tolist(), "rng": self.rng.bit_generator.state, "deck": self.deck.state_dict(),
                "bandit": list(self.bandit), "drawn": self.drawn.tolist(),
                "posterior": self.posterior.state_dict() if self.posterior else None}

    def load_state_dict(self, state: dict) -> None:
        self.weights = np.array(state["weights"], dtype=np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.deck.load_state_dict(state["deck"])
        self.bandit = list(state["bandit"])
        self.drawn = np.array(state["drawn"], np.int64)
        if self.posterior:
            self.posterior.load_state_dict(state["posterior"])
