from types import SimpleNamespace

import numpy as np
import pytest

from fastsched.config import ConfigError, RolloutConfig
from fastsched.engines.rollout.weights import SyncError
from fastsched.loop import batches
from fastsched.loop.ahead import listed
from fastsched.loop.guards import why_stopped
from fastsched.loop.rollouts import Rollouts, _load_weights, _merge, gather_outcomes, group_of, restore_ahead
from fastsched.types import EngineError, Outcomes, Prompt, Response, Selection


def part(offset, rank, world, size=4, group=2):
    rows = np.arange(offset, offset + size)
    rewards = np.array([[row, row + row % 2] for row in rows], dtype=float)  # odd rows have two different rewards
    counts = np.ones((size, group), np.int64)
    mine = [row for i, row in enumerate(rows.tolist()) if i % world == rank]
    replies = [f"{row}.{k}" for row in mine for k in range(group)]
    return Rollouts(mine, replies, rewards[rank::world], replies, Outcomes(rows, rows, rewards, counts, counts == 0), [offset], size)


def test_every_chosen_group_is_trained_on_the_rank_that_rolled_it_out():
    chosen, trained = np.array([1, 3, 4, 5]), []
    for rank in range(2):
        merged = _merge([part(0, rank, 2), part(4, rank, 2)], chosen, rank, 2)
        assert merged.responses == merged.texts == [f"{row}.{k}" for row in merged.prompts for k in range(2)]
        np.testing.assert_array_equal(merged.rewards, np.array([[row, row + row % 2] for row in merged.prompts]).reshape(-1, 2))
        assert merged.outcomes.rows.tolist() == list(range(8)) and merged.probe == [4]
        trained += merged.prompts
    assert sorted(trained) == chosen.tolist()


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
def test_g3_a_batch_sampled_ahead_is_found_again_whoever_held_it(ranks):
    """Written by any number of ranks, read prompt by prompt."""
    held = [[f"{i}.{k}" for i in range(rank, 7, ranks) for k in range(4)] for rank in range(ranks)]
    for i in range(7):
        assert group_of(held, i, 4) == [f"{i}.{k}" for k in range(4)]


@pytest.mark.parametrize("group, held", [(2, 4), (4, 8)])
def test_a_batch_sampled_ahead_of_another_group_size_is_refused(group, held):
    """Two prompts, `held` responses in the checkpoint; the configuration now asks for 3 of each."""
    cfg = SimpleNamespace(train=SimpleNamespace(seed=0), rollout=RolloutConfig(responses=3, engine="vllm_server", ahead=1))
    prompt = lambda row: Prompt(row, (5, 6), "", "", 0)
    taken = []
    ahead = SimpleNamespace(put_back=lambda *batch: taken.append(batch))
    run = SimpleNamespace(cfg=cfg, ahead=ahead, train_set=SimpleNamespace(prompt=prompt), log=SimpleNamespace(warn=taken.append),
                          learner=SimpleNamespace(engine=SimpleNamespace(rank=0, world_size=1)))
    reply = listed(Response(0, (5, 6), (7,), np.zeros(1, np.float32), "stop", 4))
    state = {"step": 6, "rows": [8, 9], "bins": [0, 1], "weights": [0.5, 0.5], "responses": [[reply] * held]}
    with pytest.raises(ConfigError, match=f"rollout.responses: 3, but .* for step 6 holds {held} .*resume with {group}"):
        restore_ahead(run, state)
    assert taken == []
    cfg.rollout = RolloutConfig(responses=group, engine="vllm_server", ahead=1)
    restore_ahead(run, state)
    (step, drawn, responses), = taken
    assert step == 6 and drawn.selection.rows.tolist() == [8, 9] and [r.row for r in responses] == [8] * group + [9] * group


def test_a_rank_may_be_left_without_groups():
    merged = _merge([part(0, 0, 2), part(4, 0, 2)], np.array([1, 3]), 0, 2)
    assert merged.prompts == [] and merged.rewards.shape == (0, 2)


def one_rank(rollout=None, named=()):
    engine = SimpleNamespace(rank=0, world_size=1, all_gather=lambda value: [value], named_weights=lambda: iter(named))
    cfg = SimpleNamespace(rollout=SimpleNamespace(responses=2))
    return SimpleNamespace(learner=SimpleNamespace(engine=engine), rollout=rollout, cfg=cfg)


