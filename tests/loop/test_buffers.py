import numpy as np
import pytest
from one_array import OneArray

from fastsched.config import ConfigError, DotsConfig, SchedulerConfig, SpeedConfig
from fastsched.loop.buffers import Group, GroupBuffer, make_buffer
from fastsched.record.checkpoint import load_arrays, save_checkpoint
from fastsched.types import Response


def group(row, responses=3, version=0):
    rng = np.random.default_rng([row, version])
    prompt = tuple(rng.integers(0, 300, int(rng.integers(1, 6))).tolist())
    sampled = []
    for _ in range(responses):
        n = int(rng.integers(1, 5))
        sampled.append(Response(row, prompt, tuple(rng.integers(0, 300, n).tolist()), rng.normal(-1, 1, n).astype(np.float32),
                                "stop" if n < 4 else "length", version))
    return Group(row, tuple(sampled), np.where(rng.random(responses) < 0.3, np.nan, rng.random(responses)))


def filled(*rows, capacity=10):
    buffer = GroupBuffer(capacity, 7, complete=False)
    buffer.put(group(row) for row in rows)
    return buffer


def same(a: GroupBuffer, b: GroupBuffer) -> bool:
    def plain(buffer):
        return [(g.row, g.rewards.tobytes(), [(r.row, r.prompt_ids, r.token_ids, r.logp.tobytes(), r.finish_reason, r.weight_version)
                                              for r in g.responses]) for g in buffer.groups.values()]
    return plain(a) == plain(b)


def test_groups_leave_oldest_first_and_a_prompt_has_one_group():
    buffer = filled(1, 2, 3, 4, capacity=3)
    assert list(buffer.groups) == [2, 3, 4]
    newer = group(2, version=5)
    buffer.put([newer])
    assert list(buffer.groups) == [3, 4, 2] and buffer.groups[2] is newer
    assert [g.row for g in buffer.take(2)] == [3, 4] and len(buffer) == 1
    assert [g.row for g in buffer.take(5)] == [2] and len(buffer) == 0 and buffer.take(1) == []


def test_a_sample_stays_is_distinct_and_leaves_out_what_it_should():
    buffer, rng = filled(*range(8)), np.random.default_rng(0)
    rows = [[g.row for g in buffer.sample(4, {0, 1}, rng)] for _ in range(50)]
    assert all(len(set(r)) == 4 and not {0, 1} & set(r) for r in rows) and {x for r in rows for x in r} == set(range(2, 8))
    assert len(buffer) == 8 and len(buffer.sample(20, {0, 1}, rng)) == 6


def test_groups_of_older_weights_are_forgotten():
    buffer = GroupBuffer(10, 7, complete=False)
    mixed = Group(3, group(3, version=4).responses + group(3, version=6).responses, np.zeros(6))
    buffer.put([group(1, version=5), group(2, version=4), mixed])
    buffer.forget(5)
    assert list(buffer.groups) == [1]
    buffer.forget(0)
    assert list(buffer.groups) == [1]


def test_no_capacity_keeps_nothing():
    assert len(filled(1, 2, capacity=0)) == 0


def test_a_checkpoint_keeps_every_bit(tmp_path):
    buffer = filled(5, 3, 9)
    buffer.put([group(4, responses=1, version=7), group(3, responses=6, version=8)])
    folder = save_checkpoint(tmp_path, 1, OneArray(), {}, 2, arrays=buffer.arrays())
    again = filled(1)
    again.load(load_arrays(folder))
    assert same(buffer, again) and list(again.groups) == [5, 9, 4, 3]
    empty = save_checkpoint(tmp_path, 2, OneArray(), {}, 2, GroupBuffer(3, 7, complete=False).arrays())
    assert not (empty / "groups.npz").exists()
    again.load(load_arrays(empty))
    assert len(again) == 0


def test_a_log_probability_that_is_missing_makes_a_group_useless_later():
    good = group(1)
    assert good.usable
    spoilt = [*good.responses[:2], Response(1, (1,), (2, 3), np.array([-0.5, np.nan], np.float32), "stop", 0)]
    assert not Group(1, tuple(spoilt), good.rewards).usable


@pytest.mark.parametrize("cfg, capacity", [
    (SchedulerConfig(), 0), (SchedulerConfig(kind="dots", dots=DotsConfig(buffer=7)), 7),
    (SchedulerConfig(kind="speed", speed=SpeedConfig(candidates=3)), 64),
])
def test_the_kind_decides_the_capacity(cfg, capacity):
    assert make_buffer(cfg, 16, 8).capacity == capacity


@pytest.mark.parametrize("complete, responses, fits", [(True, 3, True), (True, 4, False), (False, 4, True), (False, 3, False)])
def test_groups_of_another_number_of_responses_are_refused(complete, responses, fits):
    """A replayed group has all G responses; one that waits for the rest lacks some."""
    arrays, buffer = filled(5, 3, 9).arrays(), GroupBuffer(10, responses, complete=complete)
    if fits:
        buffer.load(arrays)
        assert list(buffer.groups) == [5, 3, 9]
    else:
        with pytest.raises(ConfigError, match=f"rollout.responses: {responses}, but the checkpoint keeps groups of up to 3"):
            buffer.load(arrays)
