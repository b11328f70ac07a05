"""A bf16 model of three layers under DeepSpeed, and what the gradients of its micro-batches add up to."""

from collections import defaultdict
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from transformers import PretrainedConfig
from transformers.modeling_outputs import BaseModelOutput

from fastsched.config import LearnerConfig, ModelConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.learn.packing import Sample, pack
from fastsched.types import MicroBatch

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
    """What one update reported and used, and what its micro-batches' gradients add up to over all ranks."""

    norm: float
    used: dict[str, torch.Tensor]  # by name, fp64, as the optimizer got it
    truth: dict[str, torch.Tensor]  # by name, fp64 sum of the bf16 gradients


def micro_batches(count: int, seed: int = 0) -> list[MicroBatch]:
    rng, out = np.random.default_rng(seed), []
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
    """Micro-batches of weight 1 / their number on all ranks."""
    count = len(micro) * engine.ranks.world_size
    for m in micro:
        targets = torch.from_numpy(m.targets)
        engine.backward(m, lambda head, _, t=targets: Out(
            nn.functional.cross_entropy((head.hidden @ head.weight.T).float(), t) / count), reference=False)


def sums(stage: int, micro: list[MicroBatch], grad_clip: float = 0.0) -> Sums:
    engine, truth = small_engine(stage, grad_clip), defaultdict(lambda: 0.0)

    def add(name, grad):
        truth[name] += grad.double()

    for name, p in engine.policy.named_parameters():
        p.register_hook(lambda grad, name=name: add(name, grad))
    backward(engine, micro)
    for total in truth.values():
        torch.distributed.all_reduce(total.div_(engine.ranks.world_size))  # backward multiplies by it, the reduction divides
    norm = engine.step(1e-3).grad_norm
    first = [m.reshape(-1) for m in engine.master.moments()[0]]
    used = {name: engine.master.full(p, first).double() / (1 - BETA) for name, p in engine.policy.named_parameters()}
    engine.close()
    return Sums(norm, used, dict(truth))


def length(tensors) -> float:
    return float(sum(t.square().sum() for t in tensors)) ** 0.5


def error(found: Sums) -> float:
    """Of what the optimizer got, relative to the true sum."""
    return length(found.used[name] - g for name, g in found.truth.items()) / length(found.truth.values())
