"""One contract, every rollout engine, tied and untied embeddings, against a transformers fp32 forward."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np
import pytest
import torch
from rollout_worker import STOP, WORKER, batch, learner_logp, open_engine, packed, process_state, prompt, shaken, synced
from transformers import AutoModelForCausalLM

from fastsched.config import ConfigError
from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.rollout.contract import RolloutEngine
from fastsched.engines.rollout.fingerprints import fingerprints
from fastsched.engines.rollout.weights import SyncError
from fastsched.types import Sampling


class Setup(NamedTuple):
    kind: str
    tied: bool
    folder: Path
    engine: RolloutEngine
    model: torch.nn.Module  # the learner, at the weights of `folder`
    kept: dict[str, bool]  # what of the process's state survived construction


SERVER = pytest.param("vllm_server-tied", marks=pytest.mark.slow)


@pytest.fixture(scope="module", params=["vllm-tied", "vllm-untied", SERVER, "transformers-tied", "transformers-untied"])
def opened(request, tmp_path_factory):
    kind, tied = request.param.split("-")
    folder = random_tiny(tmp_path_factory.mktemp(request.param), tied=tied == "tied", seed=0)
    model = AutoModelForCausalLM.from_pretrained(folder)
    shaken(model, 0.08)
    model.save_pretrained(folder)
    before = process_state()
    engine = open_engine(kind, folder)
    after = process_state()
    yield Setup(kind, tied == "tied", folder, engine, model, {key: before[key] == after[key] for key in before})
    engine.close()


@pytest.fixture
def setup(opened):
    """At the weights on disk."""
    opened.engine.load_weights(opened.model.named_parameters(), 0)
    return opened


def expected_logp(setup, response, temperature: float = 1.0) -> np.ndarray:
    ids = response.prompt_ids + response.token_ids
    return learner_logp(setup.model, ids, temperature)[len(response.prompt_ids) - 1:]


def largest(setup, responses, temperature: float = 1.0) -> float:
    return max(np.abs(r.logp - expected_logp(setup, r, temperature)).max() for r in responses)


def same(a, b) -> bool:
    return all(x.token_ids == y.token_ids for x, y in zip(a, b, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logp_is_the_learners_at_the_sampling_temperature(setup, temperature):
    prompts, _, seeds = batch()
    responses = setup.engine.generate(prompts, Sampling(4, 12, temperature), seeds)
    assert all(r.logp.dtype == np.float32 and len(r.logp) == len(r.token_ids) for r in responses)
    assert largest(setup, responses, temperature) <= 1e-4
    assert largest(setup, responses, temperature + 0.1) > 1e-2


def test_groups_are_prompt_major_and_carry_their_prompt(setup):
    prompts, sampling, seeds = batch()
    responses = setup.engine.generate(prompts, sampling, seeds)
    assert [r.row for r in responses] == [0, 0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert all(r.prompt_ids == prompts[r.row].token_ids and r.weight_version == 0 for r in responses)
    assert len({r.token_ids for r in responses}) == len(responses)


def test_prompts_may_have_different_numbers_of_responses(setup):
    prompts, sampling, seeds = batch()
    responses = setup.engine.generate(prompts, sampling, seeds, [1, 4, 2, 1])
    assert [r.row for r in responses] == [0, 1, 1, 1, 1, 2, 2, 3]
    even = setup.engine.generate(prompts, sampling, seeds)
    assert same([responses[0], *responses[1:4], *responses[5:7], responses[7]], [even[0], *even[3:6], *even[6:8], even[9]])
    assert largest(setup, responses, sampling.temperature) <= 1e-4
    assert setup.engine.generate([], sampling, [], []) == []


def test_a_response_depends_on_its_own_seed_only(setup):
    prompts, sampling, seeds = batch()
    responses = setup.engine.generate(prompts, sampling, seeds)
    assert same(setup.engine.generate(prompts, sampling, seeds), responses)
    assert same(setup.engine.generate(prompts[::-1], sampling, seeds[::-1])[::-1][2::-1], responses[:3])
    alone = setup.engine.generate(prompts[1:2], Sampling(2, 12, sampling.temperature), seeds[1:2])
    assert same(alone, responses[3:5])
    others = setup.engine.generate(prompts, sampling, [s + 1 for s in seeds])
    assert not any(same([a], [b]) for a, b in zip(responses, others, strict=True))


def test_greedy_is_the_argmax_and_its_logp_has_temperature_one(setup):
    prompts, _, seeds = batch()
    responses = setup.engine.generate(prompts, Sampling(2, 6, temperature=0), seeds)
    for response in responses:
        ids = response.prompt_ids + response.token_ids
        with torch.no_grad():
            logits = setup.model(torch.tensor([ids])).logits[0]
        assert tuple(logits[len(response.prompt_ids) - 1:-1].argmax(1).tolist()) == response.token_ids
    assert largest(setup, responses) <= 1e-4


def test_stop_token_is_kept_length_limit_holds_and_eos_is_no_stop_of_its_own(setup):
    prompts = [prompt(row, 6) for row in range(8)]
    responses = setup.engine.generate(prompts, Sampling(32, 20), list(range(8)))  # 1,000 tokens: an end token among them is certain
    stopped = [r for r in responses if r.finish_reason == "stop"]
    limited = [r for r in responses if r.finish_reason == "length"]
    assert stopped and limited and len(stopped) + len(limited) == len(responses)
    assert all(r.token_ids[-1] in STOP and not set(r.token_ids[:-1]) & set(STOP) for r in stopped)
    assert all(len(r.token_ids) == 20 and not set(r.token_ids) & set(STOP) for r in limited)
    assert any(setup.model.config.eos_token_id in r.token_ids[:-1] for r in responses)


def test_top_k_and_top_p_restrict_and_renormalise(setup):
    prompts, _, seeds = batch()
    narrow = setup.engine.generate(prompts, Sampling(2, 6, top_k=1), seeds)
    assert same(narrow, setup.engine.generate(prompts, Sampling(2, 6, temperature=0), seeds))
    assert all(np.abs(r.logp).max() <= 1e-6 for r in narrow)
    for response in setup.engine.generate(prompts, Sampling(2, 6, top_p=0.5), seeds):
        ids = response.prompt_ids + response.token_ids
        with torch.no_grad():
            p, order = setup.model(torch.tensor([ids])).logits[0].softmax(1).sort(1, descending=True)
        for t, token in enumerate(response.token_ids, len(response.prompt_ids) - 1):
            size = int((p[t].cumsum(0) < 0.5).sum()) + 1
            inside = order[t, :size].tolist()
            assert token in inside
            kept = p[t, inside.index(token)] / p[t, :size].sum()
            assert abs(response.logp[t - len(response.prompt_ids) + 1] - np.log(float(kept))) <= 1e-4


def test_fifty_weight_syncs(setup):
    """Issue A: sampler and learner differ by at most 1e-4 in fp32 after every one."""
    model = AutoModelForCausalLM.from_pretrained(setup.folder)
    ids = prompt(5, 40).token_ids
    generator = torch.Generator().manual_seed(2)
    worst, drift, start = 0.0, 0.0, learner_logp(model, ids)
    for version in range(1, 51):
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.004 * torch.randn(parameter.shape, generator=generator))
        setup.engine.load_weights(model.named_parameters(), version)
        logp = learner_logp(model, ids)
        worst = max(worst, synced(setup.engine, model.named_parameters(), version, ids, logp).max)
        drift = np.abs(logp - start).max()
    print(f"{setup.kind}, {'tied' if setup.tied else 'untied'}: 50 syncs, largest |difference of logp| {worst:.1e}")
    assert worst <= 1e-4 and drift > 0.1 and setup.engine.weight_version == 50


def test_cached_prefixes_do_not_outlive_the_weights(setup):
    prompts = [prompt(2, 150)]
    setup.engine.generate(prompts, Sampling(2, 8, 0.8), [3])
    model = AutoModelForCausalLM.from_pretrained(setup.folder)
    shaken(model, 0.05)
    setup.engine.load_weights(model.named_parameters(), 7)
    responses = setup.engine.generate(prompts, Sampling(2, 8, 0.8), [3])
    assert largest(setup._replace(model=model), responses, 0.8) <= 1e-4 and largest(setup, responses, 0.8) > 1e-2
    assert {r.weight_version for r in responses} == {7}


def test_what_does_not_fit_is_refused_by_name(setup):
    with pytest.raises(ConfigError, match="row 2: 140 prompt tokens and 60 new"):
        setup.engine.generate([prompt(0, 5), prompt(2, 140)], Sampling(2, 60), [1, 2])
    for length in (1, 192):
        with pytest.raises(ConfigError, match=f"score: {length} tokens"):
            setup.engine.score(prompt(0, length).token_ids)


def test_the_longest_sequence_that_fits_runs(setup):
    response, = setup.engine.generate([prompt(8, 191)], Sampling(1, 1), [1])
    ids = response.prompt_ids + response.token_ids
    assert len(ids) == 192 and synced(setup.engine, setup.model.named_parameters(), 0, ids, learner_logp(setup.model, ids)).max <= 1e-4


def test_weights_may_be_freed_once_the_next_is_asked_for(setup):
    def gathered():
        for name, parameter in setup.model.named_parameters():
            full = parameter.detach().clone()
            yield name, full
            full.fill_(torch.nan)

    setup.engine.load_weights(gathered(), 1)
    ids = prompt(0, 30).token_ids
    assert synced(setup.engine, setup.model.named_parameters(), 1, ids, learner_logp(setup.model, ids)).max <= 1e-4


@pytest.mark.parametrize("name", [
    "model.embed_tokens.weight", "model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_proj.weight",
    "model.layers.1.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight", "model.layers.2.self_attn.o_proj.weight",
    "model.layers.0.mlp.gate_proj.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.3.mlp.down_proj.weight",
    "model.layers.3.post_attention_layernorm.weight", "model.norm.weight", "lm_head.weight",
])
def test_a_sync_that_went_wrong_names_the_tensor(setup, name):
    weights = {n: t.detach() for n, t in setup.model.named_parameters()}
    if name not in weights:
        pytest.skip("tied: there is no lm_head to corrupt")
    wrong = weights[name].clone()
    wrong.view(-1)[-1] += 2**-20
    setup.engine.load_weights((weights | {name: wrong}).items(), 8)
    ids = prompt(0, 30).token_ids
    wrong_ones = 2 if name == "model.embed_tokens.weight" and setup.tied and setup.kind != "transformers" else 1  # with the tied head
    with pytest.raises(SyncError, match=rf"version 8: .* does not hold .*: {wrong_ones} of {len(weights)} tensors differ, first {name}$"):
        synced(setup.engine, weights.items(), 8, ids, learner_logp(setup.model, ids))


def test_equal_weights_have_equal_fingerprints_and_stale_versions_are_refused(setup):
    sent = fingerprints(setup.model.named_parameters(), torch.float32)
    for held in setup.engine.fingerprints().values():
        assert sent.items() <= held.items()
    ids, weights = prompt(0, 30).token_ids, list(setup.model.named_parameters())
    with pytest.raises(SyncError, match="version 1: the sampler says that its weights are version 0"):
        synced(setup.engine, weights, 1, ids, learner_logp(setup.model, ids))
    with pytest.raises(SyncError, match="mean nan.*the weights agree"):
        synced(setup.engine, weights, 0, ids, np.full(29, np.nan))


def test_without_the_tied_head_repair_the_check_fails_and_names_lm_head(setup, monkeypatch):
    if setup.kind != "vllm" or not setup.tied:
        pytest.skip("vLLM packs a tied head on a CPU")
    model = AutoModelForCausalLM.from_pretrained(setup.folder)
    shaken(model, 0.02)
    monkeypatch.setattr(setup.engine, "_repack_tied_head", lambda: None)
    setup.engine.load_weights(model.named_parameters(), 2)
    ids = prompt(0, 30).token_ids
    with pytest.raises(SyncError, match="1 of .* differ, first lm_head.weight$"):
        synced(setup.engine, model.named_parameters(), 2, ids, learner_logp(model, ids))


def test_construction_and_sampling_leave_the_process_as_it_was(setup):
    assert all(setup.kept.values()), setup.kept
    before = process_state()
    setup.engine.generate(*batch())
    setup.engine.score(prompt(0, 9).token_ids)
    assert process_state() == before


def test_a_fresh_process_repeats_the_batch_bit_for_bit(setup, tmp_path):
    if not setup.tied or setup.kind == "transformers":
        pytest.skip("one model is enough, and of the engines the one that runs train with")
    prompts, sampling, seeds = batch()
    setup.engine.generate(prompts[::-1], sampling, seeds)  # whatever ran before must not matter
    responses = packed(setup.engine.generate(prompts, sampling, seeds))
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    command = [sys.executable, WORKER, "generate", setup.kind, setup.folder, tmp_path / "out.npz"]
    subprocess.run(command, check=True, env=environment)
    fresh = np.load(tmp_path / "out.npz")
    assert np.array_equal(fresh["tokens"], responses["tokens"]) and np.array_equal(fresh["logp"], responses["logp"])


def test_missing_logprobs_are_counted(setup):
    if setup.kind != "vllm":
        pytest.skip("a fault of vLLM's")
    before = setup.engine.missing_logprobs
    logprobs = [None, {5: SimpleNamespace(logprob=float("nan"))}]
    completion = SimpleNamespace(token_ids=[4, 5], logprobs=logprobs, finish_reason="stop")
    assert np.isnan(setup.engine._response(prompt(0, 3), completion).logp).all()
    assert setup.engine.missing_logprobs == before + 2


def test_half_loaded_weights_are_never_used(setup):
    """The last test but one of each engine, because it spoils it."""

    def interrupted():
        yield from list(setup.model.named_parameters())[:2]
        raise RuntimeError("gather failed")

    with pytest.raises(RuntimeError, match="gather failed"):
        setup.engine.load_weights(interrupted(), 3)
    with pytest.raises(SyncError, match="unusable: loading weight version 3 failed"):
        setup.engine.generate([prompt(0, 5)], Sampling(1, 4), [1])
    with pytest.raises(SyncError, match="unusable"):
        setup.engine.score(prompt(0, 5).token_ids)
    with pytest.raises(SyncError, match="unusable"):
        setup.engine.load_weights(setup.model.named_parameters(), 4)


def test_bfloat16_sampler_beside_a_float32_learner(opened):
    if not opened.tied or opened.kind == "vllm_server":
        pytest.skip("one model is enough; test_server_parts.py has the server's options")
    opened.engine.close()
    ids = prompt(0, 60).token_ids
    engine = open_engine(opened.kind, opened.folder, dtype="bfloat16")
    engine.load_weights(opened.model.named_parameters(), 1)
    assert 1e-5 < synced(engine, opened.model.named_parameters(), 1, ids, learner_logp(opened.model, ids), 0.2).mean
    engine.close()
