"""Triton kernels: the statistics of a row from its logits, and the gradient of any of them, in place.

Statistics read the logits once and write a partial for each (row, split), see triton_row; a combine kernel merges the
splits. The launches are in rows_triton.
"""

from enum import IntEnum

import triton
import triton.language as tl

from fastsched_kernels.table import Coefficient, State
from fastsched_kernels.triton_row import NEG_INF, merge_partials, row_gradient, row_partial, row_statistics, scaled


class Partial(IntEnum):
    """What partial_kernel writes of a part of a row; the names are triton_row's."""

    M = 0
    S = 1
    T = 2
    U = 3
    M_REF = 4
    S_REF = 5


# One name each, not an enumeration: Triton hashes the globals that a kernel uses, and compiles again when one has changed.
PARTIAL_M = tl.constexpr(Partial.M.value)
PARTIAL_S = tl.constexpr(Partial.S.value)
PARTIAL_T = tl.constexpr(Partial.T.value)
PARTIAL_U = tl.constexpr(Partial.U.value)
PARTIAL_M_REF = tl.constexpr(Partial.M_REF.value)
PARTIAL_S_REF = tl.constexpr(Partial.S_REF.value)
STATE_LOGP = tl.constexpr(State.LOGP.value)
STATE_ENTROPY = tl.constexpr(State.ENTROPY.value)
STATE_KL = tl.constexpr(State.KL.value)
STATE_TOP = tl.constexpr(State.TOP.value)
STATE_LOG_SUM = tl.constexpr(State.LOG_SUM.value)
STATE_MEAN = tl.constexpr(State.MEAN.value)
STATE_GAP = tl.constexpr(State.GAP.value)
STATE_REF_TOP = tl.constexpr(State.REF_TOP.value)
COEFFICIENT_LOGP = tl.constexpr(Coefficient.LOGP.value)
COEFFICIENT_ENTROPY = tl.constexpr(Coefficient.ENTROPY.value)
COEFFICIENT_KL = tl.constexpr(Coefficient.KL.value)
PARTIALS, STATES, COEFFICIENTS = tl.constexpr(len(Partial)), tl.constexpr(len(State)), tl.constexpr(len(Coefficient))


@triton.jit
def fine_target(TARGET, Z_TARGET, R_TARGET, row, FINE: tl.constexpr, REF_FINE: tl.constexpr):
    """(target, its scaled logit in fp32, the reference's) of a row; what the flags leave out is never read."""
    target, fine, ref_fine = row * 0 - 1, 0.0, 0.0
    if FINE or REF_FINE:
        target = tl.load(TARGET + row)
    if FINE:
        fine = tl.load(Z_TARGET + row)
    if REF_FINE:
        ref_fine = tl.load(R_TARGET + row)
    return target, fine, ref_fine


@triton.jit(do_not_specialize=["split_size", "t_stride"],
            do_not_specialize_on_alignment=["TARGET", "Z_TARGET", "R_TARGET", "TEMPERATURE"])
