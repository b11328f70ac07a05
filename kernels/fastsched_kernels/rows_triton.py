"""Rows of logits in Triton: CUDA, or any device under Triton's interpreter. The contract is that of rows_pytorch.

Few rows are split over V so that the device is full; vocabulary shards of other ranks merge the same way (`shard_states`,
`merge_shards`). Kernels: triton_stats, triton_loss; device code that they share: triton_row.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from fastsched_kernels.reference import Number, Objective
from fastsched_kernels.table import (
    Coefficients,
    PolicyRows,
    Result,
    RowState,
    State,
    kl_index,
    number_vector,
    objective_flags,
    objective_table,
    policy_rows,
)
from fastsched_kernels.triton_loss import policy_kernel
from fastsched_kernels.triton_stats import Partial, combine_kernel, gradient_kernel, partial_kernel, target_kernel

INTERPRETED = not isinstance(policy_kernel, triton.JITFunction)
"""Whether these kernels run in Triton's interpreter, on any device."""
_FULL_DEVICE = 264  # programs; two for each multiprocessor of an H200


def block_size(v: int) -> int:
    """Columns that one program of 8 warps holds at a time; 8192 spills on sm_90 (bench/kernels/compile_report.py)."""
    return max(16, min(4096, triton.next_power_of_2(v)))


