"""Rows of logits in PyTorch: statistics, gradient, and the policy loss of a row. rows_cpp and rows_triton have the same three functions.

R rows, V vocabulary. z = softcap * tanh(x / softcap) / temperature, p = softmax(z), q = softmax(r). All sums are
centred on the row's maximum, so that a common offset of the logits costs no precision.

Logits of low precision round, and the log-probability of a confident token inherits the whole rounding of its own logit if that
stands in one of its two terms only. So a target's logit that is given in fp32 (`target_logit`, `ref_target_logit`) takes the place of
the rounded one everywhere: in the sums, in the statistics and in the gradient. log p then errs by -sum_{j != y} p_j delta_j, delta
the rounding of the others, which vanishes as p_y -> 1, and is never above 0.
"""

import torch
from torch import Tensor

from fastsched_kernels.reference import Number, Objective, scaled, token_loss
from fastsched_kernels.table import Coefficients, PolicyRows, RowState, derivatives


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
) -> RowState:
    """logits [R, V], target [R], ref_logits [R, V] or None; target_logit, ref_target_logit [R]: the target's entry of either in higher
    precision.
    """
    z = _row(logits, target, target_logit, temperature, softcap)
    top = _safe_top(z)
    z -= top
    e = z.exp()
    s = e.sum(-1)
    live = e > 0
    mean = _mean(e, z, live, s)
    z_target = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    log_sum = s.log()
    logp = torch.where(s == 0, -torch.inf, z_target - log_sum).clamp(max=0.0)
    entropy = torch.where(s == 0, 0.0, log_sum - mean)
    nan = torch.full_like(logp, torch.nan)
    if ref_logits is None:
        return RowState(logp, entropy, nan, top.squeeze(-1), log_sum, mean, nan, nan)
    r = _row(ref_logits, target, ref_target_logit, temperature, softcap)
    ref_top = _safe_top(r)
    r -= ref_top
    gap = _mean(e, z - r, live, s)
    kl = torch.where(s == 0, 0.0, gap - log_sum + r.exp().sum(-1).log())
    return RowState(logp, entropy, kl, top.squeeze(-1), log_sum, mean, gap, ref_top.squeeze(-1))


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
    """dloss/dlogits into `out` [R, V], of the logits' dtype or bf16, or in place of `logits`; `ref_logits` is left as it is.

    dz = c_logp (onehot - p) + c_entropy p (E_p[z] - z) + c_kl p ((z - r) - E_p[z - r]), dx = dz / temperature (1 -
    tanh^2). A row whose KL is infinite gets no gradient from it.
    """
    whole = _row(logits, target, target_logit, temperature, softcap)
    z = whole - state.top.unsqueeze(-1)
    p = torch.where(z == -torch.inf, 0.0, (z - state.log_sum.unsqueeze(-1)).exp())
    live = p > 0
    dz = p * -c.logp.unsqueeze(-1)
    dz += p * c.entropy.unsqueeze(-1) * torch.where(live, state.mean.unsqueeze(-1) - z, 0.0)
    if ref_logits is not None:
        gap, c_kl = state.gap.unsqueeze(-1), c.kl.unsqueeze(-1)
        r = _row(ref_logits, target, ref_target_logit, temperature, softcap) - state.ref_top.unsqueeze(-1)
        dz += p * torch.where(live & ~gap.isinf() & (c_kl != 0), c_kl * ((z - r) - gap), 0.0)
    empty = state.log_sum == -torch.inf
    dz.scatter_add_(-1, target.unsqueeze(-1), torch.where(empty, 0.0, c.logp).unsqueeze(-1).to(dz))
    t = temperature.unsqueeze(-1) if isinstance(temperature, Tensor) and temperature.dim() else temperature
    if softcap is not None:
        dz *= 1 - (whole * t / softcap).square()
    dz /= t
    return (logits if out is None else out).copy_(dz)


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
    """Statistics, loss and, with `backward`, the gradient as `row_dlogits_` leaves it; `ref_logits` are for exact KL only."""
    state = row_stats(logits, target, ref_logits, temperature, softcap, target_logit, ref_target_logit)
    leaves = [v.detach().requires_grad_(backward) for v in (state.logp, state.entropy, state.kl)]
    with torch.set_grad_enabled(backward):
        loss = token_loss(*leaves, objective)
        c = derivatives(loss.loss, leaves)
    if backward:
        row_dlogits_(logits, target, ref_logits, state, c, temperature, softcap, target_logit, ref_target_logit, out)
    size = sum(x.abs() for x in c)
    return PolicyRows(loss.loss.detach(), state.logp, state.entropy, loss.kl, loss.ratio, loss.clipped, size)


def _row(logits: Tensor, target: Tensor, fine: Tensor | None, temperature: Number, softcap: float | None) -> Tensor:
    """[R, V] scaled logits, a tensor of their own; the target's from `fine` where that is given."""
    z = scaled(logits, temperature, softcap)
    if fine is not None:
        z.scatter_(-1, target.unsqueeze(-1), scaled(fine.unsqueeze(-1), temperature, softcap).to(z.dtype))
    return z


def _safe_top(z: Tensor) -> Tensor:
    top = z.amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0.0, top)


def _mean(e: Tensor, values: Tensor, live: Tensor, s: Tensor) -> Tensor:
    total = (e * torch.where(live, values, 0.0)).sum(-1)
    return torch.where(s == 0, 0.0, total / s)
