import json
from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import ConfigError, LearnedConfig, SchedulerConfig
from fastsched.control.samplers.learned import CLIP, FEATURES, ProgressSampler, arms_of
from fastsched.control.samplers.table import make_sampler
from fastsched.control.window import unknown_success
from fastsched.types import Features, Outcomes

LEARNING, ARMS = [1, 5], 6
SIZES = np.full(ARMS, 300)
BINS = np.repeat(np.arange(ARMS), SIZES).astype(np.uint16)


def sampler(kind="learned", features=None, bins=BINS, sizes=SIZES, floor=0.05, **learned):
    return make_sampler(SchedulerConfig(kind=kind, weight_floor=floor, learned=LearnedConfig(**learned)), bins, sizes, 32, 0, features)


def success(step):
    return replace(unknown_success(ARMS, 0.5), steps=step)


def outcomes(bins, rewards, length=10):
    rewards = np.array(rewards, dtype=float)
    rows = np.array([int(np.flatnonzero(BINS == b)[k]) for k, b in enumerate(bins)])
    return Outcomes(rows, np.array(bins), rewards, np.broadcast_to(length, rewards.shape).astype(np.int64), np.zeros(rewards.shape, bool))


def learn(kind, seed, steps=60):
    """(share of prompts by arm, what the learning arms gained) of a learner that gains in the two LEARNING arms only: the others are
    mastered, out of reach and long, or coin flips that never get better."""
    one, rng = sampler(kind), np.random.default_rng(seed)
    one.rng = np.random.Generator(np.random.PCG64(seed))
    start, length = np.array([3.0, -1.0, -6.0, -6.0, 0.0, -2.0]), np.array([10, 20, 40, 40, 40, 20])
    skill, times = start.copy(), np.zeros(ARMS)
    for t in range(steps):
        p = 1 / (1 + np.exp(-skill))
        selection = one.draw(32, success(t))
        rewards = (rng.random((32, 8)) < p[selection.bins][:, None]).astype(float)
        lengths = np.broadcast_to(length[selection.bins][:, None], rewards.shape)
        one.observe(Outcomes(selection.rows, selection.bins, rewards, lengths, np.zeros(rewards.shape, bool)), success(t))
        drawn = np.bincount(selection.bins, minlength=ARMS)
        skill[LEARNING] += (0.15 * drawn / 32 * 8 * p * (1 - p))[LEARNING]
        times += drawn
    return times / times.sum(), (skill - start)[LEARNING].sum()


def test_arms_that_learn_are_preferred_and_more_is_learnt_than_under_uniform():
    runs = {kind: [learn(kind, seed) for seed in range(8)] for kind in ("learned", "uniform")}
    shares = {kind: np.mean([share for share, _ in of], axis=0) for kind, of in runs.items()}
    assert shares["uniform"][LEARNING].sum() == pytest.approx(1 / 3, abs=0.02)
    assert shares["learned"][LEARNING].sum() > 0.43
    assert max(shares["learned"][[0, 2, 3, 4]]) < 0.17  # also the coin flips, whose p (1 - p) is the largest
    assert np.mean([gain for _, gain in runs["learned"]]) > 1.15 * np.mean([gain for _, gain in runs["uniform"]])


def test_the_reward_is_progress_for_each_token_since_the_last_visit():
    one = sampler()
    one.observe(outcomes([0, 1], [[0, 0], [0, 0]], 10), success(0))
    assert one.tokens[:3].tolist() == [20, 20, 0] and one.scale is None and np.isnan(one.p[2])
    one.observe(outcomes([1], [[np.nan, np.nan]], 40), success(1))  # tokens without a score count as spent
    assert one.tokens[1] == 100 and one.p[1] == 0 and one.scale is None
    before = one.context.copy()
    one.observe(outcomes([0, 1], [[1, 1], [1, 1]], 10), success(2))
    rewards = np.array([0.1 / 20, 0.1 / 100])  # beta = 0.9: the smoothed success rose by 0.1
    assert one.scale == pytest.approx(rewards.mean())
    standardised = np.clip(rewards / rewards.mean(), -CLIP, CLIP)
    np.testing.assert_allclose(one.moment, standardised @ before[:2])
    np.testing.assert_allclose(one.gram, before[:2].T @ before[:2])
    assert one.trend[:2] == pytest.approx(0.2 * standardised) and one.tokens[:2].tolist() == [20, 20]


