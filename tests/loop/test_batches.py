"""SPEED and DOTS on a real sampler, learner and reward pool, one rank, step by step."""

import io
import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from fastsched.config import (
    Config,
    DataConfig,
    DotsConfig,
    LogConfig,
    ModelConfig,
    RewardConfig,
    RolloutConfig,
    SchedulerConfig,
    SpeedConfig,
    TrainConfig,
)
from fastsched.control.scheduler import Scheduler
from fastsched.data.rewards import RewardResult
from fastsched.groups import flat_groups, mixed_groups
from fastsched.loop import batches
from fastsched.loop.assemble import assemble_training
from fastsched.loop.batches import train_batch
from fastsched.loop.buffers import make_buffer
from fastsched.record.log import RunLog
from fastsched.types import Features, Stats

P, G, SCREEN = 6, 5, 2
SPEED = SchedulerConfig(kind="speed", speed=SpeedConfig(screen=SCREEN, candidates=4))
STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=1.0, clip_fraction=0.0,
              ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)
DOTS = SchedulerConfig(kind="dots", dots=DotsConfig(buffer=8))


@pytest.fixture(scope="module")
def assembled(random_model, tmp_path_factory):
    """A run whose reward a random model varies in."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "third.py").write_text("def score(response, **_):\n    return float(sum(map(ord, response)) % 3 == 0)\n")
    cfg = Config(model=ModelConfig(name=str(random_model)), data=DataConfig(size=300, digits=(1, 2), max_prompt_tokens=48, eval_per_bin=4),
                 reward=RewardConfig(kind="third:score"), rollout=RolloutConfig(engine="transformers", responses=G, max_new_tokens=6),
                 train=TrainConfig(prompts_per_step=P), log=LogConfig(tensorboard=False))
    patch = pytest.MonkeyPatch()
    patch.chdir(folder)
    with RunLog(folder / "log", cfg.log, 10, console=Console(file=io.StringIO())) as log, assemble_training(cfg, folder, log) as run:
        yield run
    patch.undo()
    assert not torch.distributed.is_initialized()


@pytest.fixture
def run(assembled):
    assembled.rollout.load_weights(assembled.learner.engine.named_weights(), 0)
    return assembled


def at_step(run, step: int):
    """The batch of a step, whose sampler has taken over the weights of the step before."""
    run.rollout._engine.weight_version = step - 1  # behind the time limit of every call
    return train_batch(run.source, run.buffer, step)


class Recorded:
    """An engine that keeps its calls: (row, number of responses) of each prompt."""

    def __init__(self, engine):
        self.engine, self.calls = engine, []

    def __getattr__(self, name):
        return getattr(self.engine, name)

    def generate(self, prompts, sampling, seeds, responses=None):
        self.calls.append([(p.row, n) for p, n in zip(prompts, responses or [sampling.responses] * len(prompts), strict=True)])
        return self.engine.generate(prompts, sampling, seeds, responses)


def of(run, kind: SchedulerConfig):
    """The run under another sampler, with an empty buffer; its calls of the rollout engine are in `rollout.calls`."""
    rng = np.random.default_rng(0)
    embedding = rng.standard_normal((len(run.source.train_set), 4)).astype(np.float16)
    features = Features(np.zeros(len(embedding), np.int32), np.zeros(len(embedding), np.float32), embedding)
    cfg, rollout = replace(run.cfg, scheduler=kind), Recorded(run.rollout)
    scheduler = Scheduler(kind, run.source.train_set.bins, P, 100, 0, features)
    return replace(run, cfg=cfg, scheduler=scheduler, rollout=rollout, buffer=make_buffer(kind, P, G),
                   source=replace(run.source, cfg=cfg, scheduler=scheduler, rollout=rollout))


def take_step(run, step, train=True):
    rolled = at_step(run, step)
    if train:
        stats = run.learner.update(rolled.responses, rolled.rewards, run.scheduler.knobs(), step)
        run.rollout.load_weights(run.learner.engine.named_weights(), step)
        run.scheduler.observe(rolled.outcomes, stats)
    return rolled


def complete(rolled) -> None:
    """Prompt-major groups of G responses, each of its own prompt."""
    assert len(rolled.responses) == len(rolled.texts) == rolled.rewards.size and rolled.rewards.shape == (rolled.trained, G)
    assert [r.row for r in rolled.responses] == [p.row for p in rolled.prompts for _ in range(G)]
    assert len({p.row for p in rolled.prompts}) == len(rolled.prompts)


def test_speed_screens_then_fuses_continuations_with_the_next_screen(run):
    one = of(run, SPEED)
    first = take_step(one, 1)
    complete(first)
    screen, fused = one.rollout.calls  # nothing waited in the first step: it generated twice
    assert {n for _, n in screen} == {SCREEN} and len(screen) == 2 * P
    continued = [row for row, n in fused if n == G - SCREEN]
    assert [p.row for p in first.prompts] == continued and 0 < len(continued) <= P
    assert mixed_groups(first.rewards[:, :SCREEN], 0.5).all()  # none but those that passed were continued
    assert {r.weight_version for r in first.responses} == {0}
    waiting = list(one.buffer.groups)
    second = take_step(one, 2)
    complete(second)
    assert len(one.rollout.calls) == 3
    assert [p.row for p in second.prompts] == waiting[:P] == [row for row, n in one.rollout.calls[2] if n == G - SCREEN]
    assert [r.weight_version for r in second.responses] == ([0] * SCREEN + [1] * (G - SCREEN)) * second.trained
    assert (first.staleness, second.staleness) == (0, 1)
    assert one.scheduler.success.failed_scores == 0  # what was not sampled did not fail


def test_speed_observes_everything_that_was_rolled_out_and_counts_a_prompt_once(run):
    one = of(run, SPEED)
    rolled = take_step(one, 1)
    calls = [entry for call in one.rollout.calls for entry in call]
    assert rolled.outcomes.rows.tolist() == [row for row, _ in calls]
    assert rolled.outcomes.sampled.sum(1).tolist() == [n for _, n in calls]
    assert rolled.outcomes.new_prompts == len({row for row, _ in calls}) == len(calls) - rolled.trained
    continued = rolled.outcomes.continued
    assert [row for (row, _), again in zip(calls, continued, strict=True) if again] == [p.row for p in rolled.prompts]
    np.testing.assert_array_equal(rolled.outcomes.bins, run.source.train_set.bins[rolled.outcomes.rows])
    screened = rolled.outcomes.rewards[~continued]
    assert one.scheduler.sampler.pass_rate == pytest.approx(mixed_groups(screened, 0.5).mean())


def test_speed_trains_what_is_ready_and_never_screens_a_waiting_prompt(run):
    one = of(run, SPEED)
    for step in range(1, 5):
        before = list(one.buffer.groups)
        rolled = take_step(one, step, train=False)
        call = one.rollout.calls[-1]
        assert len({row for row, _ in call}) == len(call)
        assert rolled.trained == (min(P, len(before)) if step > 1 else len(rolled.prompts)) > 0
        assert not {row for row, n in call if n == SCREEN} & set(before)
        one.rollout.calls.clear()


def test_speed_without_a_passing_candidate_ends_its_rounds_and_trains_groups_without_signal(run, monkeypatch):
    one = of(run, SPEED)
    wrong = lambda items: RewardResult(np.zeros(len(items)), {}, {}, np.zeros(len(items), bool))
    monkeypatch.setattr(one.source.scorer.pool, "score", wrong)
    rolled = take_step(one, 1)
    complete(rolled)
    assert len(one.rollout.calls) == batches.ROUNDS and rolled.trained == P and flat_groups(rolled.rewards).all()
    assert len(one.buffer) == 0 and one.scheduler.sampler.pass_rate == 0.0
    assert {row for row, n in one.rollout.calls[-1] if n == G - SCREEN} <= {row for row, _ in one.rollout.calls[-2]}


def test_a_screen_without_log_probabilities_is_not_kept(run):
    one = of(run, SPEED)
    generate = one.rollout.generate

    def without(*arguments):
        sampled = generate(*arguments)
        return [replace(r, logp=np.full_like(r.logp, np.nan)) if r.row % 2 else r for r in sampled]

    one.rollout.generate = without
    rolled = take_step(one, 1, train=False)
    assert rolled.trained > 0 and all(row % 2 == 0 for row in one.buffer.groups) and all(p.row % 2 == 0 for p in rolled.prompts)


def test_dots_replays_half_of_a_batch_and_observes_only_what_is_new(run):
    one = of(run, DOTS)
    first = take_step(one, 1)
    complete(first)
    assert first.trained == P and len(one.rollout.calls[0]) == P
    kept = list(one.buffer.groups)
    assert kept == [p.row for p, flat in zip(first.prompts, flat_groups(first.rewards), strict=True) if not flat]
    second = take_step(one, 2)
    complete(second)
    old = min(P // 2, len(kept))
    new, again = second.prompts[:P - old], second.prompts[P - old:]
    assert [p.row for p in new] == second.outcomes.rows.tolist() == [row for row, _ in one.rollout.calls[1]]
    assert {p.row for p in again} <= set(kept) and len(again) <= old and second.trained == len(new) + len(again)
    assert [r.weight_version for r in second.responses] == [1] * G * len(new) + [0] * G * len(again)
    assert (first.staleness, second.staleness) == (0, 1)
    assert second.outcomes.lengths.sum() == sum(len(r.token_ids) for r in second.responses[:G * len(new)])
    for step in range(3, 8):
        take_step(one, step, train=False)
    assert len(one.buffer) == DOTS.dots.buffer


def test_dots_forgets_groups_of_old_weights(run):
    one = of(run, replace(DOTS, dots=DotsConfig(buffer=1000, max_age=2)))
    ages = [take_step(one, step, train=False).staleness for step in range(1, 9)]
    assert ages[:2] == [0, 1] and max(ages) == 2
    oldest = [min(r.weight_version for r in group.responses) for group in one.buffer.groups.values()]
    assert min(oldest) == 7 - 2


@pytest.mark.parametrize("share, new", [(0.0, P), (0.7, P - 4)])
def test_dots_replay_share_is_what_the_option_says(run, share, new):
    one = of(run, replace(DOTS, dots=DotsConfig(buffer=32, replay=share)))
    for step in range(1, 5):
        rolled = take_step(one, step, train=False)
    assert len(rolled.outcomes.rows) == new and rolled.trained == P


@pytest.mark.parametrize("scheduler", [SPEED, DOTS], ids=["speed", "dots"])
def test_a_resumed_buffer_goes_on_as_if_nothing_had_happened(run, scheduler):
    one, two = of(run, scheduler), of(run, scheduler)
    for step in range(1, 4):
        rolled = at_step(one, step)
        one.scheduler.observe(rolled.outcomes, STATS)
    two.scheduler.load_state_dict(json.loads(json.dumps(one.scheduler.state_dict(), allow_nan=False)))
    two.buffer.load(one.buffer.arrays())
    assert len(two.buffer) > 0
    for step in range(4, 6):
        a, b = at_step(one, step), at_step(two, step)
        assert [(r.row, r.token_ids, r.weight_version, r.logp.tobytes()) for r in a.responses] == \
               [(r.row, r.token_ids, r.weight_version, r.logp.tobytes()) for r in b.responses]
        np.testing.assert_array_equal(a.rewards, b.rewards)
        for each, rolled in ((one, a), (two, b)):
            each.scheduler.observe(rolled.outcomes, STATS)
        assert one.scheduler.state_dict() == two.scheduler.state_dict() and list(one.buffer.groups) == list(two.buffer.groups)