def partial_kernel(X, stride, REF, ref_stride, TARGET, Z_TARGET, R_TARGET, TEMPERATURE, t_stride, OUT, v, split_size, softcap,
                   FINE: tl.constexpr, REF_FINE: tl.constexpr, HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    row, split = tl.program_id(0).to(tl.int64), tl.program_id(1)
    begin = split * split_size // BLOCK * BLOCK
    end = tl.minimum(begin + split_size, v)
    inv_temperature = 1.0 / tl.load(TEMPERATURE + row * t_stride)
    target, fine, ref_fine = fine_target(TARGET, Z_TARGET, R_TARGET, row, FINE, REF_FINE)
    m, s, t, u, m_ref, s_ref = row_partial(
        X + row * stride, REF + row * ref_stride, begin, end, target, fine, ref_fine, inv_temperature, softcap,
        FINE, REF_FINE, HAS_REF, SOFTCAP, BLOCK
    )
    out = OUT + (row * tl.num_programs(1) + split) * PARTIALS
    tl.store(out + PARTIAL_M, m)
    tl.store(out + PARTIAL_S, s)
    tl.store(out + PARTIAL_T, t)
    tl.store(out + PARTIAL_U, u)
    tl.store(out + PARTIAL_M_REF, m_ref)
    tl.store(out + PARTIAL_S_REF, s_ref)


@triton.jit(do_not_specialize=["count"])
def combine_kernel(PARTIAL, Z_TARGET, OUT, count):
    row = tl.program_id(0).to(tl.int64)
    m, s, t, u, m_ref, s_ref = NEG_INF, 0.0, 0.0, 0.0, NEG_INF, 0.0
    for i in range(count):
        p = PARTIAL + (row * count + i) * PARTIALS
        m, s, t, u, m_ref, s_ref = merge_partials(
            m, s, t, u, m_ref, s_ref, tl.load(p + PARTIAL_M), tl.load(p + PARTIAL_S), tl.load(p + PARTIAL_T), tl.load(p + PARTIAL_U),
            tl.load(p + PARTIAL_M_REF), tl.load(p + PARTIAL_S_REF),
        )
    logp, entropy, kl, top, log_sum, mean, gap, ref_top = row_statistics(m, s, t, u, m_ref, s_ref, tl.load(Z_TARGET + row))
    out = OUT + row * STATES
    tl.store(out + STATE_LOGP, logp)
    tl.store(out + STATE_ENTROPY, entropy)
    tl.store(out + STATE_KL, kl)
    tl.store(out + STATE_TOP, top)
    tl.store(out + STATE_LOG_SUM, log_sum)
    tl.store(out + STATE_MEAN, mean)
    tl.store(out + STATE_GAP, gap)
    tl.store(out + STATE_REF_TOP, ref_top)


@triton.jit(do_not_specialize=["t_stride"], do_not_specialize_on_alignment=["TARGET", "TARGET_LOGIT", "TEMPERATURE"])
def target_kernel(X, stride, TARGET, TARGET_LOGIT, TEMPERATURE, t_stride, OUT, softcap,
                  HAS_TARGET_LOGIT: tl.constexpr, SOFTCAP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if HAS_TARGET_LOGIT:
        x = tl.load(TARGET_LOGIT + row)
    else:
        x = tl.load(X + row * stride + tl.load(TARGET + row))
    tl.store(OUT + row, scaled(x, 1.0 / tl.load(TEMPERATURE + row * t_stride), softcap, SOFTCAP))


@triton.jit(do_not_specialize=["split_size", "t_stride"],
            do_not_specialize_on_alignment=["TARGET", "Z_TARGET", "R_TARGET", "TEMPERATURE"])
def gradient_kernel(X, stride, REF, ref_stride, OUT, out_stride, TARGET, Z_TARGET, R_TARGET, STATE, COEF, TEMPERATURE, t_stride, v,
                    split_size, softcap, FINE: tl.constexpr, REF_FINE: tl.constexpr, HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr,
                    BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    begin = tl.program_id(1) * split_size // BLOCK * BLOCK
    end = tl.minimum(begin + split_size, v)
    inv_temperature = 1.0 / tl.load(TEMPERATURE + row * t_stride)
    s, c = STATE + row * STATES, COEF + row * COEFFICIENTS
    top, log_sum, mean = tl.load(s + STATE_TOP), tl.load(s + STATE_LOG_SUM), tl.load(s + STATE_MEAN)
    gap, ref_top = tl.load(s + STATE_GAP), tl.load(s + STATE_REF_TOP)
    c_logp, c_entropy, c_kl = tl.load(c + COEFFICIENT_LOGP), tl.load(c + COEFFICIENT_ENTROPY), tl.load(c + COEFFICIENT_KL)
    _, fine, ref_fine = fine_target(TARGET, Z_TARGET, R_TARGET, row, FINE, REF_FINE)
    row_gradient(X + row * stride, REF + row * ref_stride, OUT + row * out_stride, begin, end, tl.load(TARGET + row), fine, ref_fine,
                 top, log_sum, mean, gap, ref_top, c_logp, c_entropy, c_kl, inv_temperature, softcap,
                 FINE, REF_FINE, HAS_REF, SOFTCAP, BLOCK)
