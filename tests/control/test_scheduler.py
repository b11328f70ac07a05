import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import CoefficientConfig, ConfigError, SchedulerConfig, TemporalConfig
from fastsched.control.scheduler import STATE_VERSION, Scheduler
from fastsched.types import Outcomes, Stats

KINDS = ["adaptive", "fixed", "uniform", "sec", "adarft", "mopps", "greso", "vcrl", "replay", "learned"]

BINS = np.repeat(np.arange(4), [30, 50, 40, 60])
RULES = {"entropy": CoefficientConfig(0.01, 0.0, 0.1), "kl": CoefficientConfig(0.05, 0.0, 0.5)}


def scheduler(bins=BINS, prompts=8, steps=40, seed=0, **changes):
    return Scheduler(SchedulerConfig(**RULES | changes), bins, prompts, steps, seed)


def stats(entropy=1.0, kl=0.01, drift=0.01):
    return Stats(loss=0.0, entropy=entropy, kl=kl, kl_kind="exact", drift=drift, grad_norm=1.0, grad_snr=math.nan,
                 clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def outcomes(selection, rewards):
    rewards = np.asarray(rewards, dtype=float)
    shape = rewards.shape
    return Outcomes(selection.rows, selection.bins, rewards, np.ones(shape, np.int64), np.zeros(shape, bool))


def step(one, rng, p=(0.9, 0.6, 0.4, 0.1)):
    """One step with artificial outcomes; what the loop would see of the decisions."""
    selection, knobs = one.next_prompts(), one.knobs()
    rewards = (rng.random((len(selection.rows), 4)) < np.array(p)[selection.bins][:, None]).astype(float)
    rewards[rng.random(rewards.shape) < 0.05] = np.nan
    measured = np.where(rng.random(3) < 0.1, np.nan, rng.random(3) * [2.0, 0.2, 0.04])
    one.observe(outcomes(selection, rewards), stats(*measured))
    return selection.rows.tolist(), knobs, json.dumps(one.report())


def simulate(seed, steps=400, **changes):
    """(true p by step [steps, 4], smoothed success [steps]) of a learner that gains from prompts near even odds."""
    one = Scheduler(SchedulerConfig(**changes), np.repeat(np.arange(4), 5000), 32, steps, seed)
    rng, skill, trail, success = np.random.default_rng(seed), 0.0, [], []
    for _ in range(steps):
        p = 1 / (1 + np.exp(-(skill - np.array([-1.0, 1.5, 4.0, 6.5]))))
        selection = one.next_prompts()
        rewards = rng.random((32, 8)) < p[selection.bins][:, None]
        one.observe(outcomes(selection, rewards), stats())
        skill += 0.02 * float(np.mean(4 * p[selection.bins] * (1 - p[selection.bins])))
        trail.append(p)
        success.append(one.report()["success_ema"])
    return np.array(trail), np.array(success)


def share_in_window(p, success):
    reachable = (p.min(axis=1) < 0.4) & (p.max(axis=1) > 0.6)
    assert reachable.sum() > 150
    return float(np.mean((success[reachable] >= 0.4) & (success[reachable] <= 0.6)))


def test_adaptive_weights_hold_the_window_where_fixed_ones_do_not():
    for seed in range(2):
        share = {kind: share_in_window(*simulate(seed, kind=kind)) for kind in ("adaptive", "fixed", "uniform")}
        assert share["adaptive"] >= 0.95 and max(share["fixed"], share["uniform"]) <= 0.6, share


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 12), st.sampled_from(KINDS),
       st.sampled_from(["rules", "targets", "constant"]))
def test_state_round_trips_through_json_and_goes_on_identically(seed, before, kind, coefficients):
    make = lambda: scheduler(seed=seed, kind=kind, coefficients=coefficients, r_threshold_step=0.01,
                             temporal=TemporalConfig(mode="linear"))
    one, rng = make(), np.random.default_rng(seed)
    for _ in range(before):
        step(one, rng)
    state = json.loads(json.dumps(one.state_dict(), allow_nan=False))
    two = make()
    two.load_state_dict(state)
    assert two.state_dict() == one.state_dict() == state
    assert two.knobs() == one.knobs() and two.messages() == one.messages()
    again = np.random.default_rng()
    again.bit_generator.state = rng.bit_generator.state
    for _ in range(15):
        assert step(one, rng) == step(two, again)


def test_the_loaded_state_is_not_shared():
    one, two = scheduler(), scheduler()
    state = one.state_dict()
    two.load_state_dict(state)
    before = json.dumps(state)
    for _ in range(8):
        step(two, np.random.default_rng(0))
        step(one, np.random.default_rng(1))
    assert json.dumps(state) == before


