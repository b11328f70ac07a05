import math

import numpy as np
import pytest

from fastsched.control.samplers.adarft import followed_reward, nearest_weights
from fastsched.control.samplers.sec import followed_gain, softmax_weights
from fastsched.types import Outcomes

ALL = np.ones(4, bool)


def outcomes(bins, rewards):
    rewards = np.array(rewards, dtype=np.float64)
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(np.arange(len(bins)), np.array(bins), rewards, counts, counts == 0)


def test_sec_moves_towards_the_mean_size_of_the_advantages():
    """algorithms.md 3: a group half right has |A| = 1, a flat one 0; a bin without a prompt decays."""
    q = followed_gain([0.0] * 4, outcomes([0, 1, 1], [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]))
    assert q == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=1e-5)
    q = followed_gain(q, outcomes([3], [[1, 0, 0, 0]]))
    assert q == pytest.approx([0.25, 0.125, 0.0, 0.5 * (0.75 / math.sqrt(3 / 16) + 3 * 0.25 / math.sqrt(3 / 16)) / 4], abs=1e-5)


def test_sec_draws_by_softmax_over_bins_with_prompts():
    weights = softmax_weights([1.0, 0.5, 9.0, 0.0], np.array([True, True, False, True]), 0.5)
    assert weights == pytest.approx(np.exp([2, 1, -np.inf, 0]) / np.exp([2, 1, 0]).sum())


def test_failed_scores_do_not_reach_the_bandits():
    seen = followed_gain([0.0] * 2, outcomes([0, 1], [[1, 0, np.nan, np.nan], [np.nan] * 4]))
    assert seen == pytest.approx([0.5, 0.0], abs=1e-5)  # two responses of |A| = 1; two failed, and say nothing
    more = followed_gain([0.0] * 2, outcomes([0, 0, 1], [[1, 0, np.nan, np.nan], [np.nan] * 4, [1, 1, 1, 0]]))
    assert more == pytest.approx([0.5, 0.5 * 3**0.5 / 2], abs=1e-5)
    assert followed_reward(30.0, outcomes([0], [[np.nan, np.nan]])) == 30.0


def test_adarft_target_follows_the_mean_reward_within_its_scale():
    """algorithms.md 3: T' = T + 50 tanh(2 (R - 0.5))."""
    assert followed_reward(0.0, outcomes([0, 0], [[1, 1], [1, 0]])) == pytest.approx(50 * math.tanh(0.5))
    assert followed_reward(90.0, outcomes([0], [[1, 1]])) == 100.0
    assert followed_reward(10.0, outcomes([0], [[0, 0]])) == 0.0


@pytest.mark.parametrize("target, available, weights", [
    (0.0, ALL, [1, 0, 0, 0]), (100.0, ALL, [0, 0, 0, 1]), (40.0, ALL, [0, 1, 0, 0]), (50.0, ALL, [0, 0.5, 0.5, 0]),
    (0.0, np.array([False, True, True, True]), [0, 1, 0, 0]),
])
def test_adarft_takes_the_nearest_difficulty(target, available, weights):
    assert nearest_weights(target, available) == pytest.approx(weights)
