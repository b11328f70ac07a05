import json
from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import MoppsConfig, SchedulerConfig
from fastsched.control.samplers.mopps import PosteriorSampler
from fastsched.control.window import unknown_success
from fastsched.types import Outcomes

SIZES = np.array([40, 60])
BINS = np.repeat(np.arange(2), SIZES).astype(np.uint16)
UNKNOWN = unknown_success(2, 0.5)


def sampler(seed=0, floor=0.0, **mopps):
    cfg = SchedulerConfig(kind="mopps", weight_floor=floor, mopps=MoppsConfig(**mopps))
    return PosteriorSampler(cfg, BINS, SIZES, 10, seed)


def outcomes(rows, rewards):
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(rows, BINS[rows].astype(np.int64), rewards, counts, counts == 0)


def test_the_posterior_counts_and_forgets():
    """algorithms.md 3: a <- lam a + (1 - lam) a0 + s; a failed score counts on neither side."""
    one = sampler(decay=0.5)
    rewards = np.array([[1, 1, 0, np.nan], [0, 0, 0, 0]])
    one.observe(outcomes(np.array([3, 7]), rewards), UNKNOWN)
    assert one.posterior.wins[[3, 7, 0]].tolist() == [3, 1, 1] and one.posterior.losses[[3, 7]].tolist() == [2, 5]
    one.observe(outcomes(np.array([3, 7]), rewards), replace(UNKNOWN, r_threshold=1.0))  # nothing exceeds 1
    assert (one.posterior.wins[3], one.posterior.losses[3]) == (0.5 * 3 + 0.5, 0.5 * 2 + 0.5 + 3)


def test_a_prompt_rolled_out_twice_counts_twice():
    one = sampler()
    one.observe(outcomes(np.array([3, 3]), np.array([[1, 0], [1, 1]])), UNKNOWN)
    assert (one.posterior.wins[3], one.posterior.losses[3]) == (4, 2)


def test_prompts_near_one_half_are_drawn():
    one = sampler(pool=10)
    one.posterior.wins[:], one.posterior.losses[:] = 1.0, 400.0
    half = np.arange(20, 32)
    one.posterior.wins[half] = one.posterior.losses[half] = 400.0
    for _ in range(5):
        drawn, one.drawn = one.draw(10, UNKNOWN), one.drawn[:0]
        assert set(drawn.rows.tolist()) <= set(half.tolist()) and len(set(drawn.rows.tolist())) == 10
        np.testing.assert_array_equal(drawn.bins, BINS[drawn.rows])
        assert one.weights == pytest.approx([(drawn.bins == 0).mean(), (drawn.bins == 1).mean()])


def test_the_floor_visits_every_prompt():
    one, seen = sampler(floor=0.2, pool=2), set()
    one.posterior.wins[:50], one.posterior.losses[:50] = 1.0, 1e6  # half of the prompts would never be chosen
    for _ in range(60):  # 2 of 10 prompts a batch in deck order: 50 batches for 100 prompts
        seen |= set(one.draw(10, UNKNOWN).rows.tolist())
    assert seen == set(range(100))


def test_state_resumes_bit_for_bit_through_json():
    one, rng = sampler(floor=0.1, decay=0.7), np.random.default_rng(0)
    step = lambda s, rewards: s.observe(outcomes(s.draw(10, UNKNOWN).rows, rewards), UNKNOWN)
    for _ in range(7):
        step(one, (rng.random((10, 4)) < 0.4).astype(float))
    again = sampler(seed=5, floor=0.1, decay=0.7)
    again.deck.seed, again.deck.keys = one.deck.seed, one.deck.keys  # the scheduler refuses another seed
    again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(3):
        assert one.draw(10, UNKNOWN).rows.tolist() == again.draw(10, UNKNOWN).rows.tolist()
        np.testing.assert_array_equal(one.posterior.wins, again.posterior.wins)
        np.testing.assert_array_equal(one.posterior.losses, again.posterior.losses)


def test_large_sets_are_sampled_without_a_permutation():
    bins = np.zeros(200_000, np.uint16)
    one = PosteriorSampler(SchedulerConfig(kind="mopps"), bins, np.array([200_000]), 32, 0)
    rows = one.draw(32, UNKNOWN).rows
    assert len(set(rows.tolist())) == 32 and rows.min() >= 0 and rows.max() < 200_000


def test_the_state_of_prompts_that_were_all_seen_fits_its_budget():
    """Issue C 7: at most 16 bytes a prompt, in a checkpoint too."""
    n = 50_000
    make = lambda: PosteriorSampler(SchedulerConfig(kind="mopps", mopps=MoppsConfig(decay=0.9)), np.zeros(n, np.int64), np.array([n]), 8, 0)
    one, other, rng = make(), make(), np.random.default_rng(0)
    one.posterior.wins[:], one.posterior.losses[:] = rng.random((2, n)) * 9 + 1  # no two alike: nothing to compress
    text = json.dumps(one.state_dict())
    assert len(text) - len(json.dumps(other.state_dict())) < 16 * n
    other.load_state_dict(json.loads(text))
    assert np.array_equal(one.posterior.wins, other.posterior.wins) and np.array_equal(one.posterior.losses, other.posterior.losses)
