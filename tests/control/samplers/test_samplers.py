from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import ConfigError, MoppsConfig, SchedulerConfig
from fastsched.control.samplers.deck import apportion
from fastsched.control.samplers.table import make_sampler
from fastsched.control.window import unknown_success, window_weights
from fastsched.types import Outcomes

SIZES = np.array([100, 300, 200, 400])
BINS = np.repeat(np.arange(4), SIZES).astype(np.uint16)
UNKNOWN = unknown_success(4, 0.5)
SEEN = replace(UNKNOWN, bins=(0.95, 0.8, 0.5, 0.1), tried=(True,) * 4)


def sampler(prompts=16, **changes):
    return make_sampler(SchedulerConfig(**changes), BINS, SIZES, prompts, seed=0)


@settings(derandomize=True, deadline=None)
@given(st.lists(st.integers(0, 20), min_size=1, max_size=6).filter(any), st.floats(0, 1, exclude_max=True), st.data())
def test_counts_are_exact_and_fit(sizes, offset, data):
    sizes = np.array(sizes)
    weights = np.array([data.draw(st.floats(0, 1)) for _ in sizes])
    count = data.draw(st.integers(0, int(sizes.sum())))
    counts = apportion(weights, count, sizes, offset)
    assert counts.sum() == count and np.all(counts >= 0) and np.all(counts <= sizes)


def test_counts_are_within_one_of_the_share_and_right_on_average():
    weights, offsets = np.array([0.0125, 0.5, 0.0, 0.4875]), (np.arange(1000) + 0.5) / 1000
    counts = np.stack([apportion(weights, 16, SIZES, u) for u in offsets])
    assert np.all(np.abs(counts - 16 * weights) < 1) and np.all(counts[:, 2] == 0)
    np.testing.assert_allclose(counts.mean(axis=0), 16 * weights, atol=2e-3)


def test_what_a_small_bin_cannot_hold_goes_to_the_others():
    sizes = np.array([2, 100, 100])
    assert apportion(np.array([0.5, 0.25, 0.25]), 20, sizes, 0.5).tolist() == [2, 9, 9]
    assert apportion(np.array([1.0, 0.0, 0.0]), 20, sizes, 0.5).tolist() == [2, 9, 9]


def test_kinds_weigh_the_bins_their_way():
    drawn = {}
    for kind in ("adaptive", "fixed", "uniform"):
        one = sampler(kind=kind)
        rows = one.draw(16, SEEN)
        np.testing.assert_array_equal(rows.bins, BINS[rows.rows])
        assert len(set(rows.rows.tolist())) == 16 and rows.rows.dtype == rows.bins.dtype == np.int64
        drawn[kind] = one.weights
    np.testing.assert_allclose(drawn["adaptive"], window_weights(SEEN, SIZES > 0, SchedulerConfig()))
    np.testing.assert_allclose(drawn["fixed"], 0.25)
    np.testing.assert_allclose(drawn["uniform"], SIZES / 1000)


def test_fixed_weights_are_kept():
    one = sampler(kind="fixed", fixed_weights=(3.0, 0.0, 0.0, 1.0))
    for _ in range(5):
        np.testing.assert_array_equal(np.bincount(one.draw(16, SEEN).bins, minlength=4), [12, 0, 0, 4])


def test_weights_move_only_every_update_every_steps():
    one = sampler(update_every=3)
    one.draw(16, replace(SEEN, steps=2))
    np.testing.assert_allclose(one.weights, 0.25)
    one.draw(16, replace(SEEN, steps=3))
    assert one.weights[3] < 0.25
    every = sampler(update_every=1)
    every.draw(16, replace(SEEN, steps=2))
    assert every.weights[3] < 0.25


def test_the_batch_is_not_ordered_by_bin():
    bins = sampler().draw(16, UNKNOWN).bins
    assert np.bincount(bins).tolist() == [4] * 4 and np.any(np.diff(bins) < 0)


