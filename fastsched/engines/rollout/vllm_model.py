"""vLLM's model from inside, in process or in a server's worker: the tied head's packed copy, and fingerprints of what it multiplies with.

Under tensor parallelism every rank of the group calls these alike.
"""

import torch
import torch.distributed as dist

from fastsched.engines.rollout.weights import energy, layer_group, probe


def repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU lm_head multiplies with a packed copy, which a reload renews only for a head of its own."""
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


@torch.no_grad()
def module_fingerprints(model: torch.nn.Module) -> dict[str, float]:
    """`weights.layer_fingerprints` through vLLM's own kernels and the fused, packed, sharded weights that they really use."""
    prints: dict[str, float] = {}
    reference = next(parameter for parameter in model.parameters() if parameter.numel())
    for name, module in model.named_modules():
        total = _module_energy(module, reference)
        if total:
            group = layer_group(name)
            prints[group] = prints.get(group, 0.0) + total
    return prints


def _module_energy(module: torch.nn.Module, like: torch.Tensor) -> float:
    """||W r||^2 and ||b||^2 of one module over all shards."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    vectors = [v for v in module.parameters(recurse=False) if v.ndim == 1]
    if isinstance(module, RowParallelLinear):  # its input is sharded: only the sum over shards is W r
        rank, width = module.tp_rank, module.input_size_per_partition
        signs = probe(module.input_size, like.device, like.dtype)[rank * width:(rank + 1) * width]
        image = _over_group(module.quant_method.apply(module, signs[None].contiguous(), None))
        return energy(image) + sum(map(energy, vectors))
    if isinstance(module, ColumnParallelLinear):
        image = module.quant_method.apply(module, probe(module.input_size, like.device, like.dtype)[None], None)[0]
        return _sum(sum(_output_energy(module, v) for v in (image, *vectors)), like.device)
    if isinstance(module, VocabParallelEmbedding):
        signs = probe(module.embedding_dim, like.device, like.dtype)
        if isinstance(module, ParallelLMHead):
            image = module.quant_method.apply(module, signs[None], None)[0]
        else:
            image = module.weight.float() @ signs.float()
        return _sum(energy(image[: module.shard_indices.num_org_elements]), like.device)
    image = (module.quant_method.apply(module, probe(module.input_size, like.device, like.dtype)[None], None),) if isinstance(
        module, LinearBase) else ()
    return sum(map(energy, (*image, *vectors)))


def _output_energy(module: torch.nn.Module, output: torch.Tensor) -> float:
    """Energy of a vector over this shard's outputs; key and value heads that several shards repeat count once."""
    from vllm.model_executor.layers.linear import QKVParallelLinear

    if not isinstance(module, QKVParallelLinear):
        return energy(output)
    queries = module.num_heads * module.head_size
    return energy(output[:queries]) + energy(output[queries:]) / module.num_kv_head_replicas


def _over_group(values: torch.Tensor) -> torch.Tensor:
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size > 1:
        values = values.float()
        dist.all_reduce(values, group=group.device_group)
    return values


def _sum(value: float, device: torch.device) -> float:
    from vllm.distributed.parallel_state import get_tp_group

    if get_tp_group().world_size == 1:
        return value
    total = torch.tensor(value, dtype=torch.float64, device=device)
    dist.all_reduce(total, group=get_tp_group().device_group)
    return total.item()
