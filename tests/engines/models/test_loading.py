"""Model folders that cannot be trained: one ConfigError each that names the key, whoever reads the folder first."""

import json
import shutil

import pytest
from transformers import LlamaConfig, MistralConfig

from fastsched.config import ConfigError, ModelConfig
from fastsched.engines.models import loading as models


def edit_config(folder, **values):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **values}))


def cut(file):
    file.write_bytes(file.read_bytes()[:5000])


SPOIL = {
    "no weights": (lambda f: (f / "model.safetensors").unlink(), "the weights in .*OSError"),
    "torn weights": (lambda f: cut(f / "model.safetensors"), "the weights in .*SafetensorError"),
    "other weights": (lambda f: (f / "config.json").write_text('{"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}'),
                      "holds no weights for [0-9]+ parameters of GPT2"),
    "unknown architecture": (lambda f: edit_config(f, model_type="nonesuch"), "the (config.json|weights) in .*nonesuch"),
    "torn configuration": (lambda f: (f / "config.json").write_text("{"), "the (config.json|weights) in .*not a valid JSON"),
    "no tokenizer": (lambda f: [p.unlink() for p in f.glob("token*")], "holds no tokenizer"),
    "torn tokenizer": (lambda f: (f / "tokenizer.json").write_text("{"), "the tokenizer in .*JSONDecodeError"),
}


@pytest.mark.parametrize("spoil", SPOIL)
@pytest.mark.parametrize("key", ["model.name", "learner.teacher"])
def test_a_folder_that_cannot_be_loaded_is_named(tmp_path, random_model, spoil, key):
    """The faults: a bare traceback, a vocabulary of one token, weights that start at random."""
    folder, (change, words) = tmp_path / "model", SPOIL[spoil]
    shutil.copytree(random_model, folder)
    change(folder)
    load = models.load_tokenizer if "tokenizer" in spoil else models.load_policy
    with pytest.raises(ConfigError, match=f"(?s)^{key}: .*{words}") as raised:
        load(folder, ModelConfig(), key)
    assert str(folder) in str(raised.value) and "\n" not in str(raised.value)


def test_a_model_is_not_run_beyond_its_positions():
    """Scaled positions are longer than the configuration's number says, in one layer kind or in all."""
    short = LlamaConfig(max_position_embeddings=100)
    models.require_positions(short, 100)
    with pytest.raises(ConfigError, match="learner.teacher: llama has 100 positions .* are 101; lower one of them"):
        models.require_positions(short, 101, "learner.teacher")
    for rope in ({"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4}, {"full_attention": {"rope_type": "default", "rope_theta": 1e4}}):
        short.rope_parameters = rope
        models.require_positions(short, 101)
    with pytest.raises(ConfigError, match="has 50 positions"):
        models.require_positions(MistralConfig(max_position_embeddings=50), 51)
