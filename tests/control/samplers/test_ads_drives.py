"""ADS over long drives: a policy that drifts, any clusters, a resume half-way."""

import json

import numpy as np
import pytest
from ads_case import UNKNOWN, features, outcomes, sampler
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import SchedulerConfig
from fastsched.control.scheduler import Scheduler
from fastsched.types import Outcomes, Stats

STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=float("nan"),
              clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def test_every_prompt_keeps_being_visited_under_a_drifting_policy():
    """A policy that learns what it is shown and forgets the rest, over many resets; the floor reaches what the rule does not."""
    feats = features([60] * 8)
    one = sampler(None, 32, feats=feats, floor=0.05, clusters=4, size=8)
    rng, skill, last = np.random.default_rng(0), np.zeros(8), np.zeros(480, int)
    rank = np.empty(480)
    for k in range(8):
        rank[one.order[one.starts[k]:one.starts[k] + 60]] = np.arange(60) / 60
    resets, widest = 0, 0
    for step in range(1, 1001):
        rows = one.draw(32, UNKNOWN).rows
        last[rows] = step
        p = 1 / (1 + np.exp(-6 * (skill[feats.cluster[rows]] - rank[rows])))
        one.observe(outcomes(rows, rng.random((32, 8)) < p[:, None]), UNKNOWN)
        skill = np.clip(0.995 * skill + 0.03 * (np.bincount(feats.cluster[rows], minlength=8) > 0), 0, 1)
        resets += one.steps == 0
        widest = max(widest, *(int(m.max()) for m in one.positions))
        assert step < 700 or last.min() > step - 700  # the deck needs 480 / 1.6 = 300 batches for a pass
    assert resets == 1000 // 15 and widest > 8


ANY = (st.lists(st.integers(0, 30), min_size=1, max_size=7).filter(lambda m: sum(m) >= 2), st.floats(0, 1), st.integers(0, 2**32 - 1),
       st.data())


@settings(derandomize=True, deadline=None, max_examples=12)
@given(*ANY)
def test_any_clusters_any_outcomes(members, floor, seed, data):
    any_clusters(members, floor, seed, data, 120)


@pytest.mark.slow
@settings(deadline=None, max_examples=12)
@given(*ANY)
def test_any_clusters_any_outcomes_for_long(members, floor, seed, data):
    any_clusters(members, floor, seed, data, 1000)


def any_clusters(members, floor, seed, data, steps):
    """Batches of a few prompts, resumed half-way from JSON: the straight run and the resumed one agree to the bit."""
    prompts = data.draw(st.integers(1, min(sum(members), 12)))
    size = data.draw(st.integers(1, 6))
    make = lambda: sampler(members, prompts, seed=seed, floor=floor, clusters=1, size=size)
    one, rng = make(), np.random.default_rng(seed)
    again = None
    for step in range(steps):
        rows = one.draw(prompts, UNKNOWN).rows
        assert len(set(rows.tolist())) == prompts and rows.min() >= 0 and rows.max() < sum(members)
        rewards = rng.integers(0, 2, (prompts, 4)).astype(float)
        rewards[rng.random(rewards.shape) < 0.2] = np.nan
        if again:
            assert again.draw(prompts, UNKNOWN).rows.tolist() == rows.tolist()
            again.observe(outcomes(rows, rewards), UNKNOWN)
        one.observe(outcomes(rows, rewards), UNKNOWN)
        weights = one.cluster_weights()
        assert weights.sum() == pytest.approx(1, abs=1e-12) and weights.min() >= floor / len(weights) - 1e-15
        assert one.weights.sum() == pytest.approx(1) and np.isfinite(one.r).all()
        for k, m in enumerate(one.positions):
            assert len(m) == min(one.size, one.members[k]) and np.all(np.diff(m) > 0) and m[0] >= 0 and m[-1] < one.members[k]
        if step == steps // 2:
            again = make()
            again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert json.dumps(again.state_dict()) == json.dumps(one.state_dict())


@pytest.mark.parametrize("steps", [1000, pytest.param(10_000, marks=pytest.mark.slow)])
def test_a_long_run_in_the_published_shape(steps):
    """64 clusters, 4 of 32 a batch, through the scheduler, with a policy that drifts."""
    feats = features(np.random.default_rng(1).integers(20, 300, 64).tolist())
    bins = np.arange(len(feats.cluster)) % 4
    cfg = SchedulerConfig(kind="ads", weight_floor=0.0)
    one = Scheduler(cfg, bins, 128, steps, 42, feats)
    rng, period = np.random.default_rng(2), len(bins) // 128
    for step in range(1, steps + 1):
        chosen = one.next_prompts()
        assert len(np.unique(chosen.rows)) == 128 and sum(one.knobs().weights) == pytest.approx(1)
        p = 1 / (1 + np.exp(feats.difficulty[chosen.rows] - 3 - 2 * np.sin(step / 50)))
        rewards = (rng.random((128, 8)) < p[:, None]).astype(float)
        one.observe(Outcomes(chosen.rows, chosen.bins, rewards, np.ones((128, 8), int), np.zeros((128, 8), bool)), STATS)
        assert abs(one.sampler.p.sum() - 1) < 1e-12 and one.sampler.steps == step % period
    state = json.dumps(one.state_dict())
    again = Scheduler(cfg, bins, 128, steps, 42, feats)
    again.load_state_dict(json.loads(state))
    assert json.dumps(again.state_dict()) == state
    for _ in range(3):
        a, b = one.next_prompts(), again.next_prompts()
        assert a.rows.tolist() == b.rows.tolist() and a.bins.tolist() == b.bins.tolist()
        for s in (one, again):
            s.observe(Outcomes(a.rows, a.bins, rewards, np.ones((128, 8), int), np.zeros((128, 8), bool)), STATS)
    assert json.dumps(again.state_dict()) == json.dumps(one.state_dict())
