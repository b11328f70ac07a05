"""Triton kernel: the policy loss of a row and its dlogits in one launch, one program for each row.

First pass: online softmax with centred sums (16 bytes a load). Then, on scalars, the loss and its derivatives by
log-probability, entropy and exact KL; the specification is reference.token_loss. Second pass: dlogits over the logits,
mostly out of L2. Every number comes from the table of `table`, so a scheduled coefficient never compiles anything;
only structure is constexpr. The launch is in rows_triton.
"""

import triton
import triton.language as tl

from fastsched_kernels.reference import LOG_LIMIT
from fastsched_kernels.table import Column, Flag, KLIndex, Result
from fastsched_kernels.triton_row import row_gradient, row_partial, row_statistics, scaled

_LIMIT = tl.constexpr(LOG_LIMIT)
# One name each, not an enumeration: Triton hashes the globals that a kernel uses, and compiles again when one has changed.
COLUMN_ADVANTAGE = tl.constexpr(Column.ADVANTAGE.value)
COLUMN_TOKEN_WEIGHT = tl.constexpr(Column.TOKEN_WEIGHT.value)
COLUMN_OLD_LOGP = tl.constexpr(Column.OLD_LOGP.value)
COLUMN_REF_LOGP = tl.constexpr(Column.REF_LOGP.value)
COLUMN_KL_COEF = tl.constexpr(Column.KL_COEF.value)
COLUMN_ENTROPY_COEF = tl.constexpr(Column.ENTROPY_COEF.value)
COLUMN_CLIP_LOW = tl.constexpr(Column.CLIP_LOW.value)
COLUMN_CLIP_HIGH = tl.constexpr(Column.CLIP_HIGH.value)
COLUMN_DUAL_CLIP = tl.constexpr(Column.DUAL_CLIP.value)
COLUMN_ROLLOUT_WEIGHT = tl.constexpr(Column.ROLLOUT_WEIGHT.value)
COLUMN_DISTILL = tl.constexpr(Column.DISTILL.value)
COLUMN_TEMPERATURE = tl.constexpr(Column.TEMPERATURE.value)
COLUMN_TARGET_LOGIT = tl.constexpr(Column.TARGET_LOGIT.value)
COLUMN_REF_TARGET_LOGIT = tl.constexpr(Column.REF_TARGET_LOGIT.value)
FLAG_ON_POLICY = tl.constexpr(Flag.ON_POLICY.value)
FLAG_CISPO = tl.constexpr(Flag.CISPO.value)
FLAG_HAS_TARGET_LOGIT = tl.constexpr(Flag.HAS_TARGET_LOGIT.value)
FLAG_BACKWARD = tl.constexpr(Flag.BACKWARD.value)
FLAG_HAS_REF_TARGET_LOGIT = tl.constexpr(Flag.HAS_REF_TARGET_LOGIT.value)
KL_NONE = tl.constexpr(KLIndex.NONE.value)
KL_K1 = tl.constexpr(KLIndex.K1.value)
KL_K2 = tl.constexpr(KLIndex.K2.value)
KL_K3 = tl.constexpr(KLIndex.K3.value)
KL_EXACT = tl.constexpr(KLIndex.EXACT.value)
RESULT_LOSS = tl.constexpr(Result.LOSS.value)
RESULT_LOGP = tl.constexpr(Result.LOGP.value)
RESULT_ENTROPY = tl.constexpr(Result.ENTROPY.value)
RESULT_KL = tl.constexpr(Result.KL.value)
RESULT_RATIO = tl.constexpr(Result.RATIO.value)
RESULT_CLIPPED = tl.constexpr(Result.CLIPPED.value)
RESULT_SIZE = tl.constexpr(Result.SIZE.value)
COLUMNS, RESULTS = tl.constexpr(len(Column)), tl.constexpr(len(Result))


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
    if KL == KL_K1:
        return d, d * 0.0 + 1.0
    if KL == KL_K2:
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
    weight, rollout = tl.load(T + COLUMN_TOKEN_WEIGHT), tl.load(T + COLUMN_ROLLOUT_WEIGHT)
    entropy_coef, kl_coef = tl.load(T + COLUMN_ENTROPY_COEF), tl.load(T + COLUMN_KL_COEF)
    raw = logp * 0.0
    if FLAG_ON_POLICY & FLAGS == 0:
        raw = logp - tl.load(T + COLUMN_OLD_LOGP)
    ratio = tl.exp(_clamp(raw))
    distill = tl.load(T + COLUMN_DISTILL)
    to_reference = tl.where(distill == 0, 0.0, distill * (tl.load(T + COLUMN_REF_LOGP) - logp))
    advantage = tl.load(T + COLUMN_ADVANTAGE) + to_reference
    low, high = 1.0 - tl.load(T + COLUMN_CLIP_LOW), 1.0 + tl.load(T + COLUMN_CLIP_HIGH)
    surrogate, d_surrogate, clipped = _surrogate(
        logp, raw, ratio, advantage, low, high, tl.load(T + COLUMN_DUAL_CLIP), FLAG_CISPO & FLAGS != 0
    )
    loss = -rollout * surrogate - _times(entropy_coef, entropy)
    kl, d_kl, c_kl = float("nan"), 0.0, 0.0
    if KL == KL_EXACT:
        kl, c_kl = kl_exact, weight * kl_coef
    elif KL != KL_NONE:
        kl, d_kl = _kl_estimate(logp, tl.load(T + COLUMN_REF_LOGP), KL)
    if KL != KL_NONE:
        loss += _times(kl_coef, kl)
    c_logp = weight * (_times(kl_coef, d_kl) - rollout * d_surrogate)
    return weight * loss, kl, ratio, clipped, c_logp, -weight * entropy_coef, c_kl


