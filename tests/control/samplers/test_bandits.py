import math

import numpy as np
import pytest

from fastsched.config import AdaRFTConfig, SchedulerConfig, SecConfig
from fastsched.control.samplers.bandits import adarft_observe, adarft_start, adarft_weights, sec_observe, sec_start, sec_weights
from fastsched.types import Outcomes

ALL = np.ones(4, bool)


def outcomes(bins, rewards):
    rewards = np.array(rewards, dtype=np.float64)
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(np.arange(len(bins)), np.array(bins), rewards, counts, counts == 0)


def test_sec_moves_towards_the_mean_size_of_the_advantages():
    """algorithms.md 3: a group half right has |A| = 1, a flat one 0; a bin without a prompt decays."""
    cfg = SchedulerConfig(kind="sec", sec=SecConfig(rate=0.5, temperature=1.0))
    q = sec_observe(sec_start(4), outcomes([0, 1, 1], [[1, 0, 1, 0], [1, 1, 1, 1], [0, 0, 1, 1]]), cfg)
    assert q == pytest.approx([0.5, 0.25, 0.0, 0.0], abs=1e-5)
    q = sec_observe(q, outcomes([3], [[1, 0, 0, 0]]), cfg)
    assert q == pytest.approx([0.25, 0.125, 0.0, 0.5 * (0.75 / math.sqrt(3 / 16) + 3 * 0.25 / math.sqrt(3 / 16)) / 4], abs=1e-5)


def test_sec_draws_by_softmax_over_bins_with_prompts():
    cfg = SchedulerConfig(kind="sec", sec=SecConfig(temperature=0.5))
    weights = sec_weights([1.0, 0.5, 9.0, 0.0], np.array([True, True, False, True]), cfg)
    assert weights == pytest.approx(np.exp([2, 1, -np.inf, 0]) / np.exp([2, 1, 0]).sum())


def test_failed_scores_do_not_reach_the_bandits():
    cfg = SchedulerConfig(kind="sec")
    seen = sec_observe(sec_start(2), outcomes([0, 1], [[1, 0, np.nan, np.nan], [np.nan] * 4]), cfg)
    assert seen == pytest.approx([0.5, 0.0], abs=1e-5)  # two responses of |A| = 1; two failed, and say nothing
    more = sec_observe(sec_start(2), outcomes([0, 0, 1], [[1, 0, np.nan, np.nan], [np.nan] * 4, [1, 1, 1, 0]]), cfg)
    assert more == pytest.approx([0.5, 0.5 * 3**0.5 / 2], abs=1e-5)
    assert adarft_observe([30.0], outcomes([0], [[np.nan, np.nan]]), cfg) == [30.0]


def test_adarft_target_follows_the_mean_reward_within_its_scale():
    """algorithms.md 3: T' = T + 50 tanh(2 (R - 0.5))."""
    cfg = SchedulerConfig(kind="adarft", adarft=AdaRFTConfig())
    target = adarft_observe(adarft_start(4), outcomes([0, 0], [[1, 1], [1, 0]]), cfg)
    assert target == pytest.approx([50 * math.tanh(0.5)])
    assert adarft_observe([90.0], outcomes([0], [[1, 1]]), cfg) == [100.0]
    assert adarft_observe([10.0], outcomes([0], [[0, 0]]), cfg) == [0.0]


@pytest.mark.parametrize("target, available, weights", [
    (0.0, ALL, [1, 0, 0, 0]), (100.0, ALL, [0, 0, 0, 1]), (40.0, ALL, [0, 1, 0, 0]), (50.0, ALL, [0, 0.5, 0.5, 0]),
    (0.0, np.array([False, True, True, True]), [0, 1, 0, 0]),
])
def test_adarft_takes_the_nearest_difficulty(target, available, weights):
    assert adarft_weights([target], available, SchedulerConfig()) == pytest.approx(weights)
