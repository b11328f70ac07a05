"""SEC (arXiv 2505.14970, algorithms.md 3): a bandit on the size of the advantages of each bin. K bins.

State: Q [K]. Shares of a batch are rounded systematically instead of drawing each prompt independently.
"""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.bins import BinSampler
from fastsched.control.window import Success
from fastsched.groups import group_advantages
from fastsched.types import Features, Outcomes

RATE = 0.5  # of Q towards a step's gain; published


class SecSampler(BinSampler):
    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.bandit = [0.0] * len(sizes)  # Q

    def weigh(self, success: Success) -> np.ndarray:
        return self.floored(softmax_weights(self.bandit, self.available, self.cfg.sec.temperature))

    def learn(self, outcomes: Outcomes) -> None:
        self.bandit = followed_gain(self.bandit, outcomes)


def softmax_weights(q: list[float], available: np.ndarray, temperature: float) -> np.ndarray:
    """[K] softmax(Q / temperature) over the bins that hold prompts."""
    scores = np.where(available, np.array(q) / temperature, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def followed_gain(q: list[float], outcomes: Outcomes) -> list[float]:
    """Q <- (1 - RATE) Q + RATE q, with q the mean |advantage| of the bin's scored responses and 0 for a bin without any."""
    scored = np.isfinite(outcomes.rewards).sum(1)
    total = np.abs(group_advantages(outcomes.rewards, normalise_std=True)).sum(1)
    sums, counts = (np.bincount(outcomes.bins, weights=values, minlength=len(q)) for values in (total, scored))
    gain = sums / np.maximum(counts, 1)
    return ((1 - RATE) * np.array(q) + RATE * gain).tolist()