def test_looking_changes_nothing():
    one = scheduler()
    step(one, np.random.default_rng(0))
    before = json.dumps(one.state_dict())
    for look in (one.knobs, one.report, one.state_dict):
        look()
    assert json.dumps(one.state_dict()) == before


@settings(derandomize=True, max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=40), st.data())
def test_batches_are_exact_distinct_and_keep_the_floor(bins, data):
    prompts = data.draw(st.integers(1, len(bins)))
    one = scheduler(np.array(bins), prompts, kind=data.draw(st.sampled_from(KINDS)))
    rng, held = np.random.default_rng(0), len(set(bins))
    for _ in range(10):
        rows, knobs, _ = step(one, rng, p=(0.9, 0.7, 0.5, 0.3, 0.1, 0.0))
        assert len(rows) == len(set(rows)) == prompts
        assert sum(knobs.weights) == pytest.approx(1)
        if one.cfg.kind in ("adaptive", "sec", "adarft"):
            assert all(knobs.weights[b] >= one.cfg.weight_floor / held - 1e-12 for b in set(bins))


def test_every_prompt_is_visited():
    one, rng, seen = scheduler(), np.random.default_rng(0), set()
    for _ in range(600):
        seen |= set(step(one, rng)[0])
    assert len(seen) == len(BINS)


def test_knobs_start_where_the_configuration_says_and_move_by_the_rules():
    one = scheduler(initial_entropy=1.0, statistics_beta=0.0)
    start = one.knobs()
    assert (start.entropy_coef, start.kl_coef, start.lr_scale, start.r_threshold) == (0.01, 0.05, 1.0, 0.5)
    assert start.ema_alpha == pytest.approx(0.1) and start.rule == "none" and start.temporal_s == 0.0
    assert start.weights == (0.25,) * 4
    one.observe(outcomes(one.next_prompts(), np.ones((8, 2))), stats(entropy=0.3, kl=0.2, drift=0.03))
    moved = one.knobs()
    assert moved.rule == "high-drift+low-entropy-high-kl"
    assert moved.entropy_coef == pytest.approx(0.011) and moved.kl_coef == pytest.approx(0.055)
    assert moved.lr_scale == pytest.approx(1 / 1.1)


def test_constant_coefficients_do_not_move():
    one = scheduler(initial_entropy=1.0, coefficients="constant")
    for _ in range(5):
        one.observe(outcomes(one.next_prompts(), np.ones((8, 2))), stats(entropy=0.1, kl=0.5, drift=0.5))
    knobs = one.knobs()
    assert (knobs.entropy_coef, knobs.kl_coef, knobs.lr_scale, knobs.rule) == (0.01, 0.05, 1.0, "constant")
    assert one.report()["entropy_ema"] == pytest.approx(0.1)


def test_targets_apply_the_entropy_coefficient_below_the_target_only():
    one = scheduler(coefficients="targets", entropy_target=0.2, entropy_step=1e-3, kl_target=0.05)
    for entropy, applied, rule in ((0.1, 0.011, "entropy-below-target"), (0.3, 0.0, "none")):
        one.observe(outcomes(one.next_prompts(), np.ones((8, 2))), stats(entropy=entropy, kl=0.05))
        assert (one.knobs().entropy_coef, one.knobs().rule) == (pytest.approx(applied), rule)
    again = scheduler(coefficients="targets", entropy_target=0.2, entropy_step=1e-3, kl_target=0.05)
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert again.knobs() == one.knobs()


def test_temporal_schedule_counts_steps_from_one():
    one = scheduler(steps=10, temporal=TemporalConfig(mode="linear", magnitude=1.0, end=1.0))
    cuts = []
    for _ in range(10):
        cuts.append(one.knobs().temporal_s)
        one.observe(outcomes(one.next_prompts(), np.ones((8, 2))), stats())
    assert cuts == pytest.approx([0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0])


def test_graded_rewards_raise_the_threshold_and_binary_ones_do_not():
    for rewards, threshold in ((np.full((8, 2), 0.9), 0.6), (np.ones((8, 2)), 0.5)):
        one = scheduler(r_threshold_step=0.1)
        one.observe(outcomes(one.next_prompts(), rewards), stats())
        assert one.knobs().r_threshold == pytest.approx(threshold)


