from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import SchedulerConfig
from fastsched.control.smoothing import smooth
from fastsched.control.window import (
    in_window,
    informativeness,
    inner_band,
    move_threshold,
    observe_success,
    out_of_reach,
    reachable,
    tilt,
    unknown_success,
    window_weights,
)
from fastsched.types import Outcomes

CFG = SchedulerConfig()
ALL = np.ones(4, dtype=bool)


def outcomes(bins, rewards):
    rewards = np.array(rewards, dtype=float)
    return Outcomes(rows=np.arange(len(bins)), bins=np.array(bins, dtype=np.int64), rewards=rewards,
                    lengths=np.ones(rewards.shape, np.int64), truncated=np.zeros(rewards.shape, bool))


def known(p, **changes):
    return replace(unknown_success(len(p), 0.5), bins=tuple(p), tried=(True,) * len(p), **changes)


def test_smoothing_starts_from_the_first_value_and_skips_what_is_not_finite():
    assert smooth(None, 0.8, 0.9) == 0.8
    assert smooth(0.8, 0.0, 0.9) == pytest.approx(0.72)
    assert smooth(0.8, float("nan"), 0.9) == 0.8 and smooth(None, float("inf"), 0.9) is None


def test_success_starts_from_the_first_batch_and_is_smoothed_after():
    one = observe_success(unknown_success(2, 0.5), outcomes([0, 1], [[1, 1], [1, 0]]), CFG)
    assert (one.last, one.ema, one.bins) == (0.75, 0.75, (1.0, 0.5))
    two = observe_success(one, outcomes([0, 1], [[0, 0], [0, 0]]), CFG)
    assert two.last == 0.0 and two.ema == pytest.approx(0.675) and two.bins == pytest.approx((0.9, 0.45))
    quick = observe_success(one, outcomes([0, 1], [[0, 0], [0, 0]]), SchedulerConfig(success_beta=0.5))
    assert quick.ema == pytest.approx(0.375)


def test_bins_without_a_score_keep_what_was_known():
    one = observe_success(unknown_success(3, 0.5), outcomes([0, 0], [[1, 0], [1, 1]]), CFG)
    two = observe_success(one, outcomes([1, 2], [[1, 0], [np.nan, np.inf]]), CFG)
    assert two.bins == (0.75, 0.5, None)
    assert (two.wins[0], two.wins[2], two.losses[2]) == (one.wins[0], 1.0, 1.0)
    assert two.tried == (True, True, True) and two.failed_scores == 2 and two.last == 0.5


def test_a_batch_of_failed_scores_leaves_success_alone():
    one = observe_success(unknown_success(1, 0.5), outcomes([0], [[1, 0]]), CFG)
    two = observe_success(one, outcomes([0], [[np.nan, np.nan]]), CFG)
    assert (two.last, two.ema, two.bins, two.steps, two.failed_scores) == (None, 0.5, (0.5,), 2, 2)


def test_what_was_not_sampled_is_no_failure():
    """SPEED rolls prompts out in parts: a row may have fewer responses than the widest, their lengths are 0."""
    given = replace(outcomes([0, 0], [[1, 0, np.nan, np.nan], [1, 1, 1, np.nan]]), lengths=np.array([[3, 2, 0, 0], [1, 4, 2, 5]]))
    one = observe_success(unknown_success(1, 0.5), given, CFG)
    assert one.failed_scores == 1 and one.last == pytest.approx(4 / 5) and (one.wins, one.losses) == ((5.0,), (2.0,))


def test_posterior_forgets():
    one = observe_success(unknown_success(1, 0.5), outcomes([0], [[1, 1, 1, 0]]), CFG)
    assert (one.wins, one.losses) == ((4.0,), (2.0,))
    two = observe_success(one, outcomes([0], [[0, 0, 0, 0]]), CFG)
    assert two.wins == pytest.approx((0.9 * 4 + 0.1,)) and two.losses == pytest.approx((0.9 * 2 + 0.1 + 4,))
    assert one.p_std == pytest.approx(np.sqrt(4 * 2 / (36 * 7)))


def test_success_is_a_reward_above_the_threshold():
    state = unknown_success(1, 0.7)
    assert observe_success(state, outcomes([0], [[0.7, 0.71, 1.0, 0.0]]), CFG).last == 0.5


@pytest.mark.parametrize("ema, moved", [(0.7, 0.6), (0.61, 0.6), (0.6, 0.5), (0.4, 0.5), (0.3, 0.4)])
def test_threshold_follows_success_for_graded_rewards(ema, moved):
    cfg = SchedulerConfig(r_threshold_step=0.1)
    assert move_threshold(known([0.5], ema=ema, graded=True), cfg).r_threshold == pytest.approx(moved)


