"""What the rollout engines share, and two of them side by side."""

import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from rollout_worker import WORKER, learner_logp, prompt
from transformers import GPT2Config, GPT2LMHeadModel

from fastsched.config import ConfigError, RolloutConfig
from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.rollout.contract import check_request, require_weights, response_seed
from fastsched.engines.rollout.fingerprints import fingerprints
from fastsched.engines.rollout.opening import open_rollout
from fastsched.engines.rollout.vllm_engine import VllmRollout, _require_possible, sampled_logp
from fastsched.engines.rollout.weights import SyncError, checked, expected_shapes
from fastsched.types import Sampling


@pytest.mark.parametrize("sampling, seeds, message", [
    (Sampling(2, 60), [1, 2], "row 2: 140 prompt tokens and 60 new"),
    (Sampling(2, 4), [1], "2 prompts but 1 seeds"),
    (Sampling(2, 4), [1, -1], "seeds must not be negative"),
    (Sampling(2, 4, temperature=0.005), [1, 2], "sampling.temperature: 0.005"),
    (Sampling(2, 4, top_p=0.0), [1, 2], "sampling.top_p"),
    (Sampling(2, 4, top_k=0), [1, 2], "sampling.top_k"),
    (Sampling(0, 4), [1, 2], "must be positive"),
    (Sampling(2, 0), [1, 2], "must be positive"),
])
def test_a_batch_that_cannot_run_is_refused(sampling, seeds, message):
    with pytest.raises(ConfigError, match=message):
        check_request([prompt(0, 5), prompt(2, 140)], sampling, seeds, 192)


@pytest.mark.parametrize("responses", [[1], [2, 0], [1, 1, 1]])
def test_numbers_of_responses_that_do_not_fit_the_prompts_are_refused(responses):
    check_request([prompt(0, 5), prompt(2, 4)], Sampling(2, 4), [1, 2], 192, [1, 3])
    with pytest.raises(ConfigError, match="2 prompts need one positive number of responses each"):
        check_request([prompt(0, 5), prompt(2, 4)], Sampling(2, 4), [1, 2], 192, responses)


def test_an_empty_prompt_is_refused():
    with pytest.raises(ConfigError, match="row 4: the prompt is empty"):
        check_request([prompt(4, 0)], Sampling(1, 4), [1], 192)


def by_name(weights, name: str, value) -> list:
    return [(n, value if n.endswith(name) else t) for n, t in weights]


@pytest.mark.parametrize("spoil, message", [
    (lambda weights: weights[:-1], "1 of .* parameters never came"),
    (lambda weights: [*weights, ("model.extra.weight", torch.ones(2))], "no parameter 'model.extra.weight'"),
    (lambda weights: by_name(weights, "layers.1.mlp.up_proj.weight", torch.ones(2, 2)), "up_proj.weight has shape"),
])
def test_wrong_weights_are_refused(spoil, message, tmp_path):
    folder = random_tiny(tmp_path, tied=True)
    shapes = expected_shapes(folder)
    weights = [(name, torch.zeros(shape)) for name, shape in shapes.items()]
    assert len(list(checked([*weights, ("lm_head.weight", torch.ones(2))], shapes, torch.float32))) == len(shapes)
    with pytest.raises(SyncError, match=message):
        list(checked(spoil(weights), shapes, torch.float32))


def test_a_logp_that_vllm_did_not_give_is_nan():
    entry = lambda value: SimpleNamespace(logprob=value)
    logp = sampled_logp([4, 5, 6, 7], [{4: entry(-0.1)}, None, {6: entry(None)}, {9: entry(-0.2)}])
    np.testing.assert_array_equal(logp, np.array([-0.1, np.nan, np.nan, np.nan], np.float32))


def test_response_seeds_do_not_collide_between_neighbouring_prompts():
    seeds = {response_seed(seed, g) for seed in range(64) for g in range(64)}
    assert len(seeds) == 64 * 64 and min(seeds) >= 0 and max(seeds) < 2**63


