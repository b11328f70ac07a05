"""builtin:tiny: its tokenizer, its random form, and the warm start."""

from pathlib import Path

import pytest
import torch

from fastsched.config import ConfigError, ModelConfig
from fastsched.engines.models import loading as models
from fastsched.engines.models import tiny

ROWS = [(f"What is {a} + {b}?", str(a + b), 0) for a in range(10) for b in range(10)]


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