@triton.jit(do_not_specialize_on_alignment=["TARGET"])
def policy_kernel(X, stride, REF, ref_stride, DX, dx_stride, TARGET, TABLE, OUT, v, softcap,
                  KL: tl.constexpr, FLAGS: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    X += row * stride
    REF += row * ref_stride
    T = TABLE + row * COLUMNS
    target = tl.load(TARGET + row)
    inv_temperature = 1.0 / tl.load(T + COLUMN_TEMPERATURE)
    FINE: tl.constexpr = FLAG_HAS_TARGET_LOGIT & FLAGS != 0
    REF_FINE: tl.constexpr = FLAG_HAS_REF_TARGET_LOGIT & FLAGS != 0
    if FINE:
        x_target = tl.load(T + COLUMN_TARGET_LOGIT)
    else:
        x_target = tl.load(X + target).to(tl.float32)
    z_target = scaled(x_target, inv_temperature, softcap, SOFTCAP)
    r_target = 0.0
    if REF_FINE:
        r_target = scaled(tl.load(T + COLUMN_REF_TARGET_LOGIT), inv_temperature, softcap, SOFTCAP)
    m, s, t, u, m_ref, s_ref = row_partial(X, REF, 0, v, target, z_target, r_target, inv_temperature, softcap,
                                           FINE, REF_FINE, KL == KL_EXACT, SOFTCAP, BLOCK)
    logp, entropy, kl_exact, top, log_sum, mean, gap, ref_top = row_statistics(m, s, t, u, m_ref, s_ref, z_target)
    loss, kl, ratio, clipped, c_logp, c_entropy, c_kl = _token_loss(T, logp, entropy, kl_exact, KL, FLAGS)
    out = OUT + row * RESULTS
    tl.store(out + RESULT_LOSS, loss)
    tl.store(out + RESULT_LOGP, logp)
    tl.store(out + RESULT_ENTROPY, entropy)
    tl.store(out + RESULT_KL, kl)
    tl.store(out + RESULT_RATIO, ratio)
    tl.store(out + RESULT_CLIPPED, clipped.to(tl.float32))
    tl.store(out + RESULT_SIZE, tl.abs(c_logp) + tl.abs(c_entropy) + tl.abs(c_kl))
    if FLAG_BACKWARD & FLAGS != 0:
        tl.debug_barrier()  # every thread has read the target's logit
        row_gradient(X, REF, DX + row * dx_stride, 0, v, target, z_target, r_target, top, log_sum, mean, gap, ref_top,
                     c_logp, c_entropy, c_kl, inv_temperature, softcap, FINE, REF_FINE, KL == KL_EXACT, SOFTCAP, BLOCK)
