from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import MistralConfig

from fastsched import assemble
from fastsched.config import Config, ConfigError, DataConfig, LearnerConfig, ModelConfig, RolloutConfig


def test_a_teacher_whose_layers_do_not_see_a_whole_sequence_is_refused(monkeypatch, tmp_path, random_model):
    """The longest sequence is prompt and response; a window that holds it is none."""
    cfg = Config(model=ModelConfig(dtype="float32"), learner=LearnerConfig(loss="opd", teacher="t", kl="none"),
                 data=DataConfig(max_prompt_tokens=20), rollout=RolloutConfig(max_new_tokens=10))
    windowed = lambda width: lambda *_: SimpleNamespace(config=MistralConfig(sliding_window=width))
    monkeypatch.setattr(assemble, "prepare_model", lambda cfg: random_model)
    monkeypatch.setattr(assemble, "DeepSpeedLearner", lambda *_: "engine")
    monkeypatch.setattr(assemble, "load_teacher", windowed(30))
    train_set = SimpleNamespace(bins=None)
    assert assemble._learner(cfg, tmp_path, random_model, train_set).engine == "engine"
    monkeypatch.setattr(assemble, "load_teacher", windowed(29))
    with pytest.raises(ConfigError, match="learner.teacher: mistral has layers of kind sliding_attention"):
        assemble._learner(cfg, tmp_path, random_model, train_set)
    assert assemble._learner(replace(cfg, learner=LearnerConfig()), tmp_path, random_model, train_set).engine == "engine"
