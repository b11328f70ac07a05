"""vLLM's model from inside, in process or in a server's worker: the tied head's packed copy, and fingerprints of its tensors.

Under tensor parallelism every rank of the group calls these alike.
"""

from functools import wraps
from typing import Iterator, NamedTuple

import torch
import torch.distributed as dist

from fastsched.engines.rollout.fingerprints import row_sums, totals


def repack_tied_head(model: torch.nn.Module) -> None:
    """On a CPU lm_head multiplies with a packed copy, which a reload renews only for a head of its own."""
    from vllm.model_executor.layers import utils
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        utils.dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


def watch_packing() -> None:
    """From now on what vLLM packs for a CPU kernel is fingerprinted as it goes in: the kernel's own copy is opaque, the weight is freed."""
    from vllm.model_executor.layers import utils

    pack = utils.dispatch_cpu_unquantized_gemm
    if hasattr(pack, "__wrapped__"):
        return

    @wraps(pack)
    def watched(layer: torch.nn.Module, remove_weight: bool) -> None:
        multiplies = layer.weight.ndim == 2 and not layer.weight.is_meta and not _looks_up(layer)
        sums = row_sums(layer.weight, _first_column(layer)) if multiplies else None
        pack(layer, remove_weight)
        if multiplies:
            layer.packed_sums = layer.cpu_linear, sums

    utils.dispatch_cpu_unquantized_gemm = watched


class Part(NamedTuple):
    """What one module holds of one tensor: the sums of its rows, and how many neighbouring ranks hold the same."""

    name: str  # Hugging Face's
    sums: torch.Tensor
    copies: int


@torch.no_grad()
def model_fingerprints(model: torch.nn.Module, dtype: torch.dtype) -> dict[str, int | None]:
    """`fingerprints.fingerprints` of the fused, packed, sharded weights that vLLM multiplies with; see `RolloutEngine.fingerprints`."""
    parts = list(_parts(model, dtype))
    by_rank = _of_every_rank(totals([part.sums for part in parts]))
    held: dict[str, int | None] = {}
    for part, ranks in zip(parts, by_rank.T.tolist(), strict=True):
        shards = [set(ranks[k:k + part.copies]) for k in range(0, len(ranks), part.copies)]
        before, same = held.get(part.name, 0), all(len(shard) == 1 for shard in shards)
        held[part.name] = None if before is None or not same else _wrapped(before + sum(value for shard in shards for value in shard))
    return held


def _wrapped(value: int) -> int:
    """Modulo 2^64, as a signed number."""
    return (value + 2**63) % 2**64 - 2**63


def _parts(model: torch.nn.Module, dtype: torch.dtype) -> Iterator[Part]:
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.model_executor.layers.linear import LinearBase, RowParallelLinear

    world, fused = get_tp_group().world_size, getattr(model, "packed_modules_mapping", {})
    transposed = any(hasattr(module, "_transpose_conv1d") for module in model.modules())  # GPT-2: rows are the columns of the file
    for path, module in model.named_modules():
        for kind, parameter in module.named_parameters(recurse=False):
            unseen = not parameter.numel() and not hasattr(module, "packed_sums")
            if unseen or transposed and isinstance(module, LinearBase) and kind == "weight":
                continue
            sums = _sums(module, kind, parameter, dtype)
            if isinstance(module, RowParallelLinear) and kind == "weight":
                sums = _summed(sums, module.tp_size)
            above, _, leaf = path.rpartition(".")
            sizes, copies = _slices(module, len(sums), world)
            names = fused.get(leaf, [leaf])
            names = names if len(names) == len(sizes) else [leaf] * len(sizes)
            for name, piece, same in zip(names, sums.split(sizes), copies, strict=True):
                yield Part(f"{above}.{name}.{kind}".lstrip("."), piece, same)


def _sums(module: torch.nn.Module, kind: str, parameter: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    packed = getattr(module, "packed_sums", None)
    if kind != "weight" or packed is None:
        return row_sums(parameter.to(dtype), _first_column(module) if kind == "weight" else 0)
    kernel, sums = packed
    if kernel is not module.cpu_linear:
        raise RuntimeError("vLLM packed a weight that was not seen")
    return sums


def _slices(module: torch.nn.Module, rows: int, world: int) -> tuple[list[int], list[int]]:
    """Rows of each tensor that is fused in a module's, and how many ranks hold the same of it."""
    from vllm.model_executor.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, QKVParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

    if isinstance(module, QKVParallelLinear):
        keys = module.num_kv_heads * module.head_size
        queries, repeated = module.num_heads * module.head_size, world // module.tp_size * module.num_kv_head_replicas
        return [queries, keys, rows - queries - keys], [world // module.tp_size, repeated, repeated]
    if isinstance(module, MergedColumnParallelLinear):
        return list(module.output_partition_sizes), [world // module.tp_size] * len(module.output_partition_sizes)
    sharded = isinstance(module, (ColumnParallelLinear, VocabParallelEmbedding))
    return [rows], [world // module.tp_size if sharded else world]


def _looks_up(module: torch.nn.Module) -> bool:
    """An embedding, which reads its weight as it is."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    return isinstance(module, VocabParallelEmbedding) and not isinstance(module, ParallelLMHead)


def _first_column(module: torch.nn.Module) -> int:
    from vllm.model_executor.layers.linear import RowParallelLinear

    return module.tp_rank * module.input_size_per_partition if isinstance(module, RowParallelLinear) else 0


def _summed(sums: torch.Tensor, shards: int) -> torch.Tensor:
    """Over the ranks that share the columns."""
    from vllm.distributed.parallel_state import get_tp_group

    if shards > 1:
        sums = sums.clone()  # what was kept at packing stays this rank's
        dist.all_reduce(sums, group=get_tp_group().device_group)
    return sums


def _of_every_rank(values: torch.Tensor) -> torch.Tensor:
    """[ranks, n] of this rank's [n]."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    if group.world_size == 1:
        return values[None].cpu()
    gathered = [torch.empty_like(values) for _ in range(group.world_size)]
    dist.all_gather(gathered, values, group=group.device_group)
    return torch.stack(gathered).cpu()
