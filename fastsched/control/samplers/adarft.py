"""AdaRFT (arXiv 2504.05520, algorithms.md 3): a target difficulty that follows the mean reward. K bins.

State: the target T. The difficulty scale of 0 to 100 is the bins, evenly.
"""

import math

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.bins import BinSampler
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes

HARDEST = 100.0
ETA, ALPHA, BETA = 50.0, 2.0, 0.5  # published: size and sharpness of a move of the target, mean reward at which it stays


class AdaRFTSampler(BinSampler):
    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.bandit = [0.0]  # T

    def weigh(self, success: Success) -> np.ndarray:
        return self.floored(nearest_weights(self.bandit[0], self.available))

    def learn(self, outcomes: Outcomes) -> None:
        self.bandit = [followed_reward(self.bandit[0], outcomes)]


def nearest_weights(target: float, available: np.ndarray) -> np.ndarray:
    """[K] equal weights of the bins with prompts that are nearest to the target difficulty."""
    difficulty = np.linspace(0.0, HARDEST, len(available)) if len(available) > 1 else np.zeros(1)
    distance = np.where(available, np.abs(difficulty - target), np.inf)
    nearest = np.isclose(distance, distance.min())
    return nearest / nearest.sum()


def followed_reward(target: float, outcomes: Outcomes) -> float:
    """T <- clip(T + ETA tanh(ALPHA (R - BETA)), 0, 100), R the mean reward; a batch without a score leaves T."""
    scored = outcomes.rewards[np.isfinite(outcomes.rewards)]
    if scored.size == 0:
        return target
    moved = target + ETA * math.tanh(ALPHA * (float(scored.mean()) - BETA))
    return min(max(moved, 0.0), HARDEST)
