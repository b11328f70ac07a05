import numpy as np
import pytest

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.greso import FLAT_SHARE, SkippingSampler
from fastsched.control.window import unknown_success
from fastsched.types import Outcomes

SIZES = np.array([40, 60])
BINS = np.repeat(np.arange(2), SIZES).astype(np.uint16)
UNKNOWN = unknown_success(2, 0.5)


def sampler():
    return SkippingSampler(SchedulerConfig(kind="greso"), BINS, SIZES, 10, 0)


def outcomes(rows, rewards):
    rewards = np.array(rewards, dtype=float)
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(np.array(rows), BINS[rows].astype(np.int64), rewards, counts, counts == 0)


def test_streaks_count_flat_visits_and_end_with_a_varied_one():
    """algorithms.md 3: P(keep) = max(p^z, 0.01), z the flat visits in a row, p_easy where solved and p_hard where not."""
    one = sampler()
    for rewards in ([[1, 1], [0, 0], [1, 0], [np.nan, 1]], [[1, 1], [0, 0], [1, 1], [np.nan, np.nan]]):
        one.observe(outcomes([3, 7, 8, 9], rewards), UNKNOWN)
    assert one.streak[[3, 7, 8, 9, 0]].tolist() == [2, -2, 1, 1, 0]
    one.easy, one.hard = 0.5, 0.3
    assert one.keep_probability(np.array([3, 7, 8, 0])) == pytest.approx([0.25, 0.09, 0.5, 1.0])
    one.streak[3] = 100
    assert one.keep_probability(np.array([3])) == pytest.approx([0.01])
    one.observe(outcomes([3], [[1, 0]]), UNKNOWN)
    assert one.streak[3] == 0


def test_probabilities_move_towards_the_share_of_flat_groups():
    one = sampler()
    assert FLAT_SHARE == 0.25  # 1/12 easy, 1/6 hard
    one.observe(outcomes([0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [[1, 1]] + [[0, 0]] + [[1, 0]] * 8), UNKNOWN)  # a tenth of either
    assert (one.easy, one.hard) == (pytest.approx(0.49), pytest.approx(0.51))
    for _ in range(100):
        one.observe(outcomes([0, 1], [[1, 1], [1, 1]]), UNKNOWN)
    assert (one.easy, one.hard) == (pytest.approx(0.05), pytest.approx(0.95))


def test_flat_prompts_come_rarely_and_still_come():
    one, times = sampler(), np.zeros(100)
    one.streak[:50] = 20
    for _ in range(400):
        drawn = one.draw(10, UNKNOWN)
        assert len(set(drawn.rows.tolist())) == 10
        np.testing.assert_array_equal(drawn.bins, BINS[drawn.rows])
        times[drawn.rows] += 1
    assert times[:50].sum() < 0.1 * times[50:].sum() and times[50:].min() > 0 and times[:50].sum() > 0


def test_a_set_of_flat_prompts_only_still_fills_the_batch():
    one = sampler()
    one.streak[:] = -127
    assert len(set(one.draw(10, UNKNOWN).rows.tolist())) == 10
