"""Gradients of a bf16 model added up over hundreds of micro-batches, under every ZeRO stage that takes bf16."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from fastsched.config import LearnerConfig, ModelConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.learn.packing import Sample, pack
from fastsched.types import MicroBatch

N = 512
BETA = 0.9


class Small(nn.Module):
    """Three layers in the form of a causal language model of transformers: a micro-batch costs no more than the engine around it."""

    def __init__(self):
        super().__init__()
        self.config = PretrainedConfig()
        self.decoder, self.head = Decoder(), nn.Linear(16, 64, bias=False)

    def get_decoder(self):
        return self.decoder

    def get_output_embeddings(self):
        return self.head


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(64, 16), nn.Linear(16, 16)

    def forward(self, input_ids, position_ids, attention_mask, use_cache):
        return BaseModelOutput(last_hidden_state=torch.tanh(self.linear(self.embedding(input_ids))))


class Out(NamedTuple):
    loss: torch.Tensor


class Sums(NamedTuple):
    """What one update reported and used, and what its micro-batches' gradients add up to."""

    norm: float
    used: dict[str, torch.Tensor]  # by name, fp64, as the optimizer got it
    truth: dict[str, torch.Tensor]  # by name, fp64 sum of the bf16 gradients


def micro_batches(count: int) -> list[MicroBatch]:
    rng, out = np.random.default_rng(0), []
    for _ in range(count):
        prompt, tokens = (tuple(rng.integers(0, 64, 2).tolist()) for _ in range(2))
        sample = Sample(0, prompt, tokens, np.zeros(2, np.float32), 0.0, np.ones(2, bool), 1.0)
        out += pack([sample], token_budget=8, share_prompts=False)
    return out


def small_engine(stage: int, grad_clip: float = 0.0) -> DeepSpeedLearner:
    torch.manual_seed(0)
    cfg = LearnerConfig(zero_stage=stage, kl="none", grad_clip=grad_clip, betas=(BETA, 0.999))
    return DeepSpeedLearner(Small().to(torch.bfloat16), cfg, ModelConfig(dtype="bfloat16"))


def backward(engine: DeepSpeedLearner, micro: list[MicroBatch]) -> None:
    """Micro-batches of weight 1 / len(micro)."""
    for m in micro:
        targets = torch.from_numpy(m.targets)
        engine.backward(m, lambda head, _, t=targets: Out(
            nn.functional.cross_entropy((head.hidden @ head.weight.T).float(), t) / len(micro)), reference=False)


def sums(stage: int, micro: list[MicroBatch], grad_clip: float = 0.0) -> Sums:
    engine, truth = small_engine(stage, grad_clip), defaultdict(lambda: 0.0)

    def add(name, grad):
        truth[name] += grad.double()

    for name, p in engine.policy.named_parameters():
        p.register_hook(lambda grad, name=name: add(name, grad))
    backward(engine, micro)
    norm = engine.step(1e-3).grad_norm
    first = [m.reshape(-1) for m in engine.master.moments()[0]]
    used = {name: engine.master.full(p, first).double() / (1 - BETA) for name, p in engine.policy.named_parameters()}
    engine.close()
    return Sums(norm, used, dict(truth))


def length(tensors) -> float:
    return float(sum(t.square().sum() for t in tensors)) ** 0.5


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("alike", [True, False], ids=["coherent", "random"])
def test_hundreds_of_micro_batches_add_up(model_path, stage, alike):
    found = sums(stage, micro_batches(1) * N if alike else micro_batches(N))
    true = length(found.truth.values())
    error = length(found.used[name] - g for name, g in found.truth.items()) / true
    assert error < 1e-3 and found.norm == pytest.approx(true, rel=1e-3)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_sum_is_clipped_as_a_whole(model_path, stage):
    found = sums(stage, micro_batches(4), grad_clip=0.25)
    true = length(found.truth.values())
    assert found.norm == pytest.approx(true, rel=1e-5) and true > 0.5
    assert length(found.used[name] - g * 0.25 / true for name, g in found.truth.items()) < 1e-4 * 0.25


@pytest.mark.parametrize("written, read", [(1, 1), (1, 2), (2, 1), (3, 1), (1, 3)])
def test_a_checkpoint_of_any_stage_goes_on_under_any_other(model_path, tmp_path, written, read):
    """Stage 1 wrote its shards as stage 2 does before bf16 was summed in fp32: those checkpoints are read as well."""
    micro = micro_batches(8)

    def train(engine, updates):
        for _ in range(updates):
            backward(engine, micro)
            engine.step(1e-3)
            engine.update_average(0.5)

    def tensors(engine):
        return {**{n: w.clone() for n, w in engine.named_weights()}, **{f"average.{n}": w.clone() for n, w in engine.average_weights()}}

    first = small_engine(written)
    train(first, 3)
    first.save(tmp_path)
    saved = tensors(first)
    train(first, 2)
    straight = tensors(first)
    first.close()
    second = small_engine(read)
    second.load(tmp_path)
    loaded = tensors(second)
    train(second, 2)
    after = tensors(second)
    second.close()
    assert all(torch.equal(saved[n], loaded[n]) for n in saved) and not all(torch.equal(saved[n], straight[n]) for n in saved)
    assert all(torch.equal(straight[n], after[n]) for n in straight)
