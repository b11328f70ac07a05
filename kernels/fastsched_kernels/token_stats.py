"""Triton: [R, V] logits -> log-probability, entropy, KL of each row, and the gradient of any of them, in place.

Statistics read the logits once and write six floats for each (row, split); a combine kernel merges the splits. Few
rows are split over V so that the device is full; vocabulary shards of other ranks merge the same way (`shard_states`,
`merge_shards`).
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastsched_kernels.reference import Number
from fastsched_kernels.rows import Coefficients, RowState
from fastsched_kernels.table import number_vector
from fastsched_kernels.triton_row import NEG_INF, finish, merge, row_gradient, row_state, scaled

PARTS = 6
_FULL_DEVICE = 264  # programs; two for each multiprocessor of an H200


def block_size(v: int) -> int:
    """Columns that one program of 8 warps holds at a time; 8192 spills on sm_90 (bench/compile_report.py)."""
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


def check_rows(logits: Tensor, target: Tensor, ref_logits: Optional[Tensor]) -> None:
    """ValueError for a layout that the kernels, which see pointers and row strides, would misread; as in csrc/ops.cpp."""
    if logits.dim() != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits must be [R, V] with contiguous rows, got {tuple(logits.shape)} with strides {logits.stride()}")
    if target.shape != logits.shape[:1] or target.dtype != torch.int64 or not target.is_contiguous() or target.device != logits.device:
        raise ValueError(f"target must be contiguous int64 [{len(logits)}] on {logits.device}, got {target.dtype} {tuple(target.shape)} "
                         f"with strides {target.stride()} on {target.device}")
    if ref_logits is not None and (ref_logits.shape != logits.shape or ref_logits.dtype != logits.dtype or ref_logits.stride(1) != 1
                                   or ref_logits.device != logits.device):
        raise ValueError("ref_logits must have the shape, dtype and device of logits and contiguous rows")


@triton.jit(do_not_specialize=["split_size", "t_stride"], do_not_specialize_on_alignment=["TEMPERATURE"])
def _partial_kernel(X, stride, REF, ref_stride, TEMPERATURE, t_stride, OUT, v, split_size, softcap,
                    HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * split_size // BLOCK * BLOCK
    end = tl.minimum(begin + split_size, v)
    inv_temperature = 1.0 / tl.load(TEMPERATURE + row * t_stride)
    m, s, t, u, m_ref, s_ref = row_state(
        X + row * stride, REF + row * ref_stride, begin, end, inv_temperature, softcap, HAS_REF, SOFTCAP, BLOCK
    )
    out = OUT + (row * tl.num_programs(1) + split) * 6
    tl.store(out, m)
    tl.store(out + 1, s)
    tl.store(out + 2, t)
    tl.store(out + 3, u)
    tl.store(out + 4, m_ref)
    tl.store(out + 5, s_ref)


@triton.jit(do_not_specialize=["count"])
def _combine_kernel(PARTIAL, Z_TARGET, OUT, count):
    row = tl.program_id(0).to(tl.int64)
    m, s, t, u, m_ref, s_ref = NEG_INF, 0.0, 0.0, 0.0, NEG_INF, 0.0
    for i in range(count):
        p = PARTIAL + (row * count + i) * 6
        m, s, t, u, m_ref, s_ref = merge(m, s, t, u, m_ref, s_ref, tl.load(p), tl.load(p + 1), tl.load(p + 2),
                                         tl.load(p + 3), tl.load(p + 4), tl.load(p + 5))
    logp, entropy, kl, top, log_sum, mean, gap, ref_top = finish(m, s, t, u, m_ref, s_ref, tl.load(Z_TARGET + row))
    out = OUT + row * 8
    tl.store(out, logp)
    tl.store(out + 1, entropy)
    tl.store(out + 2, kl)
    tl.store(out + 3, top)
    tl.store(out + 4, log_sum)
    tl.store(out + 5, mean)
    tl.store(out + 6, gap)
    tl.store(out + 7, ref_top)


@triton.jit(do_not_specialize=["t_stride"], do_not_specialize_on_alignment=["TARGET", "FINE", "TEMPERATURE"])
def _target_kernel(X, stride, TARGET, FINE, TEMPERATURE, t_stride, OUT, softcap, HAS_FINE: tl.constexpr, SOFTCAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if HAS_FINE:
        x = tl.load(FINE + row)
    else:
        x = tl.load(X + row * stride + tl.load(TARGET + row))
    tl.store(OUT + row, scaled(x, 1.0 / tl.load(TEMPERATURE + row * t_stride), softcap, SOFTCAP))


@triton.jit(do_not_specialize=["split_size", "t_stride"], do_not_specialize_on_alignment=["TARGET", "TEMPERATURE"])
def _gradient_kernel(X, stride, REF, ref_stride, TARGET, STATE, COEF, TEMPERATURE, t_stride, v, split_size, softcap,
                     HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * split_size // BLOCK * BLOCK
    end = tl.minimum(begin + split_size, v)
    inv_temperature = 1.0 / tl.load(TEMPERATURE + row * t_stride)
    s, c = STATE + row * 8, COEF + row * 3
    row_gradient(X + row * stride, REF + row * ref_stride, begin, end, tl.load(TARGET + row), tl.load(s + 3), tl.load(s + 4),
                 tl.load(s + 5), tl.load(s + 6), tl.load(s + 7), tl.load(c), tl.load(c + 1), tl.load(c + 2), inv_temperature, softcap,
                 HAS_REF, SOFTCAP, BLOCK)


def shard_states(logits: Tensor, ref_logits: Optional[Tensor], temperature: Number, softcap: Optional[float]) -> Tensor:
    """[R, S, 6] partial states of logits [R, V], which may be one rank's shard of the vocabulary."""
    n, v = logits.shape
    block = block_size(v)
    count, size = splits(n, v, block)
    out = torch.empty(n, count, PARTS, dtype=torch.float32, device=logits.device)
    t = number_vector(temperature, n, logits.device)
    ref = logits if ref_logits is None else ref_logits
    if n:
        with on_device_of(logits):
            _partial_kernel[(n, count)](
                logits, logits.stride(0), ref, ref.stride(0), t, int(t.numel() > 1), out, v, size, float(softcap or 0.0),
                HAS_REF=ref_logits is not None, SOFTCAP=softcap is not None, BLOCK=block, num_warps=8,
            )
    return out