def splits(n: int, v: int, block: int) -> tuple[int, int]:
    """(number of splits, columns of each, a multiple of block): one split as soon as the rows fill the device."""
    blocks = triton.cdiv(v, block)
    count = min(blocks, max(1, _FULL_DEVICE // max(n, 1)))
    size = triton.cdiv(blocks, count) * block
    return triton.cdiv(v, size), size


def on_device_of(tensor: Tensor) -> AbstractContextManager:
    """Triton launches on the current device, wherever its arguments lie."""
    return torch.cuda.device(tensor.device) if tensor.is_cuda else nullcontext()


def check_rows(logits: Tensor, target: Tensor, ref_logits: Tensor | None, out: Tensor | None = None) -> None:
    """ValueError for a layout that the kernels, which see pointers and row strides, would misread; as in csrc/ops.cpp."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with contiguous rows, got {tuple(logits.shape)} with strides {logits.stride()}")
    if target.shape != logits.shape[:1] or target.dtype != torch.int64 or not target.is_contiguous() or target.device != logits.device:
        raise ValueError(f"target must be contiguous int64 [{len(logits)}] on {logits.device}, got {target.dtype} {tuple(target.shape)} "
                         f"with strides {target.stride()} on {target.device}")
    if ref_logits is not None and (ref_logits.shape != logits.shape or ref_logits.dtype != logits.dtype or ref_logits.stride(1) != 1
                                   or ref_logits.device != logits.device):
        raise ValueError("ref_logits must have the shape, dtype and device of logits and contiguous rows")
    if out is not None and (out.shape != logits.shape or out.stride(1) != 1 or out.device != logits.device
                            or out.dtype not in (logits.dtype, torch.bfloat16, torch.float16)):
        raise ValueError("out must have the shape and device of logits, contiguous rows and the dtype of logits, bf16 or fp16")


class Fine(NamedTuple):
    """Where a row's target stands [R] int64, and its scaled logit [R] fp32 in the policy's row and in the reference's, or None."""

    target: Tensor | None = None
    z: Tensor | None = None
    r: Tensor | None = None

    def arguments(self, unused: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """`unused` stands where the flags say that nothing is read."""
        return tuple(unused if x is None else x for x in self)

    def flags(self) -> dict[str, bool]:
        return {"FINE": self.z is not None, "REF_FINE": self.r is not None}


def shard_states(logits: Tensor, ref_logits: Tensor | None, temperature: Number, softcap: float | None, fine: Fine | None = None) -> Tensor:
    """[R, S, len(Partial)] partial states of logits [R, V], which may be one rank's shard of the vocabulary; `fine.target` counts from
    the shard's first column and may lie outside it.
    """
    n, v = logits.shape
    block = block_size(v)
    count, size = splits(n, v, block)
    out = torch.empty(n, count, len(Partial), dtype=torch.float32, device=logits.device)
    t = number_vector(temperature, n, logits.device)
    ref, fine = logits if ref_logits is None else ref_logits, fine or Fine()
    if n:
        with on_device_of(logits):
            partial_kernel[(n, count)](
                logits, logits.stride(0), ref, ref.stride(0), *fine.arguments(t), t, int(t.numel() > 1), out, v, size,
                float(softcap or 0.0), **fine.flags(), HAS_REF=ref_logits is not None, SOFTCAP=softcap is not None, BLOCK=block,
                num_warps=8,
            )
    return out


def merge_shards(states: Tensor, z_target: Tensor, has_ref: bool) -> RowState:
    """Statistics of whole rows from partial states [R, S, len(Partial)], shards side by side in S; z_target [R] scaled logit
    of the target.
    """
    n = states.shape[0]
    out = torch.empty(n, len(State), dtype=torch.float32, device=states.device)
    if n:
        with on_device_of(states):
            combine_kernel[(n,)](states.contiguous(), z_target.contiguous(), out, states.shape[1], num_warps=1)
    state = RowState(*out.unbind(1))
    return state if has_ref else state._replace(kl=torch.full_like(state.kl, torch.nan))


def target_logits(
    logits: Tensor, target: Tensor, temperature: Number, softcap: float | None, target_logit: Tensor | None = None
) -> Tensor:
    """[R] scaled logit of the target, from `target_logit` where that is given."""
    n = len(target)
    out = torch.empty(n, dtype=torch.float32, device=logits.device)
    t = number_vector(temperature, n, logits.device)
    fine = out if target_logit is None else target_logit.float().contiguous()
    if n:
        with on_device_of(logits):
            target_kernel[(n,)](
                logits, logits.stride(0), target, fine, t, int(t.numel() > 1), out, float(softcap or 0.0),
                HAS_TARGET_LOGIT=target_logit is not None, SOFTCAP=softcap is not None, num_warps=1,
            )
    return out


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
) -> RowState:
    """As rows_pytorch.row_stats."""
    check_rows(logits, target, ref_logits)
    z = target_logits(logits, target, temperature, softcap, target_logit)
    r = None if ref_target_logit is None else target_logits(logits, target, temperature, softcap, ref_target_logit)
    fine = Fine(target, None if target_logit is None else z, r)
    return merge_shards(shard_states(logits, ref_logits, temperature, softcap, fine), z, ref_logits is not None)


def row_dlogits_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    state: RowState,
    c: Coefficients,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As rows_pytorch.row_dlogits_."""
    check_rows(logits, target, ref_logits, out)
    n, v = logits.shape
    block = block_size(v)
    count, size = splits(n, v, block)
    t = number_vector(temperature, n, logits.device)
    ref = logits if ref_logits is None else ref_logits
    states, coefficients = torch.stack(state, 1).float().contiguous(), torch.stack(c, 1).float().contiguous()
    fine = Fine(target, *(None if x is None else target_logits(logits, target, temperature, softcap, x)
                          for x in (target_logit, ref_target_logit)))
    out = logits if out is None else out
    if n:
        with on_device_of(logits):
            gradient_kernel[(n, count)](
                logits, logits.stride(0), ref, ref.stride(0), out, out.stride(0), *fine.arguments(t), states, coefficients, t,
                int(t.numel() > 1), v, size, float(softcap or 0.0), **fine.flags(), HAS_REF=ref_logits is not None,
                SOFTCAP=softcap is not None, BLOCK=block, num_warps=8, maxnreg=128,
            )
    return out


def policy_rows_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    objective: Objective,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None,
    backward: bool,
    ref_target_logit: Tensor | None = None,
    out: Tensor | None = None,
) -> PolicyRows:
    """As rows_pytorch.policy_rows_."""
    check_rows(logits, target, ref_logits, out)
    n, v = logits.shape
    table = objective_table(objective, n, temperature, target_logit, ref_target_logit, logits.device)
    results = torch.empty(n, len(Result), dtype=torch.float32, device=logits.device)
    ref, out = logits if ref_logits is None else ref_logits, logits if out is None else out
    if n:
        with on_device_of(logits):
            policy_kernel[(n,)](
                logits, logits.stride(0), ref, ref.stride(0), out, out.stride(0), target, table, results, v, float(softcap or 0.0),
                KL=kl_index(objective), FLAGS=objective_flags(objective, target_logit, ref_target_logit, backward),
                SOFTCAP=softcap is not None, BLOCK=block_size(v), num_warps=8, maxnreg=128,
            )
    return policy_rows(results.t())