def test_report_has_the_columns_of_the_run_folder():
    one = scheduler()
    before = one.report()
    assert math.isnan(before["success"]) and math.isnan(before["p_0"]) and before["in_window"] == 0.0
    selection = one.next_prompts()
    drawn = one.knobs().weights
    rewards = np.stack([selection.bins == 0, selection.bins < 3], axis=1).astype(float)
    rewards[0, 0] = np.nan
    one.observe(outcomes(selection, rewards), stats(entropy=math.nan))
    report = one.report()
    assert tuple(report[f"w_{b}"] for b in range(4)) == drawn
    assert report["success"] == report["success_ema"] == pytest.approx(np.nanmean(rewards))
    assert (report["p_1"], report["p_3"]) == (0.5, 0.0)
    assert report["in_window"] == 1.0 and report["window_reachable"] == 1.0
    assert report["nonfinite_observations"] == 1.0 and report["failed_scores"] == 1.0
    assert all(isinstance(value, float) for value in report.values())


def test_an_unreachable_window_is_said_once_even_across_a_resume():
    one = scheduler()
    for _ in range(3):
        one.observe(outcomes(one.next_prompts(), np.ones((8, 2))), stats())
    two = scheduler()
    two.load_state_dict(one.state_dict())
    assert len(one.messages()) == 1 and one.messages() == []
    (line,) = two.messages()
    assert "step 1: every difficulty bin is mastered" in line and "[0.40, 0.60]" in line
    two.observe(outcomes(two.next_prompts(), np.ones((8, 2))), stats())
    assert two.messages() == []


@pytest.mark.parametrize("other, message", [
    ({"bins": BINS[:-1]}, "dataset size is 179, in the checkpoint 180"),
    ({"bins": np.append(BINS[:-1], 4)}, "number of difficulty bins is 5, in the checkpoint 4"),
    ({"bins": np.append(BINS[:-1], 0)}, "prompts in each difficulty bin"),
    ({"seed": 1}, "train.seed is 1, in the checkpoint 0"),
])
def test_state_of_other_data_is_refused(other, message):
    with pytest.raises(ConfigError, match=message):
        scheduler(**other).load_state_dict(scheduler().state_dict())


@pytest.mark.parametrize("now, then, message", [
    ({"kind": "vcrl"}, {"kind": "mopps"}, "scheduler.kind is vcrl.*had mopps"),
    ({"kind": "uniform"}, {"kind": "adaptive"}, "scheduler.kind is uniform.*had adaptive"),
    ({"kind": "adarft"}, {"kind": "sec"}, "scheduler.kind is adarft.*had sec"),
    ({"inside_bins": "posterior"}, {}, "scheduler.inside_bins is posterior.*had order"),
    ({"kind": "fixed", "fixed_weights": (1, 0, 0, 1)}, {"kind": "fixed"}, r"scheduler.fixed_weights is \[1, 0, 0, 1\].*had \[\]"),
])
def test_state_of_another_sampler_is_refused(now, then, message):
    """Among the samplers by bin the state has the same form, and would be taken for what it is not."""
    with pytest.raises(ConfigError, match=message):
        scheduler(**now).load_state_dict(json.loads(json.dumps(scheduler(**then).state_dict())))


def test_state_of_another_version_is_refused():
    with pytest.raises(ConfigError, match=f"scheduler state version is {STATE_VERSION}, in the checkpoint 0"):
        scheduler().load_state_dict(scheduler().state_dict() | {"version": 0})


@pytest.mark.parametrize("changes, message", [
    ({"bins": np.zeros(0, int)}, "one integer difficulty bin for every row"),
    ({"bins": np.zeros(20)}, "one integer difficulty bin for every row, got float64"),
    ({"bins": np.array([0] * 20 + [-1])}, "row 20 has difficulty bin -1"),
    ({"prompts": 181}, "train.prompts_per_step: .* 181 distinct rows from 180 rows"),
    ({"steps": 1, "temporal": TemporalConfig(mode="linear")}, "scheduler.temporal"),
])
def test_data_that_cannot_be_scheduled_is_an_error(changes, message):
    with pytest.raises(ConfigError, match=message):
        scheduler(**changes)


@pytest.mark.parametrize("changes", [
    {"success_beta": 1.0}, {"statistics_beta": -0.1}, {"informativeness_temperature": 0.0}, {"r_threshold": 2.0},
    {"r_threshold_step": -0.1}, {"average": CoefficientConfig(1.0, 0.9, 1.5)},
    {"lr_scale_floor": 1.5}, {"fixed_weights": (0.0, 0.0)}, {"fixed_weights": (-1.0, 2.0)},
])
def test_configuration_no_rule_can_use_is_an_error(changes):
    with pytest.raises(ConfigError, match="scheduler"):
        SchedulerConfig(**changes)
