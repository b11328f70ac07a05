"""Formulas over the rewards of prompt groups that the scheduler and the learner share. P prompts, G responses; NumPy only."""

import numpy as np

ROUNDING = 1e-6
"""Relative difference of two rewards that are one number: 0.7 in fp32 and in fp64 differ by 2e-8, and 1e-6 is divided by next."""


def group_advantages(rewards: np.ndarray, *, normalise_std: bool) -> np.ndarray:
    """A = R - mean(R) over a prompt's responses, divided by (std + 1e-6) when `normalise_std` (GRPO, DAPO; not Dr.GRPO).

    In float64 with a two-pass variance (algorithms.md 5.2).

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
    """[P] bool: groups whose scored rewards [P, G] are all equal up to rounding (or none scored); they carry no policy gradient."""
    scored = np.isfinite(rewards)
    high = np.where(scored, rewards, -np.inf).max(1)
    low = np.where(scored, rewards, np.inf).min(1)
    return ~(high - low > ROUNDING * np.maximum(abs(high), abs(low)))


def successes(rewards: np.ndarray, r_threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """([P] scored responses above `r_threshold`, [P] scored responses) of rewards [P, G], NaN where there is no score."""
    scored = np.isfinite(rewards)
    return (scored & (rewards > r_threshold)).sum(1), scored.sum(1)


def successes_by_row(rows: np.ndarray, rewards: np.ndarray, r_threshold: float) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(distinct rows with a score, ascending, their successes, their scored responses); a row that occurs twice counts together."""
    good, scored = successes(rewards, r_threshold)
    distinct, place = np.unique(rows[scored > 0], return_inverse=True)
    total = lambda counts: np.bincount(place, weights=counts[scored > 0], minlength=len(distinct)).astype(np.int64)
    return distinct, total(good), total(scored)


def mixed_groups(rewards: np.ndarray, r_threshold: float) -> np.ndarray:
    """[P] bool: 0 < success rate < 1, the prompts that pass a screen (SPEED-RL, arXiv 2506.09016)."""
    good, scored = successes(rewards, r_threshold)
    return (good > 0) & (good < scored)


def without_unsolved(rewards: np.ndarray, r_threshold: float) -> np.ndarray:
    """[P, G] rewards with NaN for every response of a group without a reward above `r_threshold` (algorithms.md 2.4)."""
    return np.where(successes(rewards, r_threshold)[0][:, None] > 0, rewards, np.nan)
