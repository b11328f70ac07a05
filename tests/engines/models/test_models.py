"""The models room: folders, tokenizers, the split into backbone and head, and what is made once."""

import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from processes import wait_until
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3ForCausalLM,
)

from fastsched.config import ConfigError, ModelConfig
from fastsched.engines.models import loading as models
from fastsched.engines.models import tiny

ROWS = [(f"What is {a} + {b}?", str(a + b), 0) for a in range(10) for b in range(10)]
SMALL = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, head_dim=8,
             intermediate_size=32, vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2)
QWEN = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, intermediate_size=32, vocab_size=64)


def test_stop_tokens_are_those_of_tokenizer_and_generation_config(tmp_path):
    path = tiny.random_tiny(tmp_path)
    (path / "generation_config.json").write_text('{"eos_token_id": [0, 2]}')
    assert models.stop_token_ids(path) == [0, 2]
    (path / "generation_config.json").unlink()
    assert models.stop_token_ids(path) == [2]


def test_load_policy_applies_every_option(tmp_path):
    path = tiny.random_tiny(tmp_path)
    plain = models.load_policy(path, ModelConfig())
    assert plain.dtype == torch.float32 and plain.config._attn_implementation == "sdpa"
    assert plain.training and not plain.config.use_cache and not plain.is_gradient_checkpointing
    other = models.load_policy(path, ModelConfig(dtype="bfloat16", gradient_checkpointing=True))
    assert other.dtype == torch.bfloat16 and other.is_gradient_checkpointing


@pytest.mark.parametrize(
    "model_class, config",
    [
        (LlamaForCausalLM, LlamaConfig(**SMALL, tie_word_embeddings=False)),
        (Qwen3ForCausalLM, tiny.tiny_config(vocab=64)),
        (Gemma2ForCausalLM, Gemma2Config(**SMALL, final_logit_softcapping=0.3, query_pre_attn_scalar=8)),
    ],
)
def test_split_gives_the_models_own_logits(model_class, config):
    torch.manual_seed(0)
    model = model_class(config).eval()
    ids = torch.arange(3, 12)[None]
    split = models.backbone_and_head(model)
    logits = split.backbone(input_ids=ids).last_hidden_state @ split.weight.T
    if split.softcap is not None:
        logits = split.softcap * torch.tanh(logits / split.softcap)
    assert split.bias is None
    torch.testing.assert_close(logits, model(input_ids=ids).logits)


def test_split_refuses_scaled_logits():
    model = GraniteForCausalLM(GraniteConfig(**SMALL, logits_scaling=8.0))
    with pytest.raises(ConfigError, match="logits_scaling"):
        models.backbone_and_head(model)


def test_local_folder_is_used_as_it_is(tmp_path):
    path = tiny.random_tiny(tmp_path / "m")
    assert models.resolve_model(ModelConfig(name=str(path)), tmp_path) == path
    (path / "config.json").unlink()
    with pytest.raises(ConfigError, match="model.name.*config.json"):
        models.resolve_model(ModelConfig(name=str(path)), tmp_path)


@pytest.mark.parametrize(
    "name, message",
    [
        ("builtin:huge", "builtin:smollm2 and builtin:tiny"),
        ("./nowhere", "no folder"),
        ("builtin:tiny", "warm_start_rows"),
        ("a/b/c", "valid hub name"),
        ("Qwen/Qwen3-0.6B", "HF_HUB_OFFLINE"),
    ],
)
def test_a_model_that_cannot_be_had_is_one_clear_error(name, message, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=f"model.name: .*{message}"):
        models.resolve_model(ModelConfig(name=name), tmp_path)


def test_cache_folder_follows_the_environment(monkeypatch):
    monkeypatch.setenv("FASTSCHED_CACHE", "/elsewhere")
    assert models.default_cache_dir() == Path("/elsewhere")
    monkeypatch.delenv("FASTSCHED_CACHE")
    assert models.default_cache_dir() == Path(".cache/fastsched")


