"""Samplers that weigh difficulty bins: exact counts a bin, rows without replacement. K bins, N rows, P prompts."""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.deck import Deck, apportion
from fastsched.control.samplers.mopps import Posterior
from fastsched.control.samplers.prompts import one_part
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes, Selection


class BinSampler:
    """Base of the samplers that differ in the bin weights only: `start`, `weigh` and `learn`; as it stands, equal weights.

    Inside a bin prompts come in deck order or, with `scheduler.inside_bins posterior`, as MoPPS chooses them: of a random pool of the
    bin those whose sampled success is nearest to 1/2, and `weight_floor` of them in deck order.
    """

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        """bins: [N] unsigned integers in [0, K); sizes: [K] int64; prompts: the batch size P, at most N. `features` are not used."""
        self.cfg, self.sizes, self.available = cfg, sizes, sizes > 0
        self.deck = Deck(bins, sizes, seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = self.start(prompts)
        self.bandit: list[float] = []  # what `learn` knows
        self.posterior = Posterior(len(bins), cfg.mopps.decay) if cfg.inside_bins == "posterior" else None
        self.drawn = np.zeros(0, np.int64)  # rows since the last `observe`

    def start(self, prompts: int) -> np.ndarray:
        """[K] weights before anything is known, for batches of P; equal over the bins that hold prompts."""
        return self.available / np.count_nonzero(self.available)

    def weigh(self, success: Success) -> np.ndarray:
        """[K] weights, which sum to 1; asked for every `update_every` steps."""
        return self.weights

    def learn(self, outcomes: Outcomes) -> None:
        """Take in a step."""

    def fixed_options(self) -> dict:
        """JSON of the options that give the state its meaning, by key: a resumed run needs the same."""
        return {}

    def notes(self) -> list[str]:
        """What differs from what the configuration seems to ask for, for the log."""
        return one_part(f"scheduler.kind {self.cfg.kind}", self.sizes) if self.cfg.traits.weights_move else []

    def floored(self, weights: np.ndarray) -> np.ndarray:
        """[K] `weight_floor` of the batch spread evenly over the bins that hold prompts, the rest by `weights`."""
        return (1 - self.cfg.weight_floor) * weights + self.cfg.weight_floor * self.available / self.available.sum()

    def draw(self, count: int, success: Success) -> Selection:
        """`count` distinct rows in random order, so that every rank gets the same mix of difficulties."""
        if success.steps % self.cfg.update_every == 0:
            self.weights = self.weigh(success)
        counts = apportion(self.weights, count, self.sizes, self.rng.random())
        rows = self.rng.permutation(self._near_half(counts) if self.posterior else self.deck.draw_others(counts, self.drawn))
        self.drawn = np.concatenate([self.drawn, rows])
        return Selection(rows=rows, bins=self.deck.bins[rows].astype(np.int64))

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        self.learn(outcomes)
        self.drawn = np.zeros(0, np.int64)
        if self.posterior:
            self.posterior.observe(outcomes, success.r_threshold)

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
