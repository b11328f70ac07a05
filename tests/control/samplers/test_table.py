"""A sampler is a class and a declaration, under one name."""

import json

import numpy as np
import pytest

from fastsched.config import SAMPLERS, AdsConfig, Config, ConfigError, LearnedConfig, SchedulerConfig
from fastsched.control.samplers.table import CLASSES, make_sampler
from fastsched.types import Features

N = 200
BINS, SIZES = (np.arange(N) % 4).astype(np.uint16), np.full(4, N // 4)
FEATURES = Features((np.arange(N) % 8).astype(np.int32), np.linspace(0, 1, N, dtype=np.float32), np.ones((N, 3), np.float16))


def test_every_sampler_has_a_class_and_a_declaration():
    assert list(CLASSES) == list(SAMPLERS) and len(set(CLASSES.values())) == len(CLASSES)


def test_a_name_that_no_sampler_has_is_refused_by_the_command_line():
    from fastsched.config.arguments import parse_config

    kinds = [parse_config(["--scheduler.kind", kind, "--train.prompts_per_step", "128"]).scheduler.kind for kind in SAMPLERS]
    assert kinds == list(SAMPLERS)
    with pytest.raises(ConfigError, match="scheduler.kind"):
        parse_config(["--scheduler.kind", "hardest"])


def config(kind):
    return SchedulerConfig(kind=kind, ads=AdsConfig(clusters=2, size=4), learned=LearnedConfig(arms="clusters"))


@pytest.mark.parametrize("kind", SAMPLERS)
def test_features_are_needed_exactly_where_it_is_declared(kind):
    cfg = config(kind)
    make_sampler(cfg, BINS, SIZES, 8, 0, FEATURES)
    if cfg.traits.features(cfg) is None:
        make_sampler(cfg, BINS, SIZES, 8, 0)
    else:
        with pytest.raises(ConfigError, match="fastsched cluster"):
            make_sampler(cfg, BINS, SIZES, 8, 0)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_what_fixes_the_state_is_json_by_key(kind):
    options = make_sampler(config(kind), BINS, SIZES, 8, 0, FEATURES).fixed_options()
    assert json.loads(json.dumps(options)) == options
    assert all(key.startswith(("scheduler.", "train.", "checksum")) for key in options)


@pytest.mark.parametrize("kind", SAMPLERS)
def test_a_buffer_is_held_exactly_by_what_trains_groups_of_earlier_steps(kind):
    cfg = SchedulerConfig(kind=kind)
    assert (cfg.traits.buffer(cfg, 8) > 0) == cfg.traits.replays
    assert not cfg.traits.replays or not cfg.traits.ahead
    whole = Config() if kind == "ads" else Config(scheduler=cfg)
    assert whole.trains_earlier_responses == cfg.traits.replays