def test_threshold_holds_for_binary_rewards_without_a_step_and_at_its_range():
    cfg = SchedulerConfig(r_threshold_step=0.1, r_threshold_range=(0.3, 0.55))
    assert move_threshold(known([0.5], ema=0.9, graded=False), cfg).r_threshold == 0.5
    assert move_threshold(known([0.5], ema=0.9, graded=True), SchedulerConfig()).r_threshold == 0.5
    assert move_threshold(known([0.5], ema=0.9, graded=True), cfg).r_threshold == 0.55
    binary = observe_success(unknown_success(1, 0.5), outcomes([0], [[1, 0, np.nan]]), cfg)
    assert not binary.graded and observe_success(binary, outcomes([0], [[0.5, 1, 0]]), cfg).graded


def test_informativeness_prefers_even_odds():
    p = np.array([0.0, 0.5, 0.9, 1.0])
    expected = np.exp(4 * p * (1 - p) / 0.5)
    np.testing.assert_allclose(informativeness(p, 0.5), expected / expected.sum(), rtol=1e-12)
    assert informativeness(p, 0.25)[1] > informativeness(p, 0.5)[1]


def test_inner_band_is_the_window_less_a_quarter_on_each_side():
    assert inner_band((0.4, 0.6)) == pytest.approx((0.45, 0.55))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_tilt_meets_the_nearer_edge_or_the_extreme(p):
    p = np.array(p)
    base = informativeness(p, 0.5)
    weights, predicted = tilt(base, p, (0.45, 0.55)), base @ p
    assert weights.sum() == pytest.approx(1) and np.all(weights >= 0)
    if 0.45 <= predicted <= 0.55:
        assert weights is base
    elif predicted > 0.55:
        assert weights @ p == pytest.approx(max(0.55, p.min()), abs=1e-9)
    else:
        assert weights @ p == pytest.approx(min(0.45, p.max()), abs=1e-9)


def test_tilt_is_exponential_in_p():
    p, base = np.array([0.95, 0.9, 0.6, 0.1]), np.array([0.4, 0.3, 0.2, 0.1])
    slopes = np.diff(np.log(tilt(base, p, (0.45, 0.55)) / base)) / np.diff(p)
    assert slopes == pytest.approx([slopes[0]] * 3) and slopes[0] < 0


@settings(derandomize=True, deadline=None)
@given(st.lists(st.none() | st.floats(0, 1), min_size=1, max_size=6), st.data())
def test_weights_sum_to_one_and_keep_the_floor(p, data):
    flags = st.lists(st.booleans(), min_size=len(p), max_size=len(p))
    available = np.array(data.draw(flags.filter(any)))
    success = replace(known(p), tried=tuple(t or v is not None for t, v in zip(data.draw(flags), p, strict=True)))
    cfg = SchedulerConfig(weight_floor=data.draw(st.floats(0, 1)))
    weights = window_weights(success, available, cfg)
    assert weights.sum() == pytest.approx(1)
    assert np.all(weights[~available] == 0)
    assert np.all(weights[available] >= cfg.weight_floor / available.sum() - 1e-12)


def test_weights_follow_window_temperature_and_floor():
    success = known([0.9, 0.7, 0.5, 0.1])
    for change in ({"window": (0.7, 0.8)}, {"informativeness_temperature": 0.1}, {"weight_floor": 0.5}):
        changed = window_weights(success, ALL, SchedulerConfig(**change))
        assert not np.allclose(window_weights(success, ALL, CFG), changed)
    exact = window_weights(known([0.95, 0.9, 0.6, 0.1]), ALL, SchedulerConfig(weight_floor=0.0))
    assert exact @ np.array([0.95, 0.9, 0.6, 0.1]) == pytest.approx(0.55)


def test_nothing_known_means_equal_weights():
    assert window_weights(unknown_success(4, 0.5), ALL, CFG) == pytest.approx([0.25] * 4)


def test_an_untried_bin_gets_its_share_and_leaves_the_tilt_alone():
    p = [0.9, 0.6, 0.1, None]
    weights = window_weights(replace(known(p), tried=(True, True, True, False)), ALL, SchedulerConfig(weight_floor=0.0))
    alone = window_weights(known(p[:3]), ALL[:3], SchedulerConfig(weight_floor=0.0))
    assert weights == pytest.approx([*(0.75 * alone), 0.25])


def test_a_bin_that_never_scores_lives_on_the_floor():
    assert window_weights(known([0.9, 0.6, 0.1, None]), ALL, CFG)[3] == pytest.approx(0.05 / 4)


def test_reach_of_the_window():
    window = (0.4, 0.6)
    assert reachable(np.array([0.1, 0.9]), window) and reachable(np.array([0.5, np.nan]), window)
    assert not reachable(np.array([0.6, 0.9]), window) and not reachable(np.array([0.1, 0.4]), window)
    assert out_of_reach(np.array([0.6, 0.9]), window) == "mastered"
    assert out_of_reach(np.array([0.1, 0.4]), window) == "too hard"
    assert out_of_reach(np.array([0.6, np.nan]), window) is None and out_of_reach(np.array([0.1, 0.9]), window) is None
    assert in_window(0.4, window) and not in_window(0.61, window) and not in_window(None, window)
