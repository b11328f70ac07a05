"""The network that KL and distillation are taken to, without gradient: whole on every rank, a partitioned engine under ZeRO-3."""

from contextlib import contextmanager
from typing import Iterator, Mapping, Sequence

import deepspeed
import torch
from deepspeed import comm
from torch import nn

from fastsched.engines.learner.policy import Policy, weight_names
from fastsched.engines.learner.shards import Fragment
from fastsched.types import Head, MicroBatch


class ReferenceNetwork:
    """Averaged policy, hard copy or teacher; `partitioned` under ZeRO stage 3. Every method is called on every rank alike."""

    def __init__(self, model: nn.Module, *, zero_stage: int, dtype: torch.dtype, device: torch.device):
        policy = Policy(model).requires_grad_(False).eval()
        self.partitioned = zero_stage == 3
        if self.partitioned:
            config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": dtype == torch.bfloat16}, "steps_per_print": 10**9,
                      # A parameter that stays whole would not see what is written into the shards.
                      "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0}}
            self.engine, *_ = deepspeed.initialize(model=policy, config=config)
        else:
            self.engine = policy.to(device)
        self.policy: Policy = self.engine.module if self.partitioned else policy
        self.model = self.policy.model

    @contextmanager
    def head(self, micro: MicroBatch) -> Iterator[Head]:
        """Hidden states of the trained tokens, and the head's whole weight until the end of the block."""
        with torch.no_grad():
            hidden = self.engine(micro, lambda head: head.hidden)
        head = self.policy.head
        with deepspeed.zero.GatheredParameters([p for p in (head.weight, head.bias) if p is not None], enabled=self.partitioned):
            yield Head(hidden, head.weight, head.bias, head.softcap)

    @torch.no_grad()
    def take(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        """Take over whole weights by name; of a partitioned parameter each rank keeps its part."""
        target = dict(weight_names(self.policy))
        for name, value in weights:
            self._write(target[name], value)

    def _write(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        if not self.partitioned:
            parameter.copy_(value)
            return
        begin = comm.get_rank() * parameter.partition_numel()
        size = min(parameter.partition_numel(), parameter.ds_numel - begin)
        if size > 0:
            parameter.ds_tensor.narrow(0, 0, size).copy_(value.reshape(-1).narrow(0, begin, size))

    @torch.no_grad()
    def take_shards(self, shards: Sequence[torch.Tensor], layout: Sequence[Fragment]) -> None:
        """Take over a ZeRO-3 learner's shards, which are cut as this network's are: no communication."""
        target: Mapping[str, nn.Parameter] = dict(self.policy.named_parameters())
        for piece in layout:
            target[piece.name].ds_tensor.narrow(0, 0, piece.size).copy_(shards[piece.shard].narrow(0, piece.start, piece.size))

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, whole weight), one at a time; every rank gets all of them."""
        for name, p in weight_names(self.policy):
            with deepspeed.zero.GatheredParameters([p], enabled=self.partitioned):
                yield name, p.detach()

    def close(self) -> None:
        if self.partitioned:
            self.engine.destroy()
