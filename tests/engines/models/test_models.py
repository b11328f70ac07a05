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


@pytest.fixture(scope="module")
def tokenizer():
    return tiny.tiny_tokenizer()


@pytest.mark.parametrize("tied", [True, False])
def test_tiny_is_small_and_tied_as_asked(tied, tmp_path):
    model = models.load_policy(tiny.random_tiny(tmp_path, tied=tied), ModelConfig())
    split = models.backbone_and_head(model)
    assert model.num_parameters() < 1_000_000
    assert (split.weight is model.get_input_embeddings().weight) == tied


def test_random_tiny_follows_its_seed_and_leaves_the_global_generator_alone(tmp_path):
    before = torch.get_rng_state()
    folders = [tiny.random_tiny(tmp_path / str(i), seed=seed) for i, seed in enumerate((3, 3, 4))]
    weights = [(f / "model.safetensors").read_bytes() for f in folders]
    assert weights[0] == weights[1] != weights[2]
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize(
    "text", ["What is 37 + 8?", "-1042", "  two  spaces, ümläuts 🙂\n\ttabs", "<|im_start|>user\nhi<|im_end|>"]
)
def test_tokenizer_round_trips_any_text(tokenizer, text):
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_every_digit_is_one_token_wherever_it_stands(tokenizer):
    for text in ("9081", " 9081", "a9081", "-9081"):
        digits = [tokenizer.convert_tokens_to_ids(d) for d in "9081"]
        assert tokenizer(text).input_ids[-4:] == digits


def test_special_tokens_are_single_and_training_is_deterministic(tokenizer):
    assert [tokenizer(s).input_ids for s in tiny.SPECIAL] == [[0], [1], [2]]
    assert tiny.tiny_tokenizer().backend_tokenizer.to_str() == tokenizer.backend_tokenizer.to_str()


def test_chat_template_renders_chatml(tokenizer):
    chat = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    assert text == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"


def test_saved_tokenizer_is_the_same_and_knows_its_stop_tokens(tokenizer, tmp_path):
    path = tiny.random_tiny(tmp_path)
    loaded = models.load_tokenizer(path, ModelConfig())
    chat = [{"role": "user", "content": "What is 1 + 2?"}]
    assert loaded.apply_chat_template(chat, tokenize=False) == tokenizer.apply_chat_template(chat, tokenize=False)
    assert loaded(ROWS[0][0]).input_ids == tokenizer(ROWS[0][0]).input_ids
    assert models.stop_token_ids(path) == [tokenizer.convert_tokens_to_ids("<|im_end|>")]
    assert loaded.pad_token == "<|endoftext|>"


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


@pytest.fixture(scope="module")
def warm(tmp_path_factory):
    """The cache and the folder of a model that knows the sums of two digits with probability 0.5."""
    cache = tmp_path_factory.mktemp("cache")
    return cache, models.resolve_model(ModelConfig(warm_start_accuracy=0.5), cache, warm_start_rows=ROWS)


def sampled_accuracy(path: Path, samples: int) -> float:
    """Share of responses, sampled token by token at temperature 1, that are exactly right."""
    cfg = ModelConfig()
    model, tokenizer = models.load_policy(path, cfg).eval(), models.load_tokenizer(path, cfg)
    torch.manual_seed(0)
    right = 0
    for prompt, answer, _ in ROWS:
        chat = [{"role": "user", "content": prompt}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        out = model.generate(**ids, do_sample=True, top_k=0, max_new_tokens=4, num_return_sequences=samples)
        want = torch.tensor(tokenizer(answer + "<|im_end|>").input_ids)
        got = out[:, ids["input_ids"].shape[1]:][:, : len(want)]
        right += (got == want).all(dim=1).sum().item() if got.shape == (samples, len(want)) else 0
    return right / (samples * len(ROWS))


@pytest.mark.slow
def test_warm_start_stops_at_the_accuracy_that_sampling_then_shows(warm):
    model = models.load_policy(warm[1], ModelConfig())
    expected = tiny.expected_accuracy(model, tiny.encode(tiny.tiny_tokenizer(), ROWS))
    assert 0.5 <= expected < 0.9
    assert abs(sampled_accuracy(warm[1], samples=64) - expected) < 0.03


def test_warm_start_is_cached(tmp_path, monkeypatch):
    made = ModelConfig(warm_start_accuracy=1e-6)  # a few steps
    path = models.resolve_model(made, tmp_path, warm_start_rows=ROWS)
    before = (path / "model.safetensors").read_bytes()
    monkeypatch.setattr(tiny, "warm_start", None)  # is not called again
    assert models.resolve_model(made, tmp_path, warm_start_rows=ROWS) == path
    assert (path / "model.safetensors").read_bytes() == before


def test_warm_start_accuracy_and_rows_name_the_cache_folder():
    recipes = {tiny.recipe(rows, accuracy) for rows in (ROWS, ROWS[:-1]) for accuracy in (0.6, 0.7)}
    assert len(recipes) == 4


@pytest.mark.slow
def test_warm_start_gives_the_same_weights_on_any_number_of_threads(warm, tmp_path):
    threads = torch.get_num_threads()
    torch.set_num_threads(2 if threads == 1 else 1)
    try:
        chosen = torch.get_num_threads()
        tiny.warm_start(tmp_path, ROWS, 0.5)
        assert torch.get_num_threads() == chosen
    finally:
        torch.set_num_threads(threads)
    assert (tmp_path / "model.safetensors").read_bytes() == (warm[1] / "model.safetensors").read_bytes()


def test_warm_start_that_cannot_reach_the_accuracy_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(tiny, "MAX_STEPS", 5)
    with pytest.raises(ConfigError, match="model.warm_start_accuracy: 1.5 was not reached in 5 steps"):
        tiny.warm_start(tmp_path, ROWS, 1.5)


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
