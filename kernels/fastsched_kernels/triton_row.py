"""Device code shared by the Triton kernels: one row of logits, block by block.

A part of a row is summed up in (m, s, t, u, m_ref, s_ref): running maximum m of z, s = sum e, t = sum e (z - m),
u = sum e ((z - m) - (r - m_ref)) with e = exp(z - m), and the same maximum and sum of the reference row. When the
maxima move by dm and dr, t <- a (t + dm s), u <- a (u + (dm - dr) s), s <- a s with a = exp(dm). Maxima ignore NaN; the
sums carry it, so every "is there anything" asks for s != 0, which is true of NaN.

Where FINE, the target's entry of a row is `fine`, scaled, and not what the logits of low precision hold (see rows_pytorch).
"""

import triton
import triton.language as tl

NEG_INF = tl.constexpr(float("-inf"))


@triton.jit
def tanh(x):
    return 1.0 - 2.0 / (tl.exp(2.0 * x) + 1.0)


@triton.jit
def scaled(x, inv_temperature, softcap, SOFTCAP: tl.constexpr):
    z = x.to(tl.float32)
    if SOFTCAP:
        z = softcap * tanh(z / softcap)
    return z * inv_temperature


@triton.jit
def load_block(X, offs, v, target, fine, inv_temperature, softcap, FINE: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    """A block of z; beyond the row it is -inf. Unmasked blocks load 16 bytes at a time for every V."""
    if MASKED:
        z = scaled(tl.load(X + offs, mask=offs < v, other=0.0), inv_temperature, softcap, SOFTCAP)
    else:
        z = scaled(tl.load(X + offs), inv_temperature, softcap, SOFTCAP)
    if FINE:
        z = tl.where(offs == target, fine, z)
    if MASKED:
        z = tl.where(offs < v, z, NEG_INF)
    return z


@triton.jit
def zero_if_empty(m):
    return tl.where(m == NEG_INF, 0.0, m)


@triton.jit
def maximum_change(old, new):
    """old - new of a maximum; 0 from -inf, where every sum is still 0."""
    return tl.where(old == NEG_INF, 0.0, old - zero_if_empty(new))


@triton.jit
def merge_partials(m, s, t, u, m_ref, s_ref, m2, s2, t2, u2, m2_ref, s2_ref):
    """Of two parts: blocks of a row, splits of V, vocabulary shards of other ranks."""
    top, top_ref = tl.maximum(m, m2), tl.maximum(m_ref, m2_ref)
    d1, d2, r1, r2 = maximum_change(m, top), maximum_change(m2, top), maximum_change(m_ref, top_ref), maximum_change(m2_ref, top_ref)
    a1, a2 = tl.where(s != 0, tl.exp(d1), 0.0), tl.where(s2 != 0, tl.exp(d2), 0.0)
    t = tl.where(a1 != 0, a1 * (t + d1 * s), 0.0) + tl.where(a2 != 0, a2 * (t2 + d2 * s2), 0.0)
    u = tl.where(a1 != 0, a1 * (u + (d1 - r1) * s), 0.0) + tl.where(a2 != 0, a2 * (u2 + (d2 - r2) * s2), 0.0)
    s_ref = tl.where(s_ref != 0, tl.exp(r1) * s_ref, 0.0) + tl.where(s2_ref != 0, tl.exp(r2) * s2_ref, 0.0)
    return top, a1 * s + a2 * s2, t, u, top_ref, s_ref


@triton.jit
def block_partial(z, r, HAS_REF: tl.constexpr):
    m = tl.max(z, 0)
    d = z - zero_if_empty(m)
    e = tl.exp(d)
    t = tl.sum(tl.where(e > 0, e * d, 0.0), 0)
    if HAS_REF:
        m_ref = tl.max(r, 0)
        d_ref = r - zero_if_empty(m_ref)
        u = tl.sum(tl.where(e > 0, e * (d - d_ref), 0.0), 0)
        return m, tl.sum(e, 0), t, u, m_ref, tl.sum(tl.exp(d_ref), 0)
    return m, tl.sum(e, 0), t, 0.0, NEG_INF, 0.0


@triton.jit
def add_block(m, s, t, u, m_ref, s_ref, X, REF, offs, v, target, fine, ref_fine, inv_temperature, softcap, FINE: tl.constexpr,
              REF_FINE: tl.constexpr, HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr, MASKED: tl.constexpr):
    z = load_block(X, offs, v, target, fine, inv_temperature, softcap, FINE, SOFTCAP, MASKED)
    r = z
    if HAS_REF:
        r = load_block(REF, offs, v, target, ref_fine, inv_temperature, softcap, REF_FINE, SOFTCAP, MASKED)
    m2, s2, t2, u2, m2_ref, s2_ref = block_partial(z, r, HAS_REF)
    return merge_partials(m, s, t, u, m_ref, s_ref, m2, s2, t2, u2, m2_ref, s2_ref)


@triton.jit
def row_partial(X, REF, begin, end, target, fine, ref_fine, inv_temperature, softcap, FINE: tl.constexpr, REF_FINE: tl.constexpr,
                HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK: tl.constexpr):
    """Partial of columns [begin, end); begin is a multiple of BLOCK. Full blocks unmasked, then one masked
    tail.
    """
    m, s, t, u, m_ref, s_ref = NEG_INF, 0.0, 0.0, 0.0, NEG_INF, 0.0
    full = begin + (end - begin) // BLOCK * BLOCK
    offs = tl.arange(0, BLOCK)
    for start in range(begin, full, BLOCK):
        m, s, t, u, m_ref, s_ref = add_block(
            m, s, t, u, m_ref, s_ref, X, REF, start + offs, end, target, fine, ref_fine, inv_temperature, softcap,
            FINE, REF_FINE, HAS_REF, SOFTCAP, False
        )
    if full < end:
        m, s, t, u, m_ref, s_ref = add_block(
            m, s, t, u, m_ref, s_ref, X, REF, full + offs, end, target, fine, ref_fine, inv_temperature, softcap,
            FINE, REF_FINE, HAS_REF, SOFTCAP, True
        )
    return m, s, t, u, m_ref, s_ref


@triton.jit
def row_statistics(m, s, t, u, m_ref, s_ref, z_target):
    """(logp, entropy, kl, top, log_sum, mean, gap, ref_top) of a row from the partial of all its columns; an empty row is defined."""
    alive = s != 0
    some = tl.where(alive, s, 1.0)
    log_sum = tl.where(alive, tl.log(some), NEG_INF)
    mean, gap = tl.where(alive, t / some, 0.0), tl.where(alive, u / some, 0.0)
    logp = z_target - zero_if_empty(m) - log_sum
    logp = tl.where(alive, tl.where(logp > 0, 0.0, logp), NEG_INF)
    entropy = tl.where(alive, log_sum - mean, 0.0)
    log_sum_ref = tl.where(s_ref != 0, tl.log(tl.where(s_ref != 0, s_ref, 1.0)), NEG_INF)
    kl = tl.where(alive, gap - log_sum + log_sum_ref, 0.0)
    return logp, entropy, kl, zero_if_empty(m), log_sum, mean, gap, zero_if_empty(m_ref)


@triton.jit
def gradient_block(X, REF, OUT, offs, v, target, fine, ref_fine, top, log_sum, mean, gap, ref_top, c_logp, c_entropy, c_kl,
                   inv_temperature, softcap, FINE: tl.constexpr, REF_FINE: tl.constexpr, HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr,
                   MASKED: tl.constexpr):
    """dloss/dlogits of a block into OUT, which may be X."""
    z = load_block(X, offs, v, target, fine, inv_temperature, softcap, FINE, SOFTCAP, MASKED)
    d = z - top
    p = tl.where(log_sum == NEG_INF, 0.0, tl.exp(d - log_sum))
    factor = c_entropy * (mean - d) - c_logp
    if HAS_REF:
        r = load_block(REF, offs, v, target, ref_fine, inv_temperature, softcap, REF_FINE, SOFTCAP, MASKED)
        counts = (c_kl != 0) & (tl.abs(gap) != float("inf"))
        factor += tl.where(counts, c_kl * (d - (r - ref_top) - gap), 0.0)
    dz = tl.where(p != 0, p * factor, 0.0)
    dz += tl.where(offs == target, tl.where(log_sum == NEG_INF, 0.0, c_logp), 0.0)
    dz *= inv_temperature
    if SOFTCAP:
        ratio = z / (inv_temperature * softcap)
        dz *= tl.where(z == NEG_INF, 0.0, 1.0 - ratio * ratio)
    dx = dz.to(OUT.dtype.element_ty)
    if MASKED:
        tl.store(OUT + offs, dx, mask=offs < v)
    else:
        tl.store(OUT + offs, dx)


@triton.jit
def row_gradient(X, REF, OUT, begin, end, target, fine, ref_fine, top, log_sum, mean, gap, ref_top, c_logp, c_entropy, c_kl,
                 inv_temperature, softcap, FINE: tl.constexpr, REF_FINE: tl.constexpr, HAS_REF: tl.constexpr, SOFTCAP: tl.constexpr,
                 BLOCK: tl.constexpr):
    full = begin + (end - begin) // BLOCK * BLOCK
    offs = tl.arange(0, BLOCK)
    for start in range(begin, full, BLOCK):
        gradient_block(X, REF, OUT, start + offs, end, target, fine, ref_fine, top, log_sum, mean, gap, ref_top, c_logp, c_entropy,
                       c_kl, inv_temperature, softcap, FINE, REF_FINE, HAS_REF, SOFTCAP, False)
    if full < end:
        gradient_block(X, REF, OUT, full + offs, end, target, fine, ref_fine, top, log_sum, mean, gap, ref_top, c_logp, c_entropy,
                       c_kl, inv_temperature, softcap, FINE, REF_FINE, HAS_REF, SOFTCAP, True)
