"""The ADS sampler: how it draws, what it learns from outcomes, and what it refuses."""

import json
from dataclasses import replace

import numpy as np
import pytest
from ads_case import BAND, UNKNOWN, by_hand, features, graded, outcomes, sampler

from fastsched.config import AdsConfig, Config, ConfigError, SchedulerConfig, TrainConfig
from fastsched.control.samplers.ads import mini_cluster_size, order_by_difficulty, without_empty
from fastsched.control.scheduler import Scheduler
from fastsched.types import Features


def test_rows_are_ordered_by_cluster_then_difficulty_then_row():
    feats = features([50, 0, 30, 20])
    cluster, members = without_empty(feats.cluster)
    assert members.tolist() == [50, 30, 20]
    feats.difficulty[:4] = [-0.0, 0.0, 1e30, -1e30]
    order = order_by_difficulty(cluster, feats.difficulty)
    truth = sorted(range(100), key=lambda i: (feats.cluster[i], feats.difficulty[i] + 0.0, i))
    keys = [(feats.cluster[i], float(feats.difficulty[i])) for i in order]
    assert keys == sorted(keys) and keys == [(feats.cluster[i], float(feats.difficulty[i])) for i in truth]
    ties = [i for i in range(99) if keys[i] == keys[i + 1] and keys[i][1] != 0]
    assert ties and all(order[i] < order[i + 1] for i in ties)


def test_a_batch_is_whole_mini_clusters_of_distinct_clusters():
    one = sampler([40] * 6, 12, clusters=3, size=4)
    rows = one.draw(12, UNKNOWN).rows
    assert len(set(rows.tolist())) == 12 and len(one.drawn) == 3
    assert set(rows.tolist()) == {row for k in one.drawn for row in one.rows_of(k).tolist()}
    feats = features([40] * 6)
    for k in one.drawn:  # the easiest four of the cluster
        mine = np.flatnonzero(feats.cluster == k)
        assert max(feats.difficulty[one.rows_of(k)]) <= np.sort(feats.difficulty[mine])[3]


def test_clusters_are_drawn_one_after_another_without_replacement():
    """Ordered pairs come as p_i p_j / (1 - p_i), the law of successive draws."""
    one = sampler([40] * 4, 8, clusters=2, size=4)
    one.p = np.array([0.55, 0.3, 0.1, 0.05])
    seen = np.zeros((4, 4))
    for _ in range(20_000):
        first, second = one._sequence()[:2]
        seen[first, second] += 1
    truth = one.p[:, None] * one.p[None, :] / (1 - one.p[:, None])
    np.fill_diagonal(truth, 0)
    np.testing.assert_allclose(seen / 20_000, truth, atol=0.012)


def test_one_step_updates_in_the_published_order():
    one = sampler([40] * 5, 8, clusters=2, size=4)
    rows = one.draw(8, UNKNOWN).rows
    a, b = one.drawn
    first = np.isin(rows, one.rows_of(a))
    one.observe(graded(rows, np.where(first, 8, 2)), UNKNOWN)
    r = np.full(5, 0.5)
    r[a], r[b] = 1.0, 0.25
    np.testing.assert_allclose(one.r, r)
    np.testing.assert_allclose(one.p, 0.7 * 0.2 + 0.3 * r / r.sum())
    assert one.positions[a].tolist() == [1, 2, 3, 4] and one.positions[b].tolist() == [0, 1, 2, 3]
    assert all(one.positions[k].tolist() == [0, 1, 2, 3] for k in range(5) if k != a)
    again = set()
    for t in range(8):  # overwritten, not averaged; carried forward where it was not drawn
        rows = one.draw(8, UNKNOWN).rows
        again |= set(one.drawn) & {a, b}
        correct = (3 * t + one.cluster[rows]) % 9
        r[one.drawn] = [(3 * t + k) % 9 / 8 for k in one.drawn]
        one.observe(graded(rows, correct), UNKNOWN)
        np.testing.assert_allclose(one.r, r)
    assert again == {a, b}


def test_alpha_zero_holds_the_weights_and_one_takes_the_target():
    for alpha, expected in ((0.0, [0.5, 0.5]), (1.0, [2 / 3, 1 / 3])):
        one = sampler([40] * 2, 4, clusters=1, size=4, alpha=alpha)
        rows = one.draw(4, UNKNOWN).rows
        one.observe(graded(rows, 8), UNKNOWN)
        expected = expected if 0 in set(one.cluster[rows].tolist()) else expected[::-1]
        np.testing.assert_allclose(one.p, expected)


