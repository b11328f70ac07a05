"""Past prompts drawn again when success leaves the window: easy ones while it is low, hard ones while it is high.

State: the memory of past prompts, nothing a prompt.
"""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.window import Success, in_window, informativeness
from fastsched.groups import successes_by_row
from fastsched.types import Features, Outcomes, Selection


class ReplaySampler(PromptSampler):
    """Deck order; outside the window, `share` of the batch comes from memory, and none once success is inside again."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.memory: dict[int, float] = {}  # row -> its last success rate, the longest unvisited first

    def draw(self, count: int, success: Success) -> Selection:
        again = self._again(self.dithered(self.cfg.replay.share * count), success)
        return self.selection(np.concatenate([again, self.in_order(count - len(again), again)]))

    def _again(self, count: int, success: Success) -> np.ndarray:
        """At most `count` past rows on the other side of the window's centre, with weights exp(4 p (1 - p) / T), by Gumbel top-k."""
        if success.ema is None or in_window(success.ema, self.cfg.window):
            return np.zeros(0, np.int64)
        centre = sum(self.cfg.window) / 2
        rows, p = np.array(list(self.memory), np.int64), np.array(list(self.memory.values()))
        helps = (p > centre if success.ema < centre else p < centre) & ~np.isin(rows, self.avoided(count, np.zeros(0, np.int64)))
        rows, p = rows[helps], p[helps]
        with np.errstate(divide="ignore"):
            keys = np.log(informativeness(p, self.cfg.informativeness_temperature)) + self.rng.gumbel(size=len(p))
        return rows[np.argsort(-keys, kind="stable")[:count]]

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Prompts without a score keep what was known."""
        rows, good, scored = successes_by_row(outcomes.rows, outcomes.rewards, success.r_threshold)
        for row, p in zip(rows.tolist(), (good / scored).tolist(), strict=True):
            self.memory.pop(row, None)
            self.memory[row] = p
        for row in list(self.memory)[:max(len(self.memory) - self.cfg.replay.memory, 0)]:
            del self.memory[row]

    def own_state(self) -> dict:
        return {"memory": [list(entry) for entry in self.memory.items()]}

    def load_own_state(self, state: dict) -> None:
        self.memory = dict(state["memory"])
