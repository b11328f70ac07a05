"""Samplers beside the rest of the configuration: what makes no sense together is refused with the reason."""

import pytest

from fastsched.config import (
    CoefficientConfig,
    Config,
    ConfigError,
    LearnerConfig,
    RolloutConfig,
    SchedulerConfig,
    SpeedConfig,
    TemporalConfig,
)
from fastsched.config.arguments import parse_config

KINDS = ("vcrl", "replay", "speed", "dots", "learned")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_its_options_come_from_the_command_line(kind):
    options = {"vcrl": "kappa 0.7", "replay": "memory 9", "speed": "screen 2", "dots": "pool 64", "learned": "arms clusters"}
    option = options[kind].split()
    cfg = parse_config(["--scheduler.kind", kind, f"--scheduler.{kind}.{option[0]}", option[1]])
    assert cfg.scheduler.kind == kind and str(getattr(getattr(cfg.scheduler, kind), option[0])) == option[1]


@pytest.mark.parametrize("kind", ["speed", "dots"])
def test_refills_beside_a_buffer_are_refused(kind):
    with pytest.raises(ConfigError, match=f"scheduler.refills: scheduler.kind={kind} fills its batches from a buffer"):
        SchedulerConfig(kind=kind, refills=1)
    assert SchedulerConfig(kind="vcrl", refills=1).refills == 1


@pytest.mark.parametrize("kind", ["speed", "dots"])
@pytest.mark.parametrize("rollout, message", [
    ({"top_p": 0.9}, "rollout.top_p, rollout.top_k: .*renormalise"), ({"top_k": 20}, "rollout.top_p, rollout.top_k: .*renormalise"),
])
def test_settings_that_assume_fresh_responses_are_refused(kind, rollout, message):
    with pytest.raises(ConfigError, match=message):
        Config(scheduler=SchedulerConfig(kind=kind), rollout=RolloutConfig(**rollout))
    with pytest.raises(ConfigError, match=message):
        Config(rollout=RolloutConfig(engine="vllm_server", ahead=1, **rollout))
    assert Config(scheduler=SchedulerConfig(kind="vcrl"), rollout=RolloutConfig(**rollout)).scheduler.kind == "vcrl"
    assert Config(scheduler=SchedulerConfig(kind=kind), rollout=RolloutConfig(correction="icepop")).scheduler.kind == kind


@pytest.mark.parametrize("kind", ["speed", "dots", "ads"])
def test_a_batch_sampled_ahead_of_what_its_sampler_learns_is_refused(kind):
    ahead = RolloutConfig(engine="vllm_server", ahead=1)
    with pytest.raises(ConfigError, match=f"rollout.ahead: scheduler.kind {kind} composes its batches from what the step before"):
        Config(scheduler=SchedulerConfig(kind=kind), rollout=ahead)
    assert Config(scheduler=SchedulerConfig(kind="sec"), rollout=ahead).rollout.ahead == 1


def test_what_could_never_act_is_refused():
    with pytest.raises(ConfigError, match="scheduler.kl.start: `targets` multiplies lambda_KL"):
        SchedulerConfig(coefficients="targets", kl=CoefficientConfig(0.0, 0.0, 0.1))
    assert SchedulerConfig(coefficients="targets").kl.ceiling == 0
    for kind in ("uniform", "fixed", "mopps", "greso", "ads", "vcrl", "replay", "speed", "dots"):
        with pytest.raises(ConfigError, match=f"scheduler.update_every: scheduler.kind={kind} has no weights that move"):
            SchedulerConfig(kind=kind, update_every=2)
    with pytest.raises(ConfigError, match="scheduler.fixed_weights: scheduler.kind=mopps takes no weights"):
        SchedulerConfig(kind="mopps", fixed_weights=(0.5, 0.5))
    opd = LearnerConfig(loss="opd", teacher="x", kl="none")
    with pytest.raises(ConfigError, match="scheduler.temporal.proxy: advantage adds to the reward's advantage"):
        Config(learner=opd, scheduler=SchedulerConfig(temporal=TemporalConfig(mode="linear", proxy="advantage")))
    assert Config(learner=opd, scheduler=SchedulerConfig(temporal=TemporalConfig(mode="linear"))).learner.loss == "opd"


def test_a_screen_leaves_something_to_continue():
    with pytest.raises(ConfigError, match="scheduler.speed.screen: 8 of rollout.responses 8 leave nothing to continue"):
        Config(scheduler=SchedulerConfig(kind="speed", speed=SpeedConfig(screen=8)), rollout=RolloutConfig(responses=8))
    Config(scheduler=SchedulerConfig(kind="uniform", speed=SpeedConfig(screen=8)), rollout=RolloutConfig(responses=8))


@pytest.mark.parametrize("options, message", [
    ("--learner.reference copy --scheduler.copy_every 5 --learner.kl none", "learner.reference: copy is what the KL is taken to"),
    ("--learner.reference copy --scheduler.copy_every 5 --learner.kl none --learner.loss opd --learner.teacher T",
     "learner.reference: copy"),
    ("--scheduler.kl_gate.enabled true", "scheduler.kl_gate: .*stays 0"),
    ("--scheduler.kl_gate.enabled true --learner.kl none", "scheduler.kl_gate: .*learner.kl is none"),
    ("--scheduler.temporal.proxy entropy", "scheduler.temporal.proxy: entropy has no effect"),
    ("--data.source rows.jsonl", "data.source, data.subset, data.difficulty_column: have no effect with data.task arithmetic"),
    ("--data.difficulty_column level", "data.difficulty_column: have no effect"),
    ("--data.task dataset --data.source rows.jsonl --data.subset main", "data.subset: is of a hub data set"),
    ("--learner.updates_per_batch 17", "learner.updates_per_batch: 17 optimizer steps on 16 prompts"),
    ("--learner.warmup_steps -3", "warmup_steps must be at least 0"), ("--learner.grad_clip -1", "grad_clip"),
    ("--learner.betas 0.9 1.0", "learner.betas"), ("--learner.nonfinite_limit 0", "nonfinite_limit"),
    ("--learner.chunk_rows 0", "chunk_rows"),
    ("--train.ranks 0", "ranks"), ("--train.seed -1", "seed"), ("--train.no_signal_limit 0", "no_signal_limit"),
    ("--train.eval_every -1", "eval_every"), ("--log.samples_per_step -1", "log.samples_per_step"),
    ("--rollout.max_new_tokens 0", "max_new_tokens"), ("--rollout.max_num_seqs 0", "max_num_seqs"), ("--rollout.top_p 2", "rollout.top_p"),
    ("--rollout.top_k 0", "rollout.top_k"), ("--rollout.temperature 0.005", "rollout.temperature"),
    ("--rollout.kv_cache_gb -1", "kv_cache_gb"), ("--rollout.gpu_memory_utilization 5", "gpu_memory_utilization"),
])
def test_what_could_never_act_or_only_fail_later_is_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        parse_config(options.split())