def merge_shards(states: Tensor, z_target: Tensor, has_ref: bool) -> RowState:
    """Statistics of whole rows from partial states [R, S, 6], shards side by side in S; z_target [R] scaled logit
    of the target.
    """
    n = states.shape[0]
    out = torch.empty(n, 8, dtype=torch.float32, device=states.device)
    if n:
        with on_device_of(states):
            _combine_kernel[(n,)](states.contiguous(), z_target.contiguous(), out, states.shape[1], num_warps=1)
    state = RowState(*out.unbind(1))
    return state if has_ref else state._replace(kl=torch.full_like(state.kl, torch.nan))


def target_logits(
    logits: Tensor, target: Tensor, temperature: Number, softcap: Optional[float], target_logit: Optional[Tensor] = None
) -> Tensor:
    """[R] scaled logit of the target, from `target_logit` where that is given."""
    n = len(target)
    out = torch.empty(n, dtype=torch.float32, device=logits.device)
    t = number_vector(temperature, n, logits.device)
    fine = out if target_logit is None else target_logit.float().contiguous()
    if n:
        with on_device_of(logits):
            _target_kernel[(n,)](
                logits, logits.stride(0), target, fine, t, int(t.numel() > 1), out, float(softcap or 0.0),
                HAS_FINE=target_logit is not None, SOFTCAP=softcap is not None, num_warps=1,
            )
    return out


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    temperature: Number,
    softcap: Optional[float],
    target_logit: Optional[Tensor] = None,
) -> RowState:
    """As rows.row_stats."""
    check_rows(logits, target, ref_logits)
    z = target_logits(logits, target, temperature, softcap, target_logit)
    return merge_shards(shard_states(logits, ref_logits, temperature, softcap), z, ref_logits is not None)


def row_dlogits_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    state: RowState,
    c: Coefficients,
    temperature: Number,
    softcap: Optional[float],
) -> Tensor:
    """As rows.row_dlogits_."""
    check_rows(logits, target, ref_logits)
    n, v = logits.shape
    block = block_size(v)
    count, size = splits(n, v, block)
    t = number_vector(temperature, n, logits.device)
    ref = logits if ref_logits is None else ref_logits
    states, coefficients = torch.stack(state, 1).float().contiguous(), torch.stack(c, 1).float().contiguous()
    if n:
        with on_device_of(logits):
            _gradient_kernel[(n, count)](
                logits, logits.stride(0), ref, ref.stride(0), target, states, coefficients, t, int(t.numel() > 1), v, size,
                float(softcap or 0.0), HAS_REF=ref_logits is not None, SOFTCAP=softcap is not None, BLOCK=block, num_warps=8,
            )
    return logits
