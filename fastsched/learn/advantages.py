"""Group advantages (algorithms.md 5.2), in float64, two-pass variance."""

import numpy as np


def group_advantages(rewards: np.ndarray, *, normalise_std: bool) -> np.ndarray:
    """A = R - mean(R) over a prompt's responses, divided by (std + 1e-6) when `normalise_std` (GRPO, DAPO; not Dr.GRPO).

    Args:
        rewards: [P, G] float64; NaN where scoring failed. Failed responses count neither in the mean nor in the deviation.
    Returns:
        [P, G] float64, finite; 0 where scoring failed and in groups without two different rewards.
    """
    scored = np.isfinite(rewards)
    count = np.maximum(scored.sum(1, keepdims=True), 1)
    mean = np.where(scored, rewards, 0.0).sum(1, keepdims=True) / count
    centred = np.where(scored, rewards - mean, 0.0)
    centred[flat_groups(rewards)] = 0.0
    if not normalise_std:
        return centred
    std = np.sqrt((centred**2).sum(1, keepdims=True) / count)
    return centred / (std + 1e-6)


def flat_groups(rewards: np.ndarray) -> np.ndarray:
    """[P] bool: groups whose scored rewards [P, G] are all equal (or none scored); they carry no policy gradient."""
    scored = np.isfinite(rewards)
    high = np.where(scored, rewards, -np.inf).max(1)
    low = np.where(scored, rewards, np.inf).min(1)
    return ~(high > low)


def without_unsolved(rewards: np.ndarray, r_threshold: float) -> np.ndarray:
    """[P, G] rewards with NaN for every response of a group without a reward above `r_threshold` (algorithms.md 2.4)."""
    solved = (np.where(np.isfinite(rewards), rewards, -np.inf) > r_threshold).any(1, keepdims=True)
    return np.where(solved, rewards, np.nan)
