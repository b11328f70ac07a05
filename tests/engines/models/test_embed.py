"""Embeddings and log-likelihoods against one plain transformers forward a row, in fp64."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fastsched.config import ConfigError, ModelConfig
from fastsched.engines.models.embed import PolicyReader, SentenceEncoder, by_length

CFG = ModelConfig(dtype="float32")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Threads of tiny products cost more than they save, and many times more while anything else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def truth(random_model):
    return AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.float64).eval()


def token_rows(count=23, longest=40, seed=0):
    rng = np.random.default_rng(seed)
    return [rng.integers(5, 300, rng.integers(1, longest)).tolist() for _ in range(count)]


def collect(parts, count):
    out = [None] * count
    for rows, values in parts:
        for row, value in zip(rows, values, strict=True):
            assert out[row] is None
            out[row] = value
    return np.array(out)


@torch.no_grad()
def plain_embedding(model, ids):
    return model(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0].mean(0).numpy()


@torch.no_grad()
def plain_nll(model, prompt, answer):
    logp = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1:-1].log_softmax(-1)
    return -logp[torch.arange(len(answer)), torch.tensor(answer)].mean().item()


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_embeddings_are_the_mean_of_the_last_hidden_states(random_model, truth, budget):
    rows = token_rows()
    got = collect(PolicyReader(random_model, CFG, 4096, budget).embed(rows), len(rows))
    np.testing.assert_allclose(got, np.stack([plain_embedding(truth, ids) for ids in rows]), atol=2e-5)


@pytest.mark.parametrize("budget", [1, 64, 100_000])
def test_difficulty_is_the_mean_negative_log_likelihood_of_the_answer(random_model, truth, budget):
    prompts, answers = token_rows(seed=1), token_rows(longest=9, seed=2)
    got = collect(PolicyReader(random_model, CFG, 4096, budget).answer_nll(prompts, answers), len(prompts))
    assert got.dtype == np.float64
    np.testing.assert_allclose(got, [plain_nll(truth, p, a) for p, a in zip(prompts, answers, strict=True)], rtol=1e-5)


def test_long_rows_are_cut(random_model, truth):
    reader = PolicyReader(random_model, CFG, 12, 64)
    rows = token_rows(longest=40)
    np.testing.assert_allclose(collect(reader.embed(rows), len(rows)),
                               np.stack([plain_embedding(truth, ids[:12]) for ids in rows]), atol=2e-5)
    prompts = [list(range(10, 10 + n)) for n in (4, 10, 11, 12, 30, 3)]
    answers = [[50, 51, 52, 53]] * 5 + [[]]
    got = collect(reader.answer_nll(prompts, answers), 6)
    for i, left in enumerate((4, 2, 1)):
        assert got[i] == pytest.approx(plain_nll(truth, prompts[i], answers[i][:left]), rel=1e-5)
    assert np.isnan(got[3:]).all()  # no answer token survives, or there is none


def test_bf16_is_as_near_as_a_plain_forward_in_bf16(random_model, truth):
    rows, cfg = token_rows(), ModelConfig(dtype="bfloat16")
    exact = np.stack([plain_embedding(truth, ids) for ids in rows])
    half = AutoModelForCausalLM.from_pretrained(random_model, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        plain = np.stack([half.model(torch.tensor([ids])).last_hidden_state[0].mean(0).float().numpy() for ids in rows])
    got = collect(PolicyReader(random_model, cfg, 4096, 256).embed(rows), len(rows))
    assert np.abs(got - exact).mean() < 1.2 * np.abs(plain - exact).mean() and not np.allclose(got, exact, atol=1e-6)


def test_batches_keep_the_budget_and_lose_no_row():
    lengths = np.random.default_rng(0).integers(0, 50, 200)
    batches = list(by_length(lengths, 120))
    assert sorted(np.concatenate(batches).tolist()) == list(range(200))
    assert all(len(b) == 1 or len(b) * lengths[b].max() <= 120 for b in batches)
    assert len(batches) < 60 and list(by_length([], 10)) == []
    assert [len(b) for b in by_length([500, 600], 100)] == [1, 1]


def test_the_optional_package_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "sentence_transformers", None)  # the fault: not installed
    with pytest.raises(ConfigError, match="features.encoder: .*pip install sentence-transformers"):
        SentenceEncoder("all-MiniLM-L6-v2", 4096, 1000)


def test_sentence_encoder_on_a_local_model(random_model):
    pytest.importorskip("sentence_transformers")
    texts = [f"What is {i} + {'1' * (i % 9 + 1)}?" for i in range(17)]
    encoder = SentenceEncoder(str(random_model), 64, 200)
    got = collect(encoder.embed(texts), 17)
    alone = np.concatenate([encoder.model.encode([t]) for t in texts])
    np.testing.assert_allclose(got, alone, atol=1e-5)
    with pytest.raises(ConfigError, match="features.encoder: sentence-transformers cannot load"):
        SentenceEncoder("./no-such-folder", 64, 200)
