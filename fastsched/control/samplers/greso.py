"""GRESO (arXiv 2506.02177, algorithms.md 3): prompts whose last groups had equal rewards are skipped with rising probability.

N prompts, P of them a batch. State: one byte a prompt beside the deck's.
"""

import numpy as np

from fastsched.arrays import from_text, to_text
from fastsched.config import SchedulerConfig
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes, Selection

LEAST = 0.01  # probability with which a prompt is drawn however often it was flat
STEP, LOW, HIGH = 0.01, 0.05, 0.95  # one move of p_easy and p_hard, and their bounds
FLAT_SHARE = 0.25  # of the groups of a batch aimed at; published
EASY_SHARE = 1 / 3  # of the flat prompts aimed at; the rest are hard
CANDIDATES = 64  # for each prompt of a batch, at most every row once, before the batch is filled up without skipping


class SkippingSampler(PromptSampler):
    """Deck order; a prompt flat in its last z visits is kept with probability max(p^z, 0.01), p by whether it was solved."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.streak = np.zeros(len(bins), np.int8)  # visits in a row with equal rewards; negative where the last was unsolved
        self.easy = self.hard = 0.5

    def draw(self, count: int, success: Success) -> Selection:
        rows, offered = np.zeros(0, np.int64), 0
        while len(rows) < count and offered < min(len(self.bins), CANDIDATES * count):
            found = self.in_order(count - len(rows), rows)
            offered += len(found)
            found = np.sort(found)
            rows = np.concatenate([rows, found[self.rng.random(len(found)) < self.keep_probability(found)]])
        if len(rows) < count:
            rest = np.setdiff1d(np.arange(len(self.bins)), self.avoided(count - len(rows), rows))
            rows = np.concatenate([rows, self.rng.permutation(rest)[:count - len(rows)]])
        return self.selection(rows)

    def keep_probability(self, rows: np.ndarray) -> np.ndarray:
        streak = self.streak[rows].astype(np.int64)
        return np.maximum(np.where(streak < 0, self.hard, self.easy) ** np.abs(streak), LEAST)

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Groups without a score change nothing. p_easy and p_hard move towards FLAT_SHARE of flat groups."""
        scored = np.isfinite(outcomes.rewards)
        some = scored.any(1)
        rows, rewards, scored = outcomes.rows[some], outcomes.rewards[some], scored[some]
        if not some.any():
            return
        best = np.where(scored, rewards, -np.inf).max(1)
        flat, solved = best == np.where(scored, rewards, np.inf).min(1), best > success.r_threshold
        for row, is_flat, is_solved in zip(rows.tolist(), flat.tolist(), solved.tolist(), strict=True):
            length = min(abs(int(self.streak[row])) + 1, 127) if is_flat else 0
            self.streak[row] = length if is_solved else -length
        self.easy = self._moved(self.easy, np.mean(flat & solved), FLAT_SHARE * EASY_SHARE)
        self.hard = self._moved(self.hard, np.mean(flat & ~solved), FLAT_SHARE * (1 - EASY_SHARE))

    @staticmethod
    def _moved(p: float, seen: float, wanted: float) -> float:
        return float(min(max(p + (STEP if seen < wanted else -STEP), LOW), HIGH))

    def own_state(self) -> dict:
        """The streaks of the prompts that have one."""
        seen = np.flatnonzero(self.streak)
        return {"easy": self.easy, "hard": self.hard, "seen": to_text(seen, "<i4"), "streak": to_text(self.streak[seen], "<i1")}

    def load_own_state(self, state: dict) -> None:
        self.easy, self.hard = state["easy"], state["hard"]
        self.streak.fill(0)
        self.streak[from_text(state["seen"], "<i4")] = from_text(state["streak"], "<i1")
