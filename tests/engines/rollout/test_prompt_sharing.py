"""The responses of a prompt share all of its computation, and none is the worse for it."""

import numpy as np
import pytest
from rollout_worker import learner_logp, prompt, shaken
from transformers import AutoModelForCausalLM

from fastsched.config import RolloutConfig
from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.rollout.opening import open_rollout
from fastsched.engines.rollout.vllm_engine import CPU_BLOCK
from fastsched.types import Sampling

LENGTHS = (2, 31, 32, 33, 34, 63, 64, 65, 97)  # around the edges of a block
ALONE = (33, 65, 97)  # whole blocks and one token: nothing is left to copy
GROUP, NEW = 4, 12


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = random_tiny(tmp_path_factory.mktemp("model"), tied=True, seed=0)
    network = AutoModelForCausalLM.from_pretrained(folder)
    shaken(network, 0.08)
    network.save_pretrained(folder)
    return folder, network


def sampled(folder, monkeypatch, kv_cache_gb: float, max_num_seqs: int = 64):
    """Responses of all prompts, the blocks that were copied, and the tokens of every engine step."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    from fastsched.engines.rollout.vllm_prompts import PromptSharing

    copied, computed = [], []
    load, execute = PromptSharing.start_load_kv, GPUModelRunner.execute_model

    def loads(self, *rest, **given):
        copied.extend(self._get_connector_metadata().pairs)
        return load(self, *rest, **given)

    def executes(self, scheduled, *rest):
        computed.append(scheduled.total_num_scheduled_tokens)
        return execute(self, scheduled, *rest)

    monkeypatch.setattr(PromptSharing, "start_load_kv", loads)
    monkeypatch.setattr(GPUModelRunner, "execute_model", executes)
    cfg = RolloutConfig(engine="vllm", kv_cache_gb=kv_cache_gb, max_num_seqs=max_num_seqs)
    engine = open_rollout(folder, cfg, dtype="float32", max_model_len=192, seed=0, stop_token_ids=())  # all responses are equally long
    computed.clear()
    prompts = [prompt(i, n) for i, n in enumerate(LENGTHS)]
    responses = engine.generate(prompts, Sampling(GROUP, NEW, 0.8), range(len(prompts)))
    engine.close()
    return responses, copied, computed


def largest_error(network, responses) -> float:
    expected = [learner_logp(network, r.prompt_ids + r.token_ids, 0.8)[len(r.prompt_ids) - 1:] for r in responses]
    return max(np.abs(r.logp - e).max() for r, e in zip(responses, expected, strict=True))


def test_one_response_computes_the_prompt_and_the_others_its_last_token(model, monkeypatch):
    responses, copied, computed = sampled(model[0], monkeypatch, 0.1)
    assert len(copied) == (GROUP - 1) * (len(LENGTHS) - len(ALONE))
    assert len({target for _, target in copied}) == len(copied)
    new = sum(len(r.token_ids) - 1 for r in responses)
    assert sum(computed) == sum(LENGTHS) + (GROUP - 1) * len(LENGTHS) + new
    assert largest_error(model[1], responses) <= 1e-4


def test_nothing_is_sampled_otherwise_than_without_sharing(model, monkeypatch):
    from fastsched.engines.rollout import vllm_engine

    shared, *_ = sampled(model[0], monkeypatch, 0.1)
    monkeypatch.setattr(vllm_engine, "SHARED_PROMPTS", None)
    alone, copied, _ = sampled(model[0], monkeypatch, 0.1)
    assert not copied and [r.token_ids for r in shared] == [r.token_ids for r in alone]


@pytest.mark.parametrize("blocks, at_once", [(24, 64), (1000, 3)])
def test_requests_that_wait_or_lose_their_blocks_get_the_right_ones_again(model, monkeypatch, blocks, at_once):
    """Too few blocks for all (vLLM then takes those of running requests), or too few places."""
    network = model[1]
    block = CPU_BLOCK * 2 * 4 * network.config.num_hidden_layers * network.config.num_key_value_heads * network.config.head_dim
    responses, *_ = sampled(model[0], monkeypatch, blocks * block / 2**30, at_once)
    assert len(responses) == GROUP * len(LENGTHS) and largest_error(network, responses) <= 1e-4