def test_c3_c10_lengths_and_truncation_are_those_of_the_responses_as_sampled():
    """Whatever is masked later: lengths count every token, and a response that met the limit stays marked."""
    reply = lambda n, reason: Response(0, (1, 2), tuple(range(n)), np.zeros(n, np.float32), reason, 0)
    replies = [reply(1, "stop"), reply(8, "length"), reply(3, "stop"), reply(8, "stop")]
    selection = Selection(np.array([7, 3]), np.array([0, 1]))
    mine, seen = gather_outcomes(one_rank(), selection, replies, np.array([np.nan, 0.0, 1.0, 1.0]))
    assert np.array_equal(mine, [[np.nan, 0.0], [1.0, 1.0]], equal_nan=True)
    assert seen.lengths.tolist() == [[1, 8], [3, 8]] and seen.truncated.tolist() == [[False, True], [False, False]]


def test_c3_c10_two_ranks_outcomes_come_in_the_order_of_the_selection():
    """The gather of two ranks: row i of the selection was rolled out by rank i % 2."""
    run = one_rank()
    other = (np.array([[3.0]]), np.array([[30]]), np.array([[True]]))
    run.learner.engine.all_gather = lambda mine: [mine, other]
    run.learner.engine.world_size, run.cfg.rollout.responses = 2, 1
    selection = Selection(np.array([5, 9]), np.array([0, 0]))
    _, seen = gather_outcomes(run, selection, [Response(5, (1,), (2, 3), np.zeros(2, np.float32), "stop", 0)], np.array([1.0]))
    assert (seen.rewards.tolist(), seen.lengths.tolist(), seen.truncated.tolist()) == ([[1.0], [3.0]], [[2], [30]], [[False], [True]])


class BreaksAfter:
    """The fault: a sampler that raises once it has taken `count` tensors."""

    def __init__(self, count: int, error: Exception):
        self.count, self.error = count, error

    def load_weights(self, named, version):
        for number, _ in enumerate(named, start=1):
            if number == self.count:
                raise self.error


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad shape"), AssertionError("size"), KeyError("q_proj"),
                                   TypeError("no tensor"), MemoryError()])
def test_h4_a_sampler_that_fails_in_a_sync_is_named_with_the_parameter(error):
    run = one_rank(BreaksAfter(2, error), [("embed", 1), ("layers.0.q_proj", 2), ("norm", 3)])
    name = type(error).__name__
    with pytest.raises(SyncError, match=rf"weight sync, version 4: the sampler failed at layers.0.q_proj \({name}.*--resume"):
        _load_weights(run, 4)


def test_h4_what_already_says_so_is_passed_on():
    with pytest.raises(SyncError, match="^unknown parameter$"):
        _load_weights(one_rank(BreaksAfter(1, SyncError("unknown parameter")), [("embed", 1)]), 4)


def test_a_lost_rank_is_told_from_an_error_of_our_own(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    gloo = RuntimeError("[pair.cc:537] Read error [127.0.0.1]:17575: Connection reset by peer. This is typically caused by\nmore")
    said = why_stopped(gloo)
    assert "cannot be reached any more (Read error [127.0.0.1]:17575: Connection reset by peer" in said and "--resume" in said
    with pytest.raises(RuntimeError, match="a bug"):
        why_stopped(RuntimeError("a bug"))
    shared, late = EngineError("sampler: generate (3 prompts) failed (RuntimeError: reset by peer)"), EngineError("server: timed out")
    shared.__cause__, late.__cause__ = gloo, OSError("timed out")
    assert why_stopped(shared) == said  # ranks that share an engine sample together
    assert why_stopped(late) == "server: timed out; the checkpoints are untouched: continue with --resume"
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert why_stopped(shared).startswith("sampler: generate (3 prompts) failed")
    with pytest.raises(RuntimeError, match="reset by peer"):  # of one rank nobody else can be lost
        why_stopped(gloo)


@pytest.mark.parametrize("sleep", [True, False])
def test_the_sampler_sleeps_after_the_last_sample_only_where_asked(monkeypatch, sleep):
    calls = []
    monkeypatch.setattr(batches, "roll_out", lambda run, step, wanted: calls.append(step))
    scheduler, train = SimpleNamespace(kind="uniform"), SimpleNamespace(prompts_per_step=4)
    cfg = SimpleNamespace(rollout=SimpleNamespace(sleep=sleep), scheduler=scheduler, train=train)
    batches.train_batch(SimpleNamespace(cfg=cfg, rollout=SimpleNamespace(sleep=lambda: calls.append("sleep"))), 3)
    assert calls == [3, "sleep"][: 1 + sleep]
