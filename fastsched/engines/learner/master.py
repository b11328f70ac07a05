"""DeepSpeed's fp32 master weights by stage: where the shards are, and how a full parameter comes out of them."""

from typing import Sequence

import deepspeed
import torch
from deepspeed import comm
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from torch import nn

from fastsched.engines.learner.shards import Fragment


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
        if isinstance(optimizer, BF16_Optimizer):  # stage 1 of a bf16 model, whose gradients are summed in fp32
            return optimizer.fp32_groups_flat_partition
        if self.partitioned:
            return optimizer.single_partition_of_fp32_groups
        return list(self.policy.parameters())

    def moments(self) -> tuple[list[torch.Tensor], list[torch.Tensor], float]:
        """AdamW's exp_avg and exp_avg_sq, laid out as `shards()`, and its step count; zeros before the first update."""
        states = [self._optimizer().state[shard] for shard in self.shards()]
        first, second = ([state[name].reshape(-1) if name in state else torch.zeros_like(shard).reshape(-1)
                          for state, shard in zip(states, self.shards(), strict=True)] for name in ("exp_avg", "exp_avg_sq"))
        steps = {float(state.get("step", 0.0)) for state in states}
        if len(steps) > 1:
            raise RuntimeError(f"AdamW counted {sorted(steps)} steps in shards of one model")
        return first, second, steps.pop()

    @torch.no_grad()
    def restore_moments(self, first: Sequence[torch.Tensor], second: Sequence[torch.Tensor], step: float) -> None:
        """Take over what `moments` returned."""
        for shard, exp_avg, exp_avg_sq in zip(self.shards(), first, second, strict=True):
            count = torch.tensor(step, dtype=torch.float32, device=shard.device)
            self._optimizer().state[shard] = {"step": count, "exp_avg": exp_avg.view_as(shard), "exp_avg_sq": exp_avg_sq.view_as(shard)}

    def _optimizer(self) -> torch.optim.Optimizer:
        return self.engine.optimizer.optimizer if self.partitioned else self.engine.optimizer

    def layout(self) -> list[Fragment]:
        """Where this rank's pieces of every parameter lie in `shards()`."""
        named, optimizer, out = list(self.policy.named_parameters()), self.engine.optimizer, []
        for i, (name, p) in enumerate(named):
            if self.stage == 0:
                out.append(Fragment(name, i, 0, 0, p.numel()))
            elif self.stage == 3:
                group, offset, _ = optimizer.grad_position[optimizer.get_param_id(p)]
                begin = comm.get_rank() * p.partition_numel()
                out.append(Fragment(name, group, int(offset), begin, min(p.partition_numel(), p.ds_numel - begin)))
            elif p._hp_mapping is not None:
                here, there = p._hp_mapping.lp_fragment_address, p._hp_mapping.hp_fragment_address
                out.append(Fragment(name, p._hp_mapping.param_group_index, int(there.start), int(here.start), int(here.numel)))
        return [fragment for fragment in out if fragment.size > 0]

    @torch.no_grad()
    def restore_working_weights(self) -> None:
        """Copy the master weights into the policy's working weights; every rank calls it."""
        optimizer = self.engine.optimizer
        if self.stage in (1, 2):
            optimizer.update_lp_params()
        elif self.stage == 3:
            optimizer.checkpoint_event_prologue()
            for group in range(len(optimizer.fp32_partitioned_groups_flat)):
                optimizer._reassign_or_swap_out_partitioned_parameters(group)
            optimizer.checkpoint_event_epilogue()

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
        """Forget the gradients accumulated since the last step, wherever the stage keeps its sum."""
        optimizer = self.engine.optimizer
        if self.stage == 2:
            optimizer.averaged_gradients.clear()  # the sum of a bf16 model
            optimizer.all_grad_tensors.clear()  # the sum of an fp32 model
        elif self.stage == 3:
            optimizer.grad_partitions_flat_buffer.zero_()
        optimizer.zero_grad()
        self.engine.zero_grad()
