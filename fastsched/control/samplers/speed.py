"""SPEED-RL (arXiv 2506.09016, algorithms.md 3): how many candidates to screen. What becomes of them: loop/batches.py.

State: one number.
"""

import math
from dataclasses import replace

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.smoothing import smooth
from fastsched.control.window import Success
from fastsched.groups import mixed_groups
from fastsched.types import Features, Outcomes, Selection

FIRST_PASS_RATE = 0.5


class ScreeningSampler(PromptSampler):
    """Candidates in deck order, `screen` responses each, as many as the share that passes the screen asks for."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.pass_rate: float | None = None  # smoothed share of candidates with 0 < success rate < 1

    def candidates(self, count: int) -> int:
        """Of which about `count` will pass: ceil(count / pass rate), at most `speed.candidates` times `count`."""
        rate = FIRST_PASS_RATE if self.pass_rate is None else self.pass_rate
        most = min(self.cfg.speed.candidates * count, len(self.bins))
        return min(most, math.ceil(count / rate)) if rate > 0 else most

    def draw(self, count: int, success: Success) -> Selection:
        """`candidates(count)` distinct rows."""
        chosen = self.selection(self.in_order(self.candidates(count), np.zeros(0, np.int64)))
        return replace(chosen, responses=np.full(len(chosen.rows), self.cfg.speed.screen, np.int64))

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Only candidates with a score count; those that were continued have been counted before."""
        screened = np.isfinite(outcomes.rewards).any(1)
        if outcomes.continued is not None:
            screened &= ~outcomes.continued
        if screened.any():
            passed = mixed_groups(outcomes.rewards[screened], success.r_threshold)
            self.pass_rate = smooth(self.pass_rate, float(passed.mean()), self.cfg.success_beta)

    def own_state(self) -> dict:
        return {"pass_rate": self.pass_rate}

    def load_own_state(self, state: dict) -> None:
        self.pass_rate = state["pass_rate"]
