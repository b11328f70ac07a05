"""Samplers of the literature that weigh difficulty bins: SEC and AdaRFT (algorithms.md 3). K bins.

Each has a JSON-able `state`, `weights(available, cfg)` [K] that sum to 1 and `observe(state, outcomes, cfg)`; pure functions.
"""

import math

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.groups import group_advantages
from fastsched.types import Outcomes


def sec_start(bins: int) -> list[float]:
    """Q_0 = 0 for every bin."""
    return [0.0] * bins


def sec_weights(q: list[float], available: np.ndarray, cfg: SchedulerConfig) -> np.ndarray:
    """SEC (arXiv 2505.14970): softmax(Q / temperature) over the bins that hold prompts."""
    scores = np.where(available, np.array(q) / cfg.sec.temperature, -np.inf)
    weights = np.exp(scores - scores.max())
    return weights / weights.sum()


def sec_observe(q: list[float], outcomes: Outcomes, cfg: SchedulerConfig) -> list[float]:
    """Q <- (1 - rate) Q + rate q, with q the mean |advantage| of the bin's scored responses and 0 for a bin without any."""
    scored = np.isfinite(outcomes.rewards).sum(1)
    total = np.abs(group_advantages(outcomes.rewards, normalise_std=True)).sum(1)
    sums, counts = (np.bincount(outcomes.bins, weights=values, minlength=len(q)) for values in (total, scored))
    gain = sums / np.maximum(counts, 1)
    return ((1 - cfg.sec.rate) * np.array(q) + cfg.sec.rate * gain).tolist()


def adarft_start(bins: int) -> list[float]:
    """The target difficulty T_0 = 0."""
    return [0.0]


def adarft_weights(target: list[float], available: np.ndarray, cfg: SchedulerConfig) -> np.ndarray:
    """AdaRFT (arXiv 2504.05520): the prompts nearest to the target difficulty; K bins lie evenly on its scale of 0 to 100."""
    difficulty = np.linspace(0.0, 100.0, len(available)) if len(available) > 1 else np.zeros(1)
    distance = np.where(available, np.abs(difficulty - target[0]), np.inf)
    nearest = np.isclose(distance, distance.min())
    return nearest / nearest.sum()


def adarft_observe(target: list[float], outcomes: Outcomes, cfg: SchedulerConfig) -> list[float]:
    """T <- clip(T + eta tanh(alpha (R - beta)), 0, 100), R the mean reward; a batch without a score leaves T."""
    scored = outcomes.rewards[np.isfinite(outcomes.rewards)]
    if scored.size == 0:
        return target
    moved = target[0] + cfg.adarft.eta * math.tanh(cfg.adarft.alpha * (float(scored.mean()) - cfg.adarft.beta))
    return [min(max(moved, 0.0), 100.0)]