def test_a_wild_reward_is_clipped():
    one = sampler()
    for t in range(5):
        one.observe(outcomes([0, 1], [[t % 2, 0], [0, 1]], 10), success(t))
    moment = one.moment.copy()
    one.observe(outcomes([0], [[1, 1]], 1), success(5))
    one.tokens[0] = 1e-9
    before = one.context[0].copy()
    one.observe(outcomes([0], [[0, 0]], 1), success(6))
    assert np.abs(one.moment).max() <= np.abs(moment).max() + 2 * CLIP + CLIP * np.abs(before).max() and np.isfinite(one.scale)


def test_context_of_an_arm():
    one = sampler()
    one.observe(outcomes([0, 1], [[1, 0], [1, 1]], [[10], [30]]), success(4))
    x = dict(zip(FEATURES, one.features(15).T, strict=True))
    assert x["p"].tolist() == [0.5, 1, 0.5, 0.5, 0.5, 0.5] and x["4p(1-p)"].tolist() == [1, 0, 1, 1, 1, 1]
    assert x["recency"][:3] == pytest.approx([0.5, 0.5, 0.6]) and x["length"][:3] == pytest.approx([1 / 3, 0.6, 0.5])
    assert x["difficulty"].tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1]) and set(x["constant"]) == {1}


def test_an_arm_never_scored_has_the_largest_bound():
    one = sampler(floor=0.0)
    one.observe(outcomes([0, 1, 2, 3, 4], [[1, 0]] * 5), success(0))
    assert one.bounds(1).argmax() == 5 or one.bounds(1)[5] == one.bounds(1).max()


def test_options_move_the_weights():
    def weights(**learned):
        one, rng = sampler(**learned), np.random.default_rng(0)
        for t in range(12):
            p = np.array([0.9, 0.1 + 0.06 * t, 0.1, 0.2, 0.5, 0.3])
            bins = np.repeat(np.arange(ARMS), 4)
            one.observe(outcomes(bins, rng.random((24, 8)) < p[bins][:, None], 10), success(t))
        one.draw(32, success(12))
        return one.arm_weights

    base = weights()
    assert base[1] == base.max() > 0.2
    for change in ({"exploration": 3.0}, {"temperature": 0.05}, {"decay": 0.5}):
        assert not np.allclose(weights(**change), base), change
    assert weights(temperature=0.05)[1] > base[1] and weights(floor=0.6).min() >= 0.1


def test_weights_move_every_update_every_steps():
    cfg = SchedulerConfig(kind="learned", update_every=2)
    one = ProgressSampler(cfg, BINS, SIZES, 32, 0)
    one.observe(outcomes([0, 1], [[1, 0], [1, 1]]), success(0))
    one.observe(outcomes([0, 1], [[1, 1], [0, 0]]), success(1))
    one.draw(32, success(1))
    assert one.arm_weights.tolist() == [1 / ARMS] * ARMS
    one.draw(32, success(2))
    assert one.arm_weights.tolist() != [1 / ARMS] * ARMS


def features():
    cluster = np.arange(BINS.size) % 4 + (np.arange(BINS.size) % 4 >= 2)  # cluster 2 is empty
    return Features(cluster.astype(np.int32), (4 - cluster).astype(np.float32), np.zeros((BINS.size, 2), np.float16))


def test_clusters_are_arms_when_asked_for():
    one = sampler(features=features(), arms="clusters")
    assert one.members.tolist() == [450, 450, 0, 450, 450] and one.difficulty[[0, 1, 3, 4]].tolist() == [1, 0.75, 0.5, 0.25]
    selection = one.draw(32, success(0))
    assert one.arm_weights[2] == 0 and one.arm_weights.sum() == pytest.approx(1)
    assert np.array_equal(selection.bins, BINS[selection.rows]) and len(one.weights) == ARMS
    state = json.loads(json.dumps(one.state_dict()))
    assert len(state["p"]) == 5 and len(json.dumps(state)) < 5000
    assert arms_of(SchedulerConfig(kind="learned"), BINS, SIZES, features())[0] is BINS


def test_clusters_need_features_of_the_data():
    with pytest.raises(ConfigError, match="scheduler.learned.arms.*fastsched cluster"):
        sampler(arms="clusters")
    with pytest.raises(ConfigError, match="clusters of 1800 prompts, the data has 600"):
        sampler(features=features(), arms="clusters", bins=BINS[:600], sizes=SIZES[:2])


@pytest.mark.parametrize("changes", [{"exploration": -1.0}, {"temperature": 0.0}, {"decay": 0.0}])
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="scheduler.learned"):
        LearnedConfig(**changes)
