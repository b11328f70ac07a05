"""ADS against algorithms.md 2.2 and 2.3, against a second writing of its rules, and over long drives."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.config import AdsConfig, Config, ConfigError, SchedulerConfig, TrainConfig
from fastsched.control.ads import AdsSampler, followed, mini_cluster_size, moved, order_by_difficulty, without_empty
from fastsched.control.scheduler import Scheduler
from fastsched.control.window import unknown_success
from fastsched.types import Features, Outcomes, Stats

UNKNOWN = unknown_success(2, 0.5)
BAND = (0.33, 0.67)
UP, DOWN, KEEP = 1.0, 0.0, 0.5
STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=float("nan"),
              clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def features(members, seed=0):
    """Clusters of the given sizes in random row order; some difficulties are equal."""
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(len(members)), members)).astype(np.int32)
    difficulty = rng.integers(-3, 40, len(cluster)).astype(np.float32) / 7
    return Features(cluster, difficulty, np.zeros((len(cluster), 1), np.float16))


def sampler(members, prompts, seed=0, floor=0.0, feats=None, **ads):
    feats = feats or features(members)
    bins = np.arange(len(feats.cluster)) % 2
    cfg = SchedulerConfig(kind="ads", weight_floor=floor, ads=AdsConfig(**ads))
    return AdsSampler(cfg, bins.astype(np.uint16), np.bincount(bins), prompts, seed, feats)


def outcomes(rows, rewards):
    rewards = np.asarray(rewards, dtype=float)
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(np.asarray(rows), np.asarray(rows) % 2, rewards, counts, counts == 0)


def graded(rows, correct, responses=8):
    """`correct` of 8 responses to every row."""
    return outcomes(rows, np.arange(responses) < np.broadcast_to(correct, len(rows))[:, None])


@pytest.mark.parametrize("positions, moves, members, after", [
    ([0, 1, 2, 3], [UP] * 4, 10, [1, 2, 3, 4]),
    ([0, 1, 2, 3], [DOWN] * 4, 10, [0, 1, 2, 3]),
    ([6, 7, 8, 9], [UP] * 4, 10, [6, 7, 8, 9]),
    ([2, 3, 4, 5], [KEEP, UP, DOWN, KEEP], 10, [2, 3, 4, 5]),
    ([0, 1, 2], [UP] * 3, 3, [0, 1, 2]),  # no more members than positions
    ([0, 1], [UP] * 2, 2, [0, 1]),
    ([3, 4], [None, UP], 9, [3, 5]),  # no feedback stays
    ([3, 4], [UP, None], 9, [4, 5]),  # the aim is taken by a keeper: one further on
])
def test_positions_of_the_specification(positions, moves, members, after):
    success = {p: s for p, s in zip(positions, moves, strict=True) if s is not None}
    assert moved(np.array(positions), success, members, BAND).tolist() == after


@pytest.mark.parametrize("correct, to", [(0, 4), (1, 4), (2, 4), (3, 5), (4, 5), (5, 5), (6, 6), (7, 6), (8, 6)])
def test_three_to_five_of_eight_stay(correct, to):
    assert moved(np.array([5]), {5: correct / 8}, 20, BAND).tolist() == [to]


def test_the_ends_of_the_band_stay():
    assert moved(np.array([5]), {5: 0.33}, 20, BAND).tolist() == moved(np.array([5]), {5: 0.67}, 20, BAND).tolist() == [5]
    assert moved(np.array([5]), {5: np.nextafter(0.33, 0)}, 20, BAND).tolist() == [4]
    assert moved(np.array([5]), {5: np.nextafter(0.67, 1)}, 20, BAND).tolist() == [6]


def by_hand(positions, rates, n, low, high):
    """The rule of algorithms.md 2.3 in the order and words of its text, over a list of slots."""
    if n <= len(positions):
        return sorted(positions)
    slots = [False] * n
    for p in positions:
        if p not in rates or low <= rates[p] <= high:
            slots[p] = True
    jobs = [(p, -1) for p in sorted(positions) if p in rates and rates[p] < low]
    jobs += [(p, +1) for p in sorted(positions)[::-1] if p in rates and rates[p] > high]
    for p, direction in jobs:
        target = min(n - 1, max(0, p + direction))
        tries = [target]
        for radius in range(1, n + 1):
            tries += [target + direction * radius, target - direction * radius]
        slots[next(t for t in tries if 0 <= t < n and not slots[t])] = True
    return [i for i, used in enumerate(slots) if used]


@settings(deadline=None, max_examples=400)
@given(st.data())
def test_the_collision_rule_against_a_second_writing(data):
    n = data.draw(st.integers(1, 14))
    positions = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n)))
    rates = {p: data.draw(st.integers(0, 8)) / 8 for p in positions if data.draw(st.booleans())}
    low, high = data.draw(st.sampled_from([(0.33, 0.67), (0.5, 0.5), (0.0, 1.0), (0.25, 0.75)]))
    after = moved(np.array(positions), rates, n, (low, high)).tolist()
    assert after == by_hand(positions, rates, n, low, high) and len(after) == len(positions)


def test_weights_of_the_specification():
    p = followed(np.full(4, 0.25), np.array([0.9, 0.1, 0.5, 0.5]), 0.3)
    np.testing.assert_allclose(p, [0.31, 0.19, 0.25, 0.25], atol=1e-12)
    np.testing.assert_allclose(followed(np.array([0.7, 0.3]), np.zeros(2), 0.3), [0.64, 0.36], atol=1e-12)  # towards equal weights


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
    assert all(one.positions[k].tolist() == [0, 1, 2, 3] for k in range(5)) is False
    rows = one.draw(8, UNKNOWN).rows
    one.observe(graded(rows, 4), UNKNOWN)  # overwritten, not averaged; carried forward where it was not drawn
    assert all(one.r[k] == 0.5 for k in range(5) if k not in (a, b) or k in set(one.cluster[rows].tolist()))


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


def test_every_prompt_keeps_being_visited_under_a_drifting_policy():
    """A policy that learns what it is shown and forgets the rest, over many resets; the floor reaches what the rule does not."""
    feats = features([60] * 8)
    one = sampler(None, 32, feats=feats, floor=0.05, clusters=4, size=8)
    rng, skill, last = np.random.default_rng(0), np.zeros(8), np.zeros(480, int)
    rank = np.empty(480)
    for k in range(8):
        rank[one.order[one.starts[k]:one.starts[k] + 60]] = np.arange(60) / 60
    resets, widest = 0, 0
    for step in range(1, 2001):
        rows = one.draw(32, UNKNOWN).rows
        last[rows] = step
        p = 1 / (1 + np.exp(-6 * (skill[feats.cluster[rows]] - rank[rows])))
        one.observe(outcomes(rows, rng.random((32, 8)) < p[:, None]), UNKNOWN)
        skill = np.clip(0.995 * skill + 0.03 * (np.bincount(feats.cluster[rows], minlength=8) > 0), 0, 1)
        resets += one.steps == 0
        widest = max(widest, *(int(m.max()) for m in one.positions))
        assert step < 700 or last.min() > step - 700  # the deck needs 480 / 1.6 = 300 batches for a pass
    assert resets == 2000 // 15 and widest > 8


@settings(deadline=None, max_examples=12)
@given(st.lists(st.integers(0, 30), min_size=1, max_size=7).filter(lambda m: sum(m) >= 2), st.floats(0, 1), st.integers(0, 2**32 - 1),
       st.data())
def test_any_clusters_any_outcomes(members, floor, seed, data):
    """1000 steps in batches of a few prompts, resumed half-way from JSON: the straight run and the resumed one agree to the bit."""
    prompts = data.draw(st.integers(1, min(sum(members), 12)))
    size = data.draw(st.integers(1, 6))
    make = lambda: sampler(members, prompts, seed=seed, floor=floor, clusters=1, size=size)
    one, rng = make(), np.random.default_rng(seed)
    again = None
    for step in range(1000):
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
        if step == 500:
            again = make()
            again.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert json.dumps(again.state_dict()) == json.dumps(one.state_dict())


def test_ten_thousand_steps_in_the_published_shape():
    """64 clusters, 4 of 32 a batch, through the scheduler, with a policy that drifts."""
    feats = features(np.random.default_rng(1).integers(20, 300, 64).tolist())
    bins = np.arange(len(feats.cluster)) % 4
    cfg = SchedulerConfig(kind="ads", weight_floor=0.0)
    one = Scheduler(cfg, bins, 128, 10_000, 42, feats)
    rng, period = np.random.default_rng(2), len(bins) // 128
    for step in range(1, 10_001):
        chosen = one.next_prompts()
        assert len(np.unique(chosen.rows)) == 128 and sum(one.knobs().weights) == pytest.approx(1)
        p = 1 / (1 + np.exp(feats.difficulty[chosen.rows] - 3 - 2 * np.sin(step / 50)))
        rewards = (rng.random((128, 8)) < p[:, None]).astype(float)
        one.observe(Outcomes(chosen.rows, chosen.bins, rewards, np.ones((128, 8), int), np.zeros((128, 8), bool)), STATS)
        assert abs(one.sampler.p.sum() - 1) < 1e-12 and one.sampler.steps == step % period
    state = json.dumps(one.state_dict())
    again = Scheduler(cfg, bins, 128, 10_000, 42, feats)
    again.load_state_dict(json.loads(state))
    assert json.dumps(again.state_dict()) == state
    for _ in range(3):
        a, b = one.next_prompts(), again.next_prompts()
        assert a.rows.tolist() == b.rows.tolist() and a.bins.tolist() == b.bins.tolist()
        for s in (one, again):
            s.observe(Outcomes(a.rows, a.bins, rewards, np.ones((128, 8), int), np.zeros((128, 8), bool)), STATS)
    assert json.dumps(again.state_dict()) == json.dumps(one.state_dict())


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
