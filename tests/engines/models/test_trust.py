"""What a model folder may make this program do: run its code only when trusted, unpickle never."""

import json
import pickle
from pathlib import Path

import pytest
import torch

from fastsched.config import ConfigError, ModelConfig, RolloutConfig
from fastsched.engines.models import loading as models
from fastsched.engines.models import tiny
from fastsched.engines.rollout.opening import open_rollout
from fastsched.engines.rollout.weights import expected_shapes


def with_own_code(path, marker) -> str:
    """A model folder whose configuration brings Python code, which leaves a file behind when it runs."""
    tiny.random_tiny(path, tied=True)
    config = json.loads((path / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.OwnConfig", "AutoModelForCausalLM": "own.OwnModel"}}
    (path / "config.json").write_text(json.dumps(config))
    (path / "own.py").write_text(
        f"from pathlib import Path\nfrom transformers import Qwen3Config, Qwen3ForCausalLM\nPath({str(marker)!r}).touch()\n"
        "class OwnConfig(Qwen3Config):\n    model_type = 'own'\n"
        "class OwnModel(Qwen3ForCausalLM):\n    config_class = OwnConfig\n")
    return str(path)


def test_the_models_own_code_is_not_run_unless_trusted(tmp_path):
    """Item 7: off by default, one ConfigError that names the key; switched on, it reaches every loader."""
    marker, path = tmp_path / "ran", tmp_path / "model"
    folder = with_own_code(path, marker)
    with pytest.raises(ConfigError, match="model.trust_remote_code.*Python code of its own"):
        models.load_tokenizer(path, ModelConfig(name=folder))
    for load in (expected_shapes, lambda p: models.load_policy(p, ModelConfig()), lambda p: open_sampler(p, False)):
        with pytest.raises(ValueError, match="trust_remote_code"):
            load(path)
    assert not marker.exists()
    trusted = ModelConfig(name=folder, trust_remote_code=True)
    models.load_tokenizer(path, trusted)
    assert marker.exists() and models.load_policy(path, trusted).__class__.__name__ == "OwnModel"
    assert expected_shapes(path, True) and open_sampler(path, True)._model.__class__.__name__ == "OwnModel"


def open_sampler(path, trust: bool):
    return open_rollout(path, RolloutConfig(engine="transformers"), dtype="float32", max_model_len=64, seed=0, stop_token_ids=[1],
                        trust_remote_code=trust)


def test_vllm_is_told_what_is_trusted(tmp_path, monkeypatch):
    """vLLM itself is not started: its constructor only says what it was asked."""
    import vllm

    from fastsched.engines.rollout import vllm_engine

    asked = []

    class Asked(Exception):
        pass

    def constructor(**options):
        asked.append(options["trust_remote_code"])
        raise Asked

    monkeypatch.setattr(vllm, "LLM", constructor)
    folder = tiny.random_tiny(tmp_path, tied=True)
    for trust in (False, True):
        with pytest.raises(Asked):
            vllm_engine.VllmRollout(folder, RolloutConfig(), dtype="float32", max_model_len=64, seed=0, stop_token_ids=[1],
                                    trust_remote_code=trust)
    assert asked == [False, True]


def test_a_pickled_model_file_runs_nothing(tmp_path):
    """Weights that are no safetensors: transformers reads tensors out of them and refuses the rest."""
    class Touch:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "pwned",))

    folder = tiny.random_tiny(tmp_path / "model", tied=True)
    (folder / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Touch()}, folder / "pytorch_model.bin")
    with pytest.raises((pickle.UnpicklingError, ValueError, OSError), match="(?i)weights_only|unsupported|torch.load"):
        models.load_policy(folder, ModelConfig())
    assert not (tmp_path / "pwned").exists()


def test_a_slow_tokenizer_is_an_error_that_says_what_to_do(tmp_path):
    from transformers import CanineTokenizer

    tiny.random_tiny(tmp_path, tied=True)
    (tmp_path / "tokenizer.json").unlink()
    CanineTokenizer().save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="model.name: the tokenizer of .* has no tokenizers backend; .*tokenizer.json"):
        models.load_tokenizer(tmp_path, ModelConfig())
