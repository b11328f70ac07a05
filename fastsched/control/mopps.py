"""MoPPS (arXiv 2507.04632, algorithms.md 3): a Beta posterior of success for every prompt, Thompson sampling towards one half.

N prompts, P of them a batch. State: 8 bytes a prompt for the posterior beside the deck's.
"""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.deck import Deck
from fastsched.control.window import Success
from fastsched.types import Outcomes, Selection

PRIOR = 1.0


class PosteriorSampler:
    """Of a random pool, the prompts whose sampled success is nearest to 1/2; `weight_floor` of the batch comes in deck order."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int):
        """As samplers.BinSampler."""
        self.cfg, self.sizes = cfg, sizes
        self.deck = Deck(np.zeros_like(bins), np.array([len(bins)]), seed)
        self.bins = bins
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.wins, self.losses = (np.full(len(bins), PRIOR, np.float32) for _ in range(2))
        self.weights = sizes / sizes.sum()

    def draw(self, count: int, success: Success) -> Selection:
        """`count` distinct rows in random order; `weights` become the bins' shares of this batch."""
        in_order = self.deck.draw(np.array([int(self.cfg.weight_floor * count + self.rng.random())]))
        pool = self._pool(min(self.cfg.mopps.pool * count, len(self.bins)), in_order)
        sampled = self.rng.beta(self.wins[pool], self.losses[pool])
        need = count - len(in_order)
        nearest = np.argpartition(np.abs(sampled - 0.5), need - 1)[:need] if need < len(pool) else np.arange(len(pool))
        rows = self.rng.permutation(np.concatenate([in_order, pool[nearest]]))
        bins = self.bins[rows].astype(np.int64)
        self.weights = np.bincount(bins, minlength=len(self.sizes)) / count
        return Selection(rows=rows, bins=bins)

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        """a <- decay a + (1 - decay) + s, b <- decay b + (1 - decay) + (k - s), of k scored responses s successes."""
        finite, decay = np.isfinite(outcomes.rewards), self.cfg.mopps.decay
        good = (finite & (outcomes.rewards > success.r_threshold)).sum(1)
        rows, place = np.unique(outcomes.rows, return_inverse=True)  # a refilled step may roll a prompt out twice
        for counts, new in ((self.wins, good), (self.losses, finite.sum(1) - good)):
            counts[rows] = decay * counts[rows] + (1 - decay) * PRIOR + np.bincount(place, weights=new)

    def _pool(self, size: int, taken: np.ndarray) -> np.ndarray:
        """[size or what is left] distinct rows, none of `taken`."""
        total = len(self.bins)
        if total <= 4 * size:
            return self.rng.permutation(np.setdiff1d(np.arange(total), taken))[:size]
        found = np.zeros(0, np.int64)
        while len(found) < size:
            more = np.setdiff1d(self.rng.integers(0, total, 2 * size), taken)
            found = np.union1d(found, more)
        return self.rng.permutation(found)[:size]

    def state_dict(self) -> dict:
        """The posterior of the prompts that were seen; the others have the prior."""
        seen = np.flatnonzero((self.wins != PRIOR) | (self.losses != PRIOR))
        return {"weights": self.weights.tolist(), "rng": self.rng.bit_generator.state, "deck": self.deck.state_dict(),
                "seen": seen.tolist(), "wins": self.wins[seen].tolist(), "losses": self.losses[seen].tolist()}

    def load_state_dict(self, state: dict) -> None:
        self.weights = np.array(state["weights"], dtype=np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.deck.load_state_dict(state["deck"])
        self.wins.fill(PRIOR)
        self.losses.fill(PRIOR)
        self.wins[state["seen"]], self.losses[state["seen"]] = state["wins"], state["losses"]
