"""Samplers beside the rest of the configuration: what makes no sense together is refused with the reason."""

import pytest

from fastsched.arguments import parse_config
from fastsched.config import Config, ConfigError, RolloutConfig, SchedulerConfig, SpeedConfig

KINDS = ("vcrl", "replay", "speed", "dots", "learned")


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_and_its_options_come_from_the_command_line(kind):
    options = {"vcrl": "kappa 0.7", "replay": "memory 9", "speed": "screen 2", "dots": "reference 64", "learned": "arms clusters"}
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
    ({"correction": "token_tis"}, "rollout.correction: .*already holds the correction that token_tis"),
    ({"top_p": 0.9}, "rollout.top_p, rollout.top_k: .*renormalise"), ({"top_k": 20}, "rollout.top_p, rollout.top_k: .*renormalise"),
])
def test_settings_that_assume_fresh_responses_are_refused(kind, rollout, message):
    with pytest.raises(ConfigError, match=message):
        Config(scheduler=SchedulerConfig(kind=kind), rollout=RolloutConfig(**rollout))
    assert Config(scheduler=SchedulerConfig(kind="vcrl"), rollout=RolloutConfig(**rollout)).scheduler.kind == "vcrl"
    assert Config(scheduler=SchedulerConfig(kind=kind)).scheduler.kind == kind


def test_a_screen_leaves_something_to_continue():
    with pytest.raises(ConfigError, match="scheduler.speed.screen: 8 of rollout.responses 8 leave nothing to continue"):
        Config(scheduler=SchedulerConfig(kind="speed", speed=SpeedConfig(screen=8)), rollout=RolloutConfig(responses=8))
    Config(scheduler=SchedulerConfig(kind="uniform", speed=SpeedConfig(screen=8)), rollout=RolloutConfig(responses=8))
