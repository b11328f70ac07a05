from types import SimpleNamespace

import numpy as np
import pytest

from fastsched import rollouts
from fastsched.rollouts import Rollouts, _merge
from fastsched.types import Outcomes


def part(offset, rank, world, size=4, group=2):
    rows = np.arange(offset, offset + size)
    rewards = np.array([[row, row + row % 2] for row in rows], dtype=float)  # odd rows have two different rewards
    counts = np.ones((size, group), np.int64)
    mine = [row for i, row in enumerate(rows.tolist()) if i % world == rank]
    replies = [f"{row}.{k}" for row in mine for k in range(group)]
    return Rollouts(mine, replies, rewards[rank::world], replies, Outcomes(rows, rows, rewards, counts, counts == 0), [offset])


def test_every_chosen_group_is_trained_on_the_rank_that_rolled_it_out():
    chosen, trained = np.array([1, 3, 4, 5]), []
    for rank in range(2):
        merged = _merge([part(0, rank, 2), part(4, rank, 2)], chosen, rank, 2)
        assert merged.responses == merged.texts == [f"{row}.{k}" for row in merged.prompts for k in range(2)]
        np.testing.assert_array_equal(merged.rewards, np.array([[row, row + row % 2] for row in merged.prompts]).reshape(-1, 2))
        assert merged.outcomes.rows.tolist() == list(range(8)) and merged.probe == [4]
        trained += merged.prompts
    assert sorted(trained) == chosen.tolist()


def test_a_rank_may_be_left_without_groups():
    merged = _merge([part(0, 0, 2), part(4, 0, 2)], np.array([1, 3]), 0, 2)
    assert merged.prompts == [] and merged.rewards.shape == (0, 2)


@pytest.mark.parametrize("sleep", [True, False])
def test_the_sampler_sleeps_after_the_last_sample_only_where_asked(monkeypatch, sleep):
    calls = []
    monkeypatch.setattr(rollouts, "_roll_out", lambda run, step: calls.append(step))
    engine = SimpleNamespace(sleep=lambda: calls.append("sleep"))
    run = SimpleNamespace(cfg=SimpleNamespace(rollout=SimpleNamespace(sleep=sleep)), rollout=engine)
    rollouts.roll_out(run, 3)
    assert calls == [3, "sleep"][: 1 + sleep]
