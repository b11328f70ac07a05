"""Triton: the policy loss of a row and its dlogits in one launch, one program for each row.

First pass: online softmax with centred sums (16 bytes a load). Then, on scalars, the loss and its derivatives by
log-probability, entropy and exact KL; the specification is reference.token_loss. Second pass: dlogits over the logits,
mostly out of L2. Every number comes from the table of `table`, so a scheduled coefficient never compiles anything;
only structure is constexpr.
"""

from typing import Optional

import torch
import triton
import triton.language as tl
from torch import Tensor

from fastsched_kernels.reference import LOG_LIMIT, Number, Objective
from fastsched_kernels.table import PolicyRows, kl_index, objective_flags, objective_table, policy_rows
from fastsched_kernels.token_stats import block_size, check_rows, on_device_of
from fastsched_kernels.triton_row import finish, row_gradient, row_state, scaled

_LIMIT = tl.constexpr(LOG_LIMIT)
_NONE, _K1, _K2, _EXACT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(4)


@triton.jit
def _clamp(x):
    return tl.clamp(x, -_LIMIT, _LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _times(coefficient, value):
    return tl.where(coefficient == 0, 0.0, coefficient * value)


@triton.jit
def _kl_estimate(logp, ref_logp, KL: tl.constexpr):
    """k1, k2 or k3 and its derivative by logp; k3 near 0 by its series, free of cancellation."""
    d = logp - ref_logp
    if KL == _K1:
        return d, d * 0.0 + 1.0
    if KL == _K2:
        return d * d * 0.5, d
    x = -_clamp(d)
    series = x * x * (0.5 + x * (1.0 / 6 + x * (1.0 / 24 + x * (1.0 / 120 + x * (1.0 / 720)))))
    small = tl.abs(x) < 0.2
    k3 = tl.where(small, series, tl.exp(x) - 1.0 - x)
    slope = tl.where(small, -(x + series), 1.0 - tl.exp(x))
    return k3, tl.where(tl.abs(d) > _LIMIT, 0.0, slope)


@triton.jit
def _surrogate(logp, raw, ratio, advantage, low, high, dual_clip, CISPO: tl.constexpr):
    """(surrogate, its derivative by logp, clipped)."""
    if CISPO:
        d = tl.where(ratio < low, low, tl.where(ratio > high, high, ratio)) * advantage
        return d * logp, d, (ratio < low) | (ratio > high)
    above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    bound = tl.where(above, high, tl.where(below, low, ratio))
    dual = (advantage < 0) & (bound > dual_clip)
    clipped = above | below | dual
    d = tl.where(clipped | (tl.abs(raw) > _LIMIT), 0.0, ratio * advantage)
    return tl.where(dual, dual_clip, bound) * advantage, d, clipped


@triton.jit
def _token_loss(T, logp, entropy, kl_exact, KL: tl.constexpr, FLAGS: tl.constexpr):
    """(loss, kl, ratio, clipped, c_logp, c_entropy, c_kl) of a row from its columns of the table."""
    weight, rollout, entropy_coef, kl_coef = tl.load(T + 1), tl.load(T + 9), tl.load(T + 5), tl.load(T + 4)
    raw = logp * 0.0
    if FLAGS & 1 == 0:
        raw = logp - tl.load(T + 2)
    ratio = tl.exp(_clamp(raw))
    distill = tl.load(T + 10)
    advantage = tl.load(T) + tl.where(distill == 0, 0.0, distill * (tl.load(T + 3) - logp))
    surrogate, d_surrogate, clipped = _surrogate(
        logp, raw, ratio, advantage, 1.0 - tl.load(T + 6), 1.0 + tl.load(T + 7), tl.load(T + 8), FLAGS & 2 != 0
    )
    loss = -rollout * surrogate - _times(entropy_coef, entropy)
    kl, d_kl, c_kl = float("nan"), 0.0, 0.0
    if KL == _EXACT:
        kl, c_kl = kl_exact, weight * kl_coef
    elif KL != _NONE:
        kl, d_kl = _kl_estimate(logp, tl.load(T + 3), KL)
    if KL != _NONE:
        loss += _times(kl_coef, kl)
    c_logp = weight * (_times(kl_coef, d_kl) - rollout * d_surrogate)
    return weight * loss, kl, ratio, clipped, c_logp, -weight * entropy_coef, c_kl


@triton.jit(do_not_specialize_on_alignment=["TARGET"])
def policy_kernel(X, stride, REF, ref_stride, TARGET, TABLE, OUT, v, softcap,
                  KL: tl.constexpr, FLAGS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    REF += row * ref_stride
    T = TABLE + row * 13
    target = tl.load(TARGET + row)
    inv_temperature = 1.0 / tl.load(T + 11)
    if FLAGS & 4 != 0:
        x_target = tl.load(T + 12)
    else:
        x_target = tl.load(X + target).to(tl.float32)
    z_target = scaled(x_target, inv_temperature, softcap, SOFTCAP)
    m, s, t, u, m_ref, s_ref = row_state(X, REF, 0, v, inv_temperature, softcap, KL == _EXACT, SOFTCAP, BLOCK)
    logp, entropy, kl_exact, top, log_sum, mean, gap, ref_top = finish(m, s, t, u, m_ref, s_ref, z_target)
    loss, kl, ratio, clipped, c_logp, c_entropy, c_kl = _token_loss(T, logp, entropy, kl_exact, KL, FLAGS)
    out = OUT + row * 7
    tl.store(out, loss)
    tl.store(out + 1, logp)
    tl.store(out + 2, entropy)
    tl.store(out + 3, kl)
    tl.store(out + 4, ratio)
    tl.store(out + 5, clipped.to(tl.float32))
    tl.store(out + 6, tl.abs(c_logp) + tl.abs(c_entropy) + tl.abs(c_kl))
    if FLAGS & 8 != 0:
        tl.debug_barrier()  # every thread has read the target's logit
        row_gradient(X, REF, 0, v, target, top, log_sum, mean, gap, ref_top, c_logp, c_entropy, c_kl, inv_temperature, softcap,
                     KL == _EXACT, SOFTCAP, BLOCK)


def policy_rows_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    objective: Objective,
    temperature: Number,
    softcap: Optional[float],
    target_logit: Optional[Tensor],
    backward: bool,
) -> PolicyRows:
    """As rows.policy_rows_."""
    check_rows(logits, target, ref_logits)
    n, v = logits.shape
    table = objective_table(objective, n, temperature, target_logit, logits.device)
    out = torch.empty(n, 7, dtype=torch.float32, device=logits.device)
    ref = logits if ref_logits is None else ref_logits
    if n:
        with on_device_of(logits):
            policy_kernel[(n,)](
                logits, logits.stride(0), ref, ref.stride(0), target, table, out, v, float(softcap or 0.0), KL=kl_index(objective),
                FLAGS=objective_flags(objective, target_logit, backward), SOFTCAP=softcap is not None, BLOCK=block_size(v),
                num_warps=8, maxnreg=128,
            )
    return policy_rows(out.t())


INTERPRETED = not isinstance(policy_kernel, triton.JITFunction)
"""Whether these kernels run in Triton's interpreter, on any device."""