def test_the_state_goes_back_to_the_start_after_a_pass_over_the_data():
    drive = {}
    for reset in (True, False):
        one = sampler([20] * 4, 8, clusters=2, size=4, reset=reset)
        drive[reset] = []
        for _ in range(12):  # 80 rows are 10 batches of 8
            one.observe(graded(one.draw(8, UNKNOWN).rows, 8), UNKNOWN)
            drive[reset].append([one.p.tolist(), one.r.tolist(), [m.tolist() for m in one.positions]])
    start = [[0.25] * 4, [0.5] * 4, [[0, 1, 2, 3]] * 4]
    assert drive[True][9] == start and drive[True][8] != start and drive[True][10] != start
    assert drive[True][:9] == drive[False][:9] and all(state != start for state in drive[False])


def test_failed_scores_are_no_feedback():
    one = sampler([40] * 3, 4, clusters=1, size=4)
    rows = np.sort(one.draw(4, UNKNOWN).rows)
    k, place = one.drawn[0], dict(zip(one.rows_of(one.drawn[0]).tolist(), range(4), strict=True))
    rewards = np.array([[1, 1, np.nan, np.nan], [np.nan] * 4, [np.inf, 0, 0, 0], [1, 1, 1, 1]])
    one.observe(outcomes(rows, rewards), UNKNOWN)
    assert one.r[k] == pytest.approx((1 + 0 + 1) / 3)
    rates = {place[int(rows[0])]: 1.0, place[int(rows[2])]: 0.0, place[int(rows[3])]: 1.0}
    assert one.positions[k].tolist() == by_hand([0, 1, 2, 3], rates, 40, *BAND)
    before = json.dumps(one.state_dict()["positions"]), one.r.tolist()
    one.observe(outcomes(one.draw(4, UNKNOWN).rows, np.full((4, 8), np.nan)), UNKNOWN)
    assert (json.dumps(one.state_dict()["positions"]), one.r.tolist()) == before


def test_a_reward_counts_above_the_threshold_only():
    one = sampler([40] * 2, 4, clusters=1, size=4)
    rows = one.draw(4, UNKNOWN).rows
    k = one.drawn[0]
    one.observe(outcomes(rows, np.full((4, 8), 0.6)), replace(UNKNOWN, r_threshold=0.6))
    assert one.r[k] == 0.0


def test_rows_of_no_drawn_mini_cluster_change_nothing():
    one = sampler([40] * 3, 4, clusters=1, size=4)
    one.draw(4, UNKNOWN)
    strange = np.setdiff1d(np.arange(120), one.rows_of(one.drawn[0]))
    one.observe(graded(strange, 8), UNKNOWN)
    assert one.r.tolist() == [0.5] * 3 and all(m.tolist() == [0, 1, 2, 3] for m in one.positions)


def test_a_prompt_rolled_out_twice_counts_once():
    one = sampler([40], 4, clusters=1, size=4)
    rows = one.draw(4, UNKNOWN).rows
    one.observe(outcomes(np.concatenate([rows, rows[:1]]), [[1.0]] * 4 + [[0.0]]), UNKNOWN)
    assert one.r[0] == pytest.approx((0.5 + 1 + 1 + 1) / 4)


def test_a_refill_draws_other_clusters_first():
    one = sampler([40] * 4, 8, clusters=2, size=4)
    first, second = one.draw(8, UNKNOWN).rows.tolist(), one.draw(8, UNKNOWN).rows.tolist()
    assert not set(first) & set(second) and sorted(one.drawn) == [0, 1, 2, 3]
    third = one.draw(8, UNKNOWN).rows
    one.observe(graded(np.concatenate([first, second, third]), 8), UNKNOWN)
    assert all(m.tolist() == [1, 2, 3, 4] for m in one.positions) and one.steps == 1


def test_small_clusters_are_topped_up_from_the_next():
    """Clusters of 3 and 40 at a mini-cluster of 4: two clusters are short of 8, a third gives the rest, at random."""
    one = sampler([3, 40, 40, 40], 8, clusters=2, size=4)
    parts = set()
    for _ in range(60):
        one.drawn = []
        rows = one.draw(8, UNKNOWN).rows
        assert len(set(rows.tolist())) == 8
        if 0 in one.drawn[:2]:
            assert len(one.drawn) == 3
            last = one.drawn[2]
            (lucky,) = [row for row in rows.tolist() if one.cluster[row] == last]
            parts.add((last, lucky))
        else:
            assert len(one.drawn) == 2
    assert len({row for last, row in parts if last == 1}) > 1
    one.drawn = []
    while 0 not in one.drawn[:2]:
        one.drawn = []
        rows = one.draw(8, UNKNOWN).rows
    last, before = one.drawn[2], {k: one.positions[k].tolist() for k in one.drawn}
    place = dict(zip(one.rows_of(last).tolist(), range(4), strict=True))
    rate = {place[row]: 1.0 for row in rows.tolist() if row in place}
    one.observe(graded(rows, 8), UNKNOWN)
    assert one.positions[last].tolist() == by_hand(before[last], rate, 40, *BAND)
    assert one.positions[0].tolist() == [0, 1, 2]  # no more members than positions: it never moves


