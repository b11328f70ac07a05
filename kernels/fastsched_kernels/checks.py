"""Arguments that do not fit together are named before anything is computed."""



import torch
from torch import Tensor

from fastsched_kernels.reference import KL_KINDS, KLKind, Number


def check_shapes(hidden: Tensor, weight: Tensor, target: Tensor, ref_hidden: Tensor | None, ref_weight: Tensor | None) -> None:
    if hidden.dim() != 2 or weight.dim() != 2 or hidden.shape[1] != weight.shape[1]:
        raise ValueError(f"hidden [N, H] and weight [V, H] do not fit: {tuple(hidden.shape)}, {tuple(weight.shape)}")
    if target.shape != hidden.shape[:1] or target.dtype != torch.int64:
        raise ValueError(f"target must be int64 [{hidden.shape[0]}], got {target.dtype} {tuple(target.shape)}")
    if (ref_hidden is None) != (ref_weight is None):
        raise ValueError("ref_hidden and ref_weight go together")
    if ref_hidden is not None and (len(ref_hidden) != len(hidden) or len(ref_weight) != len(weight)):
        raise ValueError(f"ref_hidden, ref_weight do not fit: {tuple(ref_hidden.shape)}, {tuple(ref_weight.shape)}")


def check_reference(kl: KLKind, ref_logp: Tensor | None, ref_hidden: Tensor | None, distill: Number) -> None:
    if kl not in KL_KINDS:
        raise ValueError(f"kl={kl!r} is none of {', '.join(KL_KINDS)}")
    if kl == "exact" and ref_hidden is None:
        raise ValueError("kl='exact' needs ref_hidden and ref_weight")
    if (kl != "none" or not is_zero(distill)) and ref_hidden is None and ref_logp is None:
        raise ValueError(f"kl={kl!r}, distill: need ref_logp, or ref_hidden and ref_weight")


def check_target(target: Tensor, vocabulary: int) -> None:
    inside = (target >= 0) & (target < vocabulary)
    if target.is_cuda:
        torch._assert_async(inside.all())
    elif not inside.all():
        row = int((~inside).nonzero()[0])
        raise IndexError(f"target {int(target[row])} (computed row {row}) lies outside the vocabulary [0, {vocabulary})")


def check_level(level: str, sequence: Tensor | None, compute: str) -> None:
    if compute not in ("auto", "forward", "recompute"):
        raise ValueError(f"compute={compute!r} is none of auto, forward, recompute")
    if level not in ("token", "sequence"):
        raise ValueError(f"level={level!r} is none of token, sequence")
    if level == "sequence" and (sequence is None or compute == "forward"):
        raise ValueError("level='sequence' needs the sequence of each row and compute='auto' or 'recompute'")


def is_zero(value: Number) -> bool:
    """A scalar 0: off, known on the host."""
    return not isinstance(value, Tensor) and value == 0
