from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fastsched.config import ConfigError, RolloutConfig
from fastsched.engines.ranks import Ranks
from fastsched.engines.rollout.weights import SyncError
from fastsched.loop.ahead import AheadSource, LookAhead, group_of, response_to_json
from fastsched.loop.batches import train_batch
from fastsched.loop.buffers import make_buffer
from fastsched.loop.guards import why_stopped
from fastsched.loop.outcomes import Scores, gather_outcomes, join_outcomes
from fastsched.loop.rollouts import Rollouts, merge
from fastsched.loop.sync import load_weights
from fastsched.types import EngineError, Outcomes, Response, Selection


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
        merged = merge([part(0, rank, 2), part(4, rank, 2)], chosen, Ranks(rank, 2))
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


def with_rollout(source, cfg: RolloutConfig):
    return replace(source, cfg=replace(source.cfg, rollout=cfg))


def ahead(source, responses: int) -> AheadSource:
    """`source` with rollouts one step ahead."""
    one = with_rollout(source, RolloutConfig(responses=responses, engine="vllm_server", ahead=1))
    return AheadSource(**vars(one), ahead=LookAhead(one.rollout.generate))


def sampled_ahead(held: int) -> dict:
    """The state of a checkpoint: two prompts, `held` responses."""
    reply = response_to_json(Response(0, (5, 6), (7,), np.zeros(1, np.float32), "stop", 4))
    return {"step": 6, "rows": [8, 9], "bins": [0, 1], "weights": [0.5, 0.5], "responses": [[reply] * held]}


@pytest.mark.parametrize("group, held", [(2, 4), (4, 8)])
def test_a_batch_sampled_ahead_of_another_group_size_is_refused(source, group, held):
    """The configuration asks for 3 responses of each."""
    state, other = sampled_ahead(held), ahead(source, 3)
    with pytest.raises(ConfigError, match=f"rollout.responses: 3, but .* for step 6 holds {held} .*resume with {group}"):
        other.restore(state)
    assert other.state() is None
    same = ahead(source, group)
    same.restore(state)
    step, drawn, responses = same.ahead.pending()
    assert step == 6 and drawn.selection.rows.tolist() == [8, 9] and [r.row for r in responses] == [8] * group + [9] * group
    assert same.state() == state


def test_a_batch_sampled_ahead_is_dropped_and_told_where_nothing_is_ahead_any_more(source):
    text = lambda: (source.log.run_dir / "log.txt").read_text()
    source.restore(None)
    assert "dropped" not in text()
    source.restore(sampled_ahead(4))
    assert "WARNING: rollout.ahead is off now: the batch sampled ahead for step 6 is dropped" in text()
    assert source.state() is None


@pytest.mark.parametrize("allowed, versions, expected", [(0, [4, 4], 0.0), (1, [4, 3], 1.0), (0, [4, 3], None), (1, [4, 2], None)])
def test_staleness_is_bounded(source, allowed, versions, expected):
    one = with_rollout(source, RolloutConfig(responses=2, engine="vllm_server", ahead=allowed))
    responses = [Response(0, (1,), (2,), np.zeros(1, np.float32), "stop", version) for version in versions]
    drawn = one.drawn(Selection(np.array([0]), np.array([0])), 5)
    if expected is None:
        with pytest.raises(SyncError, match=f"weight versions old, rollout.ahead allows {allowed}"):
            one.scored(drawn, responses, 5)
    else:
        assert one.scored(drawn, responses, 5).staleness == expected


def test_a_rank_may_be_left_without_groups():
    merged = merge([part(0, 0, 2), part(4, 0, 2)], np.array([1, 3]), Ranks(0, 2))
    assert merged.prompts == [] and merged.rewards.shape == (0, 2)


def test_c3_c10_lengths_and_truncation_are_those_of_the_responses_as_sampled():
    """Whatever is masked later: lengths count every token, and a response that met the limit stays marked."""
    reply = lambda n, reason: Response(0, (1, 2), tuple(range(n)), np.zeros(n, np.float32), reason, 0)
    replies = [reply(1, "stop"), reply(8, "length"), reply(3, "stop"), reply(8, "stop")]
    selection = Selection(np.array([7, 3]), np.array([0, 1]))
    scores = Scores(np.array([np.nan, 0.0, 1.0, 1.0]), [], {}, np.array([0, 1, 0, 0], bool), {})
    mine, seen = gather_outcomes(Ranks(), selection, 2, replies, scores)
    assert np.array_equal(mine, [[np.nan, 0.0], [1.0, 1.0]], equal_nan=True)
    assert seen.lengths.tolist() == [[1, 8], [3, 8]] and seen.truncated.tolist() == [[False, True], [False, False]]
    assert seen.unreadable.tolist() == [[False, True], [False, False]]