@pytest.mark.parametrize("members, prompts, size", [
    ([1000], 128, 128), ([50, 0, 60], 100, 50), ([500, 500, 500], 128, 43), ([5, 5, 200], 128, 118), ([200] * 5, 128, 32), ([64], 64, 64),
])
def test_mini_clusters_grow_where_they_cannot_fill_a_batch(members, prompts, size):
    one = sampler(members, prompts)
    rows = one.draw(prompts, UNKNOWN).rows
    assert one.size == size and len(set(rows.tolist())) == prompts
    assert bool(one.notes()) == (size != 32) and (size == 32 or f"{size} are taken" in one.notes()[0])
    assert any("scheduler.ads.reset" in line for line in one.notes()) == (sum(members) < 2 * prompts)
    one.observe(graded(rows, 8), UNKNOWN)
    for k, n in enumerate(m for m in members if m):
        assert len(one.positions[k]) == min(size, n)


def test_equal_rows_are_different_prompts():
    """Duplicated prompts share difficulty and cluster; each is its own row, and the batch has none twice."""
    feats = Features(np.zeros(60, np.int32), np.ones(60, np.float32), np.zeros((60, 1), np.float16))
    one, seen = sampler(None, 8, feats=feats, clusters=1, size=8), set()
    for _ in range(7):
        rows = one.draw(8, UNKNOWN).rows
        assert len(set(rows.tolist())) == 8
        seen |= set(rows.tolist())
        one.observe(graded(rows, 8), UNKNOWN)
    assert len(seen) == 8 + 6  # one further on each time, but never a new draw of the same positions
    assert mini_cluster_size(np.array([3, 2]), 5, 1) == 3


def test_the_floor_spreads_cluster_weights_and_visits_every_prompt():
    hopeless = sampler([40] * 4, 8, clusters=2, size=4, floor=0.2)
    hopeless.r, hopeless.p = np.array([1.0, 1.0, 1.0, 0.0]), np.array([0.5, 0.3, 0.2, 0.0])
    weights = hopeless.cluster_weights()
    assert weights.sum() == pytest.approx(1) and weights[3] == pytest.approx(0.05)
    seen = set()
    for _ in range(101):  # 1.6 of 8 rows a batch in deck order: 100 batches for 160 prompts
        rows = hopeless.draw(8, UNKNOWN).rows
        assert len(set(rows.tolist())) == 8
        seen |= set(rows.tolist())
        hopeless.observe(graded(rows, 4), UNKNOWN)
    assert seen == set(range(160))
    published, few = sampler([40] * 4, 8, clusters=2, size=4), set()
    for _ in range(101):
        rows = published.draw(8, UNKNOWN).rows
        few |= set(rows.tolist())
        published.observe(graded(rows, 4), UNKNOWN)
    assert len(few) == 16 and published.cluster_weights().tolist() == published.p.tolist()


def test_state_is_small_and_belongs_to_its_features():
    members = [3000] * 40
    one = sampler(members, 128)
    held = sum(array.nbytes for array in (one.order, one.cluster, one.bins, one.deck.rows, one.deck.bins))
    assert held / sum(members) <= 16
    assert len(json.dumps(one.state_dict())) < 40 * 32 * 8 + 10_000
    state = one.state_dict()
    with pytest.raises(ConfigError, match="clusters or difficulties are others"):
        sampler(members, 128, feats=features(members, seed=1)).load_state_dict(state)


def test_features_are_needed_and_must_fit():
    bins = np.arange(100) % 2
    with pytest.raises(ConfigError, match="fastsched cluster"):
        Scheduler(SchedulerConfig(kind="ads"), bins, 8, 10, 0)
    with pytest.raises(ConfigError, match="features of 60 rows for 100"):
        Scheduler(SchedulerConfig(kind="ads"), bins, 8, 10, 0, features([60]))


def test_configuration_is_checked():
    assert Config(scheduler=SchedulerConfig(kind="ads"), train=TrainConfig(prompts_per_step=128)).scheduler.ads.clusters == 4
    with pytest.raises(ConfigError, match="train.prompts_per_step: 64, but scheduler.ads draws 4 clusters of 32 prompts; set it to 128"):
        Config(scheduler=SchedulerConfig(kind="ads"), train=TrainConfig(prompts_per_step=64))
    for changes, key in ((dict(clusters=0), "clusters"), (dict(alpha=1.5), "alpha"), (dict(band=(0.7, 0.3)), "band")):
        with pytest.raises(ConfigError, match=key):
            AdsConfig(**changes)
