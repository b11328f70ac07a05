"""DeepSpeed's fp32 master weights by stage: where the shards are, and how a full parameter comes out of them."""

from typing import Sequence

import deepspeed
import torch
from deepspeed import comm
from torch import nn


class MasterShards:
    """The fp32 weights that the optimizer owns on this rank: flat shards under ZeRO 1-3, the parameters under stage 0."""

    def __init__(self, engine: deepspeed.DeepSpeedEngine, policy: nn.Module):
        self.engine, self.policy, self.stage = engine, policy, engine.zero_optimization_stage()
        self.partitioned = self.stage > 0

    def shards(self) -> list[torch.Tensor]:
        """fp32 tensors, the same list in the same order at every call."""
        optimizer = self.engine.optimizer
        if self.stage == 3:
            return optimizer.fp32_partitioned_groups_flat
        if self.stage in (1, 2):
            return optimizer.single_partition_of_fp32_groups
        return list(self.policy.parameters())

    def full(self, parameter: nn.Parameter, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        """The full fp32 tensor of `parameter` from shards laid out as `shards()`; a collective where they are partitioned."""
        if self.stage == 3:
            return self._full_stage3(parameter, shards)
        if self.stage == 0:
            index = next(i for i, p in enumerate(self.policy.parameters()) if p is parameter)
            return shards[index]
        out = torch.zeros(parameter.numel(), dtype=torch.float32, device=parameter.device)
        mapping = parameter._hp_mapping
        if mapping is not None:
            here, there = mapping.lp_fragment_address, mapping.hp_fragment_address
            shard = shards[mapping.param_group_index]
            out.narrow(0, here.start, here.numel).copy_(shard.narrow(0, there.start, there.numel))
        if comm.get_world_size() > 1:
            comm.all_reduce(out)
        return out.view_as(parameter)

    def _full_stage3(self, parameter: nn.Parameter, shards: Sequence[torch.Tensor]) -> torch.Tensor:
        optimizer = self.engine.optimizer
        group, offset, _ = optimizer.grad_position[optimizer.get_param_id(parameter)]
        size = parameter.partition_numel()
        own = shards[group].narrow(0, int(offset), size).contiguous()
        full = torch.empty(size * comm.get_world_size(), dtype=torch.float32, device=own.device)
        comm.all_gather_into_tensor(full, own)
        return full.narrow(0, 0, parameter.ds_numel).view(parameter.ds_shape)

    def discard_gradients(self) -> None:
        """Forget the gradients accumulated since the last step."""
        optimizer = self.engine.optimizer
        if self.stage in (1, 2):
            for group in optimizer.averaged_gradients:
                optimizer.averaged_gradients[group] = None
        optimizer.zero_grad()
        self.engine.zero_grad()