@dataclass(frozen=True)
class BesideAnother(Ranks):
    """Rank 0 of two; the other one gathers `theirs`."""

    theirs: tuple = ()

    def all_gather(self, value):
        return [value, self.theirs]


def test_c3_c10_two_ranks_outcomes_come_in_the_order_of_the_selection():
    """The gather of two ranks: row i of the selection was rolled out by rank i % 2."""
    ranks = BesideAnother(world_size=2, theirs=(np.array([[3.0]]), np.array([[30]]), np.array([[True]]), np.array([[True]]),
                                                np.array([[0.25]])))
    selection = Selection(np.array([5, 9]), np.array([0, 0]))
    response = Response(5, (1,), (2, 3), np.zeros(2, np.float32), "stop", 0)
    scores = Scores(np.array([1.0]), [], {}, np.array([False]), {"short": np.array([0.5])})
    _, seen = gather_outcomes(ranks, selection, 1, [response], scores)
    assert (seen.rewards.tolist(), seen.lengths.tolist(), seen.truncated.tolist()) == ([[1.0], [3.0]], [[2], [30]], [[False], [True]])
    assert seen.unreadable.tolist() == [[False], [True]]
    assert {name: values.tolist() for name, values in seen.parts.items()} == {"short": [[0.5], [0.25]]}


def test_the_parts_of_a_reward_are_joined_and_averaged_over_what_was_scored():
    of = lambda values: replace(part(0, 0, 1, size=1).outcomes, lengths=np.ones((1, len(values)), int), rewards=np.array([values]),
                                truncated=np.zeros((1, len(values)), bool), parts={"short": np.array([values]) / 2})
    joined = join_outcomes([of([1.0, np.nan]), of([0.0, 1.0, 1.0])])
    assert np.array_equal(joined.parts["short"], [[0.5, np.nan, np.nan], [0.0, 0.5, 0.5]], equal_nan=True)
    assert replace(part(0, 0, 1), outcomes=joined).columns()["reward_short"] == 0.375


class BreaksAfter:
    """The fault: a sampler that raises once it has taken `count` tensors."""

    dtype = torch.float32

    def __init__(self, count: int, error: Exception):
        self.count, self.error = count, error

    def load_weights(self, named, version):
        for number, _ in enumerate(named, start=1):
            if number == self.count:
                raise self.error


@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad shape"), AssertionError("size"), KeyError("q_proj"),
                                   TypeError("no tensor"), MemoryError()])
def test_h4_a_sampler_that_fails_in_a_sync_is_named_with_the_parameter(error):
    sampler, name = BreaksAfter(2, error), type(error).__name__
    with pytest.raises(SyncError, match=rf"weight sync, version 4: the sampler failed at layers.0.q_proj \({name}.*--resume"):
        load_weights(sampler, iter([(name, torch.ones(2)) for name in ("embed", "layers.0.q_proj", "norm")]), 4)


def test_h4_what_already_says_so_is_passed_on():
    with pytest.raises(SyncError, match="^unknown parameter$"):
        load_weights(BreaksAfter(1, SyncError("unknown parameter")), iter([("embed", torch.ones(2))]), 4)


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


class Drowsy:
    """An engine that can sleep, as vLLM's can; its calls in order."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    def generate(self, *arguments):
        self.calls.append("generate")
        return self.engine.generate(*arguments)

    def sleep(self):
        self.calls.append("sleep")


@pytest.mark.parametrize("sleep", [True, False])
def test_the_sampler_sleeps_after_the_last_sample_only_where_asked(source, sleep):
    cfg, rollout = replace(source.cfg.rollout, engine="vllm", sleep=sleep), Drowsy(source.rollout)
    buffer = make_buffer(source.cfg.scheduler, 4, 2)
    rolled = train_batch(replace(with_rollout(source, cfg), rollout=rollout), buffer, 1)
    assert rolled.rewards.shape == (4, 2) and rollout.calls == ["generate", "sleep"][: 1 + sleep]