def test_what_is_made_once_is_made_anew_for_another_recipe(tmp_path):
    first = models.build_once(tmp_path, "m", "recipe 1", lambda p: (p / "f").write_text("1"))
    again = models.build_once(tmp_path, "m", "recipe 1", lambda p: (p / "f").write_text("never"))
    other = models.build_once(tmp_path, "m", "recipe 2", lambda p: (p / "f").write_text("2"))
    assert first == again != other and (first / "f").read_text() == "1"


def _build(gate, path: Path) -> None:
    (path / f"half-{os.getpid()}").touch()
    assert gate.wait(60)
    (path / "whole").touch()


def _make(cache: Path, gate, arrived) -> None:
    arrived.release()
    models.build_once(cache, "m", "r", lambda path: _build(gate, path))


def started(cache: Path, count: int) -> tuple[list, object]:
    """Processes that build the same model, all of them on their way, and the gate that holds the build up."""
    context = multiprocessing.get_context("fork")
    gate, arrived = context.Event(), context.Semaphore(0)
    children = [context.Process(target=_make, args=(cache, gate, arrived)) for _ in range(count)]
    for child in children:
        child.start()
    assert all(arrived.acquire(timeout=60) for _ in children)
    wait_until(lambda: list(cache.glob("models/*.partial/half-*")))
    return children, gate


def test_killed_build_leaves_nothing_that_counts(tmp_path):
    (child,), _ = started(tmp_path, 1)
    os.kill(child.pid, signal.SIGKILL)
    child.join()
    made = models.build_once(tmp_path, "m", "r", lambda p: (p / "whole").touch())
    assert [f.name for f in made.iterdir()] == ["whole"]
    assert not list(tmp_path.glob("models/*.partial"))


def test_two_processes_build_once(tmp_path):
    children, gate = started(tmp_path, 2)
    gate.set()
    for child in children:
        child.join()
    assert [child.exitcode for child in children] == [0, 0]
    assert len(list(tmp_path.glob("models/m-*/half-*"))) == 1


@pytest.mark.slow
def test_smollm2_is_converted_once_and_answers(monkeypatch):
    cache = models.default_cache_dir()
    cfg = ModelConfig(name="builtin:smollm2")
    path = models.resolve_model(cfg, cache)
    monkeypatch.setattr(models, "convert_smollm2", None)  # is not called again
    assert models.resolve_model(cfg, cache) == path
    tokenizer = models.load_tokenizer(path, cfg)
    assert "<|im_start|>" in tokenizer.chat_template and tokenizer.eos_token == "<|im_end|>"
    assert models.stop_token_ids(path) == [tokenizer.eos_token_id]
    model = AutoModelForCausalLM.from_pretrained(path).eval()
    assert model.dtype == torch.bfloat16 and not hasattr(model.config, "quantization_config")
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = model.generate(**ids, max_new_tokens=8, do_sample=False)[0, ids["input_ids"].shape[1]:]
    assert "Paris" in tokenizer.decode(answer)


def test_layers_that_do_not_see_a_whole_sequence_are_refused():
    """What packed rows would run as full attention: 0.15 nat off its own forward for a window of 4."""
    full, window = Qwen2Config(**QWEN), Qwen2Config(**QWEN, use_sliding_window=True, sliding_window=4, max_window_layers=1)
    models.require_full_attention(full, 10**6)
    models.require_full_attention(window, 4)
    with pytest.raises(ConfigError, match="model.name: qwen2 has layers of kind sliding_attention, .* over up to 5 tokens"):
        models.require_full_attention(window, 5)
    with pytest.raises(ConfigError, match="learner.teacher: mistral has layers of kind sliding_attention"):
        models.require_full_attention(MistralConfig(**QWEN, sliding_window=4), 5, "learner.teacher")


@pytest.mark.skipif(torch.cuda.is_available(), reason="flash-attn may be there")
def test_flash_attention_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ConfigError, match="model.attention: flash_attention_2 needs a GPU and the package flash-attn"):
        models.load_policy(tiny.random_tiny(tmp_path), ModelConfig(attention="flash_attention_2"))