def test_inside_a_bin_the_posterior_chooses_and_the_weights_of_bins_are_as_without():
    one, plain = (sampler(kind="fixed", inside_bins=inside, weight_floor=0.25, mopps=MoppsConfig(pool=60))
                  for inside in ("posterior", "order"))
    one.posterior.wins[:], one.posterior.losses[:] = 1.0, 400.0
    half = np.concatenate([np.flatnonzero(BINS == b)[:8] for b in range(4)])
    one.posterior.wins[half] = one.posterior.losses[half] = 400.0
    chosen, seen = [], set()
    for _ in range(400):
        drawn = one.draw(16, SEEN)
        assert np.bincount(drawn.bins).tolist() == np.bincount(plain.draw(16, SEEN).bins).tolist() == [4] * 4
        chosen.append(np.isin(drawn.rows, half).mean())
        seen |= set(drawn.rows.tolist())
        one.drawn = one.drawn[:0]  # the posterior stays as it is
    assert 0.65 < np.mean(chosen) < 0.8
    assert seen == set(range(1000))  # a quarter of every bin's places comes in order
    rewards, counts = np.tile([1.0, 1, 1, 0], (16, 1)), np.ones((16, 4), np.int64)
    before = one.posterior.wins[drawn.rows].copy()
    one.observe(Outcomes(drawn.rows, drawn.bins, rewards, counts, counts == 0), SEEN)
    np.testing.assert_array_equal(one.posterior.wins[drawn.rows], before + 3)


@pytest.mark.parametrize("kind", ["mopps", "ads", "speed", "learned"])
def test_a_posterior_inside_what_are_no_bins_is_refused(kind):
    with pytest.raises(ConfigError, match=f"scheduler.inside_bins: scheduler.kind={kind} does not draw from difficulty bins"):
        SchedulerConfig(kind=kind, inside_bins="posterior")


@pytest.mark.parametrize("kind, said", [("adaptive", True), ("sec", True), ("adarft", True), ("uniform", False), ("fixed", False)])
def test_weighing_a_single_bin_is_said(kind, said):
    one = make_sampler(SchedulerConfig(kind=kind), np.ones(20, np.uint16), np.array([0, 20]), 10, seed=0)
    assert [f"scheduler.kind {kind} weighs difficulty bins" in line for line in one.notes()] == [True] * said
    assert sampler(kind=kind).notes() == []


def test_an_empty_bin_is_never_drawn():
    sizes = np.array([50, 0, 50])
    for kind in ("adaptive", "fixed", "uniform"):
        one = make_sampler(SchedulerConfig(kind=kind), np.repeat([0, 2], 50).astype(np.uint16), sizes, 10, seed=0)
        assert set(one.draw(10, unknown_success(3, 0.5)).bins.tolist()) == {0, 2} and one.weights[1] == 0


@pytest.mark.parametrize("weights, sizes, message", [
    ((1.0, 1.0), [10, 10, 10], "2 weights for 3 difficulty bins"),
    ((1.0, 1.0, 0.0), [20, 0, 10], r"bins \[1\] have weight but hold no prompt"),
    ((1.0, 0.0, 0.0), [10, 10, 10], "hold 10 prompts, a batch needs 16"),
])
def test_fixed_weights_that_cannot_be_kept_are_errors(weights, sizes, message):
    bins = np.repeat(np.arange(3), sizes).astype(np.uint16)
    with pytest.raises(ConfigError, match="scheduler.fixed_weights: .*" + message):
        make_sampler(SchedulerConfig(kind="fixed", fixed_weights=weights), bins, np.array(sizes), 16, seed=0)


def test_seed_decides_the_batch():
    same = [make_sampler(SchedulerConfig(), BINS, SIZES, 16, seed).draw(16, UNKNOWN).rows.tolist() for seed in (0, 0, 1)]
    assert same[0] == same[1] != same[2]
