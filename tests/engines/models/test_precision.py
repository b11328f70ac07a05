"""`model.dtype: auto`."""

import re
from dataclasses import replace

import pytest

from fastsched.cli import main
from fastsched.config import Config, ConfigError, LearnerConfig, ModelConfig, RolloutConfig
from fastsched.config.arguments import config_to_yaml, parse_config
from fastsched.engines.models import precision


@pytest.mark.parametrize("fast, dtype", [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_machine_multiplies_fast(monkeypatch, fast, dtype):
    monkeypatch.setattr(precision, "fast_bf16", lambda: fast)
    cfg = parse_config(["--model.dtype", "auto"])
    found = precision.settled(cfg)
    assert found.model == replace(cfg.model, dtype=dtype)
    assert f"dtype: {dtype}" in config_to_yaml(found) and precision.settled(found) is found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_asked_for_stays(monkeypatch, dtype):
    monkeypatch.setattr(precision, "fast_bf16", lambda: pytest.fail("nothing to find out"))
    cfg = Config(model=ModelConfig(dtype=dtype))
    assert precision.settled(cfg).model == cfg.model


def test_the_command_line_settles_it(monkeypatch, capsys):
    """The same estimate as with the dtype spelled out, and another than with the other one."""
    monkeypatch.setattr(precision, "fast_bf16", lambda: False)
    said = {}
    for dtype in ("auto", "float32", "bfloat16"):
        assert main(["train", "--preset", "tiny-cpu", "--data.size", "400", "--model.dtype", dtype, "--dry-run"]) == 0
        said[dtype] = capsys.readouterr().out
    assert said["auto"] == said["float32"] != said["bfloat16"]


@pytest.mark.parametrize("free, both", [(True, "fp32"), (False, "bf16")])
def test_logits_of_a_bf16_model_are_set_on_both_sides(monkeypatch, free, both):
    monkeypatch.setattr(precision, "fp32_logits_are_free", lambda: free)
    cfg = precision.settled(Config(model=ModelConfig(dtype="bfloat16")))
    assert cfg.learner.logits == cfg.rollout.head_dtype == both and precision.logits_differ(cfg) is None
    assert precision.settled(cfg) is cfg and precision.settled(Config()) == Config()


@pytest.mark.parametrize("learner, rollout, says", [
    ("fp32", {}, None), ("bf16", {}, None), ("fp32", {"head_dtype": "bf16"}, "learner's logits are fp32 .* sampler's bf16"),
    ("bf16", {"head_dtype": "fp32"}, "learner's logits are bf16 .* sampler's fp32"), ("fp32", {"dtype": "float32"}, None),
    ("bf16", {"dtype": "float32"}, "learner's logits are bf16 .* sampler's fp32"),
])
def test_one_side_alone_is_warned_of(learner, rollout, says):
    cfg = Config(model=ModelConfig(dtype="bfloat16"), learner=LearnerConfig(logits=learner), rollout=RolloutConfig(**rollout))
    said = precision.logits_differ(precision.settled(cfg))
    assert said is None if says is None else re.search(says, said)


@pytest.mark.parametrize("model, parts, key", [
    ("float32", {"learner": LearnerConfig(logits="bf16")}, "learner.logits"),
    ("float32", {"rollout": RolloutConfig(head_dtype="bf16")}, "rollout.head_dtype"),
    ("bfloat16", {"rollout": RolloutConfig(head_dtype="bf16", dtype="float32")}, "rollout.head_dtype"),
])
def test_rounded_logits_of_a_float32_model_are_refused(model, parts, key):
    with pytest.raises(ConfigError, match=f"{key}: .* in float32 has logits in fp32"):
        Config(model=ModelConfig(dtype=model), **parts)
