from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from transformers import MistralConfig, MistralForCausalLM

from fastsched.config import Config, ConfigError, DataConfig, LearnerConfig, LogConfig, ModelConfig, RolloutConfig, TrainConfig
from fastsched.loop import assemble
from fastsched.record.log import RunLog
from fastsched.types import EngineError, StartError


def test_a_teacher_whose_layers_do_not_see_a_whole_sequence_is_refused(monkeypatch, tmp_path, random_model):
    """The longest sequence is prompt and response; a window that holds it is none."""
    cfg = Config(model=ModelConfig(dtype="float32"), learner=LearnerConfig(loss="opd", teacher="t", kl="none"),
                 data=DataConfig(max_prompt_tokens=20), rollout=RolloutConfig(max_new_tokens=10))
    small = dict(vocab_size=320, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2)
    windowed = lambda width: lambda *_: MistralForCausalLM(MistralConfig(sliding_window=width, **small))
    monkeypatch.setattr(assemble, "prepare_model", lambda cfg: random_model)
    monkeypatch.setattr(assemble, "DeepSpeedLearner", lambda *_: "engine")
    monkeypatch.setattr(assemble, "load_teacher", windowed(30))
    train_set = SimpleNamespace(bins=None)
    assert assemble._learner(cfg, tmp_path, random_model, train_set).engine == "engine"
    monkeypatch.setattr(assemble, "load_teacher", windowed(29))
    with pytest.raises(ConfigError, match="learner.teacher: mistral has layers of kind sliding_attention"):
        assemble._learner(cfg, tmp_path, random_model, train_set)
    assert assemble._learner(replace(cfg, learner=LearnerConfig()), tmp_path, random_model, train_set).engine == "engine"


@pytest.fixture
def parts(monkeypatch, tmp_path, random_model):
    """`assemble_training` of a small run on transformers, whose pool and learner only say when they are closed."""
    closed = []

    class Pool:
        def __init__(self, *_):
            pass

        def __enter__(self):
            return self

        def __exit__(self, *_):
            closed.append("rewards")

    learner = SimpleNamespace(engine=SimpleNamespace(close=lambda: closed.append("learner")))
    monkeypatch.setattr(assemble, "RewardPool", Pool)
    monkeypatch.setattr(assemble, "_learner", lambda *_: learner)
    monkeypatch.setattr(assemble, "_head", lambda *_: "none")
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    cfg = Config(model=ModelConfig(name=str(random_model)), data=DataConfig(size=100, eval_per_bin=2, max_prompt_tokens=64),
                 rollout=RolloutConfig(engine="transformers", max_new_tokens=8), train=TrainConfig(prompts_per_step=4))

    def run(cfg=cfg):
        with RunLog(tmp_path, LogConfig(tensorboard=False), 1, resume_step=0) as log, assemble.assemble_training(cfg, tmp_path, log):
            closed.append("body")
    return SimpleNamespace(cfg=cfg, run=run, closed=closed)


@pytest.mark.parametrize("error, raised, words", [
    (ValueError("no room for the\nKV cache"), StartError, r"rollout.engine transformers: .*ValueError: no room for the KV cache"),
    (torch.OutOfMemoryError("CUDA"), StartError, "OutOfMemoryError: CUDA"),
    (ConfigError("rollout.sleep: no"), ConfigError, "^rollout.sleep: no$"), (EngineError("server: no"), EngineError, "^server: no$")])
def test_a_sampler_that_does_not_start_is_named_and_what_was_opened_is_closed(monkeypatch, parts, error, raised, words):
    def fails(*_, **__):
        raise error

    monkeypatch.setattr(assemble, "open_rollout", fails)
    with pytest.raises(raised, match=words):
        parts.run()
    assert parts.closed == ["learner", "rewards"] and not torch.distributed.is_initialized()


def test_a_failure_after_the_sampler_closes_it_first(monkeypatch, parts):
    def fails(*_):
        raise ConfigError("scheduler: no")

    monkeypatch.setattr(assemble, "sampler_of", lambda *_: SimpleNamespace(close=lambda: parts.closed.append("sampler")))
    monkeypatch.setattr(assemble, "_scheduler", fails)
    with pytest.raises(ConfigError, match="scheduler: no"):
        parts.run()
    assert parts.closed == ["sampler", "learner", "rewards"] and not torch.distributed.is_initialized()


def test_the_sampler_ends_before_the_learner_and_both_before_the_process_group(monkeypatch, parts):
    monkeypatch.setattr(assemble, "sampler_of", lambda *_: SimpleNamespace(close=lambda: parts.closed.append("sampler")))
    monkeypatch.setattr(assemble, "leave_distributed", lambda: parts.closed.append("group"))
    parts.run()
    monkeypatch.undo()
    assemble.leave_distributed()
    assert parts.closed == ["body", "sampler", "learner", "rewards", "group"]


@pytest.mark.parametrize("key, section, words", [
    ("learner", LearnerConfig(micro_batch_tokens=40), "learner.micro_batch_tokens: 40 is less than the [0-9]+ tokens"),
    ("data", DataConfig(size=100, eval_per_bin=2, max_prompt_tokens=600), "model.name: qwen3 has 512 positions .* are 608")])
def test_what_would_fail_hours_later_is_refused_before_anything_is_opened(parts, key, section, words):
    with pytest.raises(ConfigError, match=words):
        parts.run(replace(parts.cfg, **{key: section}))
    assert parts.closed == [] and not torch.distributed.is_initialized()
