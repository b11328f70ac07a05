"""MoPPS (arXiv 2507.04632, algorithms.md 3): a Beta posterior of success for every prompt, Thompson sampling towards one half.

N prompts, P of them a batch. State: 8 bytes a prompt for the posterior beside the deck's.
"""

import numpy as np

from fastsched.arrays import from_text, to_text
from fastsched.config import SchedulerConfig
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.window import Success
from fastsched.groups import successes_by_row
from fastsched.types import Features, Outcomes, Selection

PRIOR = 1.0


class Posterior:
    """Beta(wins, losses) of the success of each of `size` prompts."""

    def __init__(self, size: int, decay: float):
        self.decay = decay
        self.wins, self.losses = (np.full(size, PRIOR, np.float32) for _ in range(2))

    def distance(self, rows: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """[M] distance of a sampled success of each of `rows` ([M]) to 1/2."""
        return np.abs(rng.beta(self.wins[rows], self.losses[rows]) - 0.5)

    def observe(self, outcomes: Outcomes, r_threshold: float) -> None:
        """a <- decay a + (1 - decay) + s, b <- decay b + (1 - decay) + (k - s), of k scored responses s successes."""
        rows, good, scored = successes_by_row(outcomes.rows, outcomes.rewards, r_threshold)
        for counts, new in ((self.wins, good), (self.losses, scored - good)):
            counts[rows] = self.decay * counts[rows] + (1 - self.decay) * PRIOR + new

    def state_dict(self) -> dict:
        """The posterior of the prompts that were seen; the others have the prior."""
        seen = np.flatnonzero((self.wins != PRIOR) | (self.losses != PRIOR))
        return {"seen": to_text(seen, "<i4"), "wins": to_text(self.wins[seen], "<f4"), "losses": to_text(self.losses[seen], "<f4")}

    def load_state_dict(self, state: dict) -> None:
        self.wins.fill(PRIOR)
        self.losses.fill(PRIOR)
        seen = from_text(state["seen"], "<i4")
        self.wins[seen], self.losses[seen] = (from_text(state[name], "<f4") for name in ("wins", "losses"))


class PosteriorSampler(PromptSampler):
    """Of a random pool, the prompts whose sampled success is nearest to 1/2; `weight_floor` of the batch comes in deck order."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.posterior = Posterior(len(bins), cfg.mopps.decay)

    def draw(self, count: int, success: Success) -> Selection:
        in_order = self.in_order(self.dithered(self.cfg.weight_floor * count), np.zeros(0, np.int64))
        need = count - len(in_order)
        pool = self.pool(min(self.cfg.mopps.pool * count, len(self.bins)), in_order, need)
        distance = self.posterior.distance(pool, self.rng)
        nearest = np.argpartition(distance, need - 1)[:need] if 0 < need < len(pool) else np.arange(need)
        return self.selection(np.concatenate([in_order, pool[nearest]]))

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        self.posterior.observe(outcomes, success.r_threshold)

    def own_state(self) -> dict:
        return self.posterior.state_dict()

    def load_own_state(self, state: dict) -> None:
        self.posterior.load_state_dict(state)