def test_left_padding_keeps_absolute_positions_right(tmp_path):
    """C9: harmless for rotary models, wrong for learned positions."""
    torch.manual_seed(0)
    config = GPT2Config(vocab_size=320, n_positions=64, n_embd=32, n_layer=2, n_head=2, initializer_range=0.3)
    model = GPT2LMHeadModel(config).eval()
    model.save_pretrained(tmp_path)
    cfg = RolloutConfig(engine="transformers")
    engine = open_rollout(tmp_path, cfg, dtype="float32", max_model_len=64, seed=0, stop_token_ids=[])
    for r in engine.generate([prompt(0, 3), prompt(1, 30)], Sampling(2, 8), [1, 2]):
        expected = learner_logp(model, r.prompt_ids + r.token_ids)[len(r.prompt_ids) - 1:]
        np.testing.assert_allclose(r.logp, expected, atol=1e-4)
    require_weights(engine, fingerprints(model.named_parameters(), torch.float32), 0)


@pytest.mark.slow
def test_two_gloo_ranks_have_one_engine_each_and_keep_their_group(tmp_path):
    folder = random_tiny(tmp_path / "model", tied=True, seed=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*command, WORKER, "ranks", folder], env=os.environ | {"OMP_NUM_THREADS": "1"},
                            capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("rank 0 error") == 2 and result.stdout.count("rank 1 error") == 2


@pytest.mark.slow
def test_two_ranks_share_a_tensor_parallel_engine(tmp_path):
    folder = random_tiny(tmp_path / "model", tied=True, seed=0)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    result = subprocess.run([*command, WORKER, "shared", folder], env=os.environ | {"OMP_NUM_THREADS": "1"},
                            capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr[-3000:]
    assert result.stdout.count("rank 0 error") == 1 and result.stdout.count("rank 1 error") == 1
    saved = np.load(folder / "shared.npz")
    assert saved["tokens0"].tolist() != saved["tokens1"].tolist()


@pytest.mark.parametrize("options, environment, message", [
    ({"tensor_parallel": 2}, {"WORLD_SIZE": "3"}, "rollout.tensor_parallel: 3 ranks cannot be split into groups of 2"),
    ({"sleep": True}, {}, "rollout.sleep: vLLM sleeps on CUDA only"),
])
def test_what_this_machine_cannot_do_is_refused(options, environment, message, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=message):
        _require_possible(RolloutConfig(**options), on_cpu=True)


def test_sleep_refuses_an_allocator_that_it_cannot_work_with(monkeypatch):
    """H7: expandable segments and the sleep mode's memory pool."""
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        _require_possible(RolloutConfig(sleep=True), on_cpu=False)
        monkeypatch.setenv(name, "expandable_segments:True")
        with pytest.raises(ConfigError, match=f"rollout.sleep: .*expandable_segments; take it out of {name}"):
            _require_possible(RolloutConfig(sleep=True), on_cpu=False)
        monkeypatch.delenv(name)


def test_a_sleeping_engine_is_woken_before_weights_are_written(tmp_path):
    """H3: what is written into a sleeping engine is lost. Sleep itself needs CUDA; the order of the calls does not."""
    folder, calls = random_tiny(tmp_path, tied=True, seed=0), []
    record = lambda name: lambda *given, **named: calls.append(given[0] if name == "collective_rpc" else name) is None
    engine = VllmRollout.__new__(VllmRollout)
    engine._failed_version, engine._asleep, engine.dtype, engine._shapes = None, False, torch.float32, expected_shapes(folder)
    engine._llm = SimpleNamespace(**{n: record(n) for n in ("sleep", "wake_up", "collective_rpc", "apply_model", "reset_prefix_cache")})
    engine.sleep()
    engine.load_weights([], 1)
    engine.load_weights([], 2)
    assert calls == ["sleep", "wake_up", *["reload_weights", "apply_model", "reset_prefix_cache"] * 2]
    engine.sleep()
    engine._llm.wake_up = lambda: False
    with pytest.raises(SyncError, match="did not wake up in full"):
        engine.load_weights([], 3)
