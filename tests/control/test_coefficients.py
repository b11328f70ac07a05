import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import CoefficientConfig, SchedulerConfig
from fastsched.control import coefficients
from fastsched.control.coefficients import constant, down, rules, start_coefficients, targets, towards_start, up
from fastsched.types import Stats

NAN = math.nan
CFG = SchedulerConfig(entropy=CoefficientConfig(0.01, 0.005, 0.1), kl=CoefficientConfig(0.1, 0.0, 0.5),
                      average=CoefficientConfig(0.99, 0.9, 0.999), initial_entropy=1.0, statistics_beta=0.0)
BETWEEN = 0.01  # drift between drift_low 1e-3 and drift_high 2e-2


def stats(entropy=0.6, kl=0.05, drift=BETWEEN, kl_kind="exact"):
    return Stats(loss=0.0, entropy=entropy, kl=kl, kl_kind=kl_kind, drift=drift, grad_norm=1.0, grad_snr=NAN,
                 clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def moves(cfg=CFG, before=(0.6, 0.05), lambda_h=0.02, lambda_kl=0.2, alpha=0.995, lr_scale=0.5, **observed):
    """What one step does: (lambda_h, lambda_kl, alpha, lr_scale) as -1, 0 or 1, and the rules that fired."""
    state = replace(start_coefficients(cfg), entropy=before[0], kl=before[1], drift=BETWEEN, lambda_h=lambda_h,
                    lambda_kl=lambda_kl, alpha=alpha, lr_scale=lr_scale)
    new = rules(state, stats(**observed), cfg)
    pairs = [(new.lambda_h, lambda_h), (new.lambda_kl, lambda_kl), (new.alpha, alpha), (new.lr_scale, lr_scale)]
    return tuple((a > b) - (a < b) for a, b in pairs), new.fired


@pytest.mark.parametrize("observed, moved, fired", [
    ({"drift": 0.03}, (0, 1, 1, -1), ("high-drift",)),
    ({"drift": 5e-4}, (0, 0, -1, 1), ("low-drift",)),
    ({}, (0, 0, 0, 0), ()),
    ({"entropy": 0.2}, (1, 0, 0, 0), ("collapsed",)),
    ({"entropy": 0.2, "kl": 0.2}, (1, -1, 0, 0), ("collapsed-high-kl",)),
    ({"entropy": 0.4, "kl": 0.02}, (0, 0, 0, 0), ("moved-together",)),
    ({"entropy": 0.4, "kl": 0.2}, (1, -1, 0, 0), ("low-entropy-high-kl",)),
    ({"entropy": 0.4}, (1, 0, 0, 0), ("low-entropy",)),
    ({"entropy": 0.8}, (-1, -1, 0, 0), ("recovered",)),
    ({"entropy": 0.8, "kl": 0.06}, (0, 0, 0, 0), ("moved-together",)),
    ({"entropy": 0.4, "kl": 0.2, "drift": 0.03}, (1, 1, 1, -1), ("high-drift", "low-entropy-high-kl")),
    ({"entropy": 0.8, "drift": 0.03}, (-1, 1, 1, -1), ("high-drift", "recovered")),
    ({"entropy": 0.8, "drift": 5e-4}, (-1, -1, -1, 1), ("low-drift", "recovered")),
])
def test_rule_table(observed, moved, fired):
    assert moves(**observed) == (moved, fired)


def test_collapse_outranks_moving_together():
    assert moves(entropy=0.2, kl=0.02)[1] == ("collapsed",)


def test_dead_band_decides_what_counts_as_moved(monkeypatch):
    assert moves(before=(0.42, 0.06), entropy=0.41, kl=0.05)[1] == ("low-entropy",)  # entropy fell by 2.4 % only
    assert moves(before=(0.42, 0.06), entropy=0.38, kl=0.05)[1] == ("moved-together",)  # by 9.5 %
    monkeypatch.setattr(coefficients, "DEAD_BAND", 0.01)
    assert moves(before=(0.42, 0.06), entropy=0.41, kl=0.05)[1] == ("moved-together",)


def test_thresholds_are_options():
    assert moves(replace(CFG, kl_high=0.01), entropy=0.4)[1] == ("low-entropy-high-kl",)
    assert moves(replace(CFG, drift_high=5e-3))[1] == ("high-drift",)
    assert moves(replace(CFG, drift_low=0.015))[1] == ("low-drift",)
    assert moves(replace(CFG, initial_entropy=2.0))[1] == ("low-entropy",)


def test_steps_are_additive_where_the_floor_is_zero_and_multiplicative_elsewhere():
    free, bound = CoefficientConfig(0.1, 0.0, 0.5), CoefficientConfig(0.01, 0.005, 0.1)
    assert up(0.0, free) == pytest.approx(0.005) and down(0.1, free) == pytest.approx(0.095)
    assert up(0.01, bound) == pytest.approx(0.011) and down(0.011, bound) == pytest.approx(0.01)
    assert (up(0.498, free), down(0.001, free)) == (0.5, 0.0)
    assert (up(0.099, bound), down(0.0051, bound)) == (0.1, 0.005)
    assert towards_start(0.2, free) == pytest.approx(0.195) and towards_start(0.0, free) == pytest.approx(0.005)
    assert towards_start(0.1001, free) == towards_start(0.0999, free) == towards_start(0.1, free) == 0.1


def test_alpha_moves_through_its_complement():
    state = replace(start_coefficients(CFG), alpha=0.99)
    assert rules(state, stats(drift=1.0), CFG).alpha == pytest.approx(1 - 0.01 / 1.1)
    wide = replace(CFG, average=CoefficientConfig(0.99, 0.9, 0.9999))
    back = rules(replace(state, alpha=0.9995), stats(drift=0.0), wide)
    assert back.alpha == pytest.approx(1 - 0.0005 * 1.1)


def test_lr_scale_stops_at_its_floor_and_at_one():
    state = start_coefficients(CFG)
    for _ in range(100):
        state = rules(state, stats(drift=1.0), CFG)
    assert state.lr_scale == CFG.lr_scale_floor
    for _ in range(100):
        state = rules(state, stats(drift=0.0), CFG)
    assert state.lr_scale == 1.0
    assert rules(start_coefficients(CFG), stats(drift=1.0), replace(CFG, lr_scale_floor=1.0)).lr_scale == 1.0


def test_initial_entropy_is_the_mean_of_the_first_five_finite_ones():
    cfg = replace(CFG, initial_entropy=None)
    state = start_coefficients(cfg)
    for entropy in (1.0, 2.0, NAN, 3.0, 4.0):
        state = rules(state, stats(entropy=entropy), cfg)
        assert state.initial_entropy is None and state.fired == ()
    state = rules(state, stats(entropy=0.5), cfg)
    assert state.initial_entropy == pytest.approx(2.1) and state.fired == ("collapsed",)
    assert rules(state, stats(entropy=9.0), cfg).initial_entropy == pytest.approx(2.1)


def test_statistics_are_smoothed_before_any_decision():
    cfg = replace(CFG, statistics_beta=0.9)
    state = replace(start_coefficients(cfg), entropy=1.0, kl=0.05, drift=BETWEEN)
    new = rules(state, stats(entropy=0.1, kl=1.0, drift=0.02), cfg)
    assert (new.entropy, new.kl, new.drift) == pytest.approx((0.91, 0.145, 0.011))
    assert new.fired == ("recovered",)


def test_what_is_not_finite_is_counted_and_changes_nothing():
    cfg = replace(CFG, statistics_beta=0.5)
    state = rules(start_coefficients(cfg), stats(entropy=0.4, drift=0.03), cfg)
    new = rules(state, stats(entropy=NAN, kl=math.inf, drift=NAN), cfg)
    assert replace(new, steps=state.steps, fired=state.fired, nonfinite=state.nonfinite) == state
    assert new.nonfinite == 3 and new.fired == ()


def test_a_step_without_a_token_in_the_loss_is_not_counted():
    """Every group was flat and left: there is no entropy and no KL, and nothing is wrong."""
    nothing = replace(stats(entropy=NAN, kl=NAN, drift=0.0), kept_fraction=0.0)
    assert rules(start_coefficients(CFG), nothing, CFG).nonfinite == 0
    assert rules(start_coefficients(CFG), replace(nothing, drift=NAN), CFG).nonfinite == 1


def test_kl_that_is_not_measured_is_not_counted():
    new = rules(start_coefficients(CFG), stats(entropy=0.4, kl=NAN, kl_kind="none"), CFG)
    assert new.nonfinite == 0 and new.kl is None and new.fired == ("low-entropy",)


def test_constant_tracks_and_moves_nothing():
    state = start_coefficients(CFG)
    for _ in range(10):
        state = constant(state, stats(entropy=0.1, kl=1.0, drift=1.0), CFG)
    assert (state.lambda_h, state.lambda_kl, state.alpha, state.lr_scale, state.fired) == (0.01, 0.1, 0.99, 1.0, ())
    assert (state.entropy, state.kl, state.drift) == (0.1, 1.0, 1.0)


def test_averaging_warms_up_by_the_step_count():
    state = start_coefficients(CFG)
    assert state.alpha_now == pytest.approx(0.1)
    assert rules(state, stats(), CFG).alpha_now == pytest.approx(2 / 11)
    assert replace(state, steps=10_000).alpha_now == 0.99
    assert start_coefficients(replace(CFG, average=CoefficientConfig(1.0, 1.0, 1.0))).alpha_now == 1.0


anything = st.floats(allow_nan=True, allow_infinity=True)
bounds = st.tuples(*[st.floats(0, 1)] * 3).map(sorted).map(lambda b: CoefficientConfig(b[1], b[0], b[2]))


@settings(derandomize=True, deadline=None)
@given(st.lists(st.tuples(anything, anything, anything), max_size=30), bounds, bounds, bounds, st.floats(0, 1))
def test_every_coefficient_stays_within_its_bounds(observed, entropy, kl, average, lr_floor):
    cfg = replace(CFG, entropy=entropy, kl=kl, average=average, lr_scale_floor=lr_floor)
    state = start_coefficients(cfg)
    for h, d, drift in observed:
        state = rules(state, stats(h, d, drift), cfg)
        for value, limits in ((state.lambda_h, entropy), (state.lambda_kl, kl), (state.alpha, average)):
            assert limits.floor <= value <= limits.ceiling
        assert lr_floor <= state.lr_scale <= 1
        assert all(value is None or math.isfinite(value) for value in (state.entropy, state.kl, state.drift))


TARGETS = SchedulerConfig(coefficients="targets", entropy=CoefficientConfig(0.0, 0.0, 0.005), kl=CoefficientConfig(0.1, 0.01, 0.105),
                          kl_target=0.04, entropy_target=0.2, entropy_step=1e-3)


@pytest.mark.parametrize("kl, factor", [(0.04, 1.0), (0.044, 1.01), (0.4, 1.02), (0.036, 0.99), (0.0, 0.98), (NAN, 1.0)])
def test_the_kl_target_moves_in_proportion_and_within_bounds(kl, factor):
    """algorithms.md 4.2: the relative error, at most 0.2, times 0.1."""
    start = start_coefficients(TARGETS)
    assert targets(start, stats(kl=kl), TARGETS).lambda_kl == pytest.approx(0.1 * factor)
    for _ in range(200):
        start = targets(start, stats(kl=1.0), TARGETS)
    assert start.lambda_kl == 0.105 and start.fired == ()
    for _ in range(200):
        start = targets(start, stats(kl=0.0), TARGETS)
    assert start.lambda_kl == 0.01


def test_the_entropy_target_is_applied_below_it_only():
    """algorithms.md 4.3: the coefficient creeps up below the target and down above, where it has no effect."""
    state, seen = start_coefficients(TARGETS), []
    for entropy in (0.1, 0.1, 0.3, 0.2, 0.1, NAN):
        state = targets(state, stats(entropy=entropy, kl=0.04), TARGETS)
        seen.append((round(state.lambda_h, 6), round(state.entropy_coef, 6), state.fired))
    assert seen == [(0.001, 0.001, ("entropy-below-target",)), (0.002, 0.002, ("entropy-below-target",)), (0.001, 0.0, ()), (0.0, 0.0, ()),
                    (0.001, 0.001, ("entropy-below-target",)), (0.001, 0.001, ())]
