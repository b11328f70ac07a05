"""What is done to rows of logits: statistics in, gradient out, in PyTorch. The compiled implementations have the same
two functions.

R rows, V vocabulary. z = softcap * tanh(x / softcap) / temperature, p = softmax(z), q = softmax(r). All sums are
centred on the row's maximum, so that a common offset of the logits costs no precision.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fastsched_kernels.reference import Number, Objective, scaled, token_loss
from fastsched_kernels.table import PolicyRows


class RowState(NamedTuple):
    """Statistics [R] (fp32; fp64 for fp64 logits) and what the gradient needs of them."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor  # KL(p || q), NaN without reference logits
    top: Tensor  # max z; 0 for a row of nothing but -inf
    log_sum: Tensor  # log sum exp(z - top); -inf for such a row
    mean: Tensor  # E_p[z - top]
    gap: Tensor  # E_p[(z - top) - (r - ref_top)]
    ref_top: Tensor


class Coefficients(NamedTuple):
    """dloss/dlogp, dloss/dentropy, dloss/dkl of each row [R]."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    temperature: Number,
    softcap: Optional[float],
    target_logit: Optional[Tensor] = None,
) -> RowState:
    """logits [R, V], target [R], ref_logits [R, V] or None; target_logit [R]: the target's logit in higher
    precision than `logits`.
    """
    z = scaled(logits, temperature, softcap)
    top = _safe_top(z)
    z -= top
    e = z.exp()
    s = e.sum(-1)
    live = e > 0
    mean = _mean(e, z, live, s)
    if target_logit is None:
        z_target = z.gather(-1, target.unsqueeze(-1)).squeeze(-1)
    else:
        z_target = scaled(target_logit.unsqueeze(-1), temperature, softcap).squeeze(-1) - top.squeeze(-1)
    log_sum = s.log()
    logp = torch.where(s == 0, -torch.inf, z_target - log_sum)
    entropy = torch.where(s == 0, 0.0, log_sum - mean)
    nan = torch.full_like(logp, torch.nan)
    if ref_logits is None:
        return RowState(logp, entropy, nan, top.squeeze(-1), log_sum, mean, nan, nan)
    r = scaled(ref_logits, temperature, softcap)
    ref_top = _safe_top(r)
    r -= ref_top
    gap = _mean(e, z - r, live, s)
    kl = torch.where(s == 0, 0.0, gap - log_sum + r.exp().sum(-1).log())
    return RowState(logp, entropy, kl, top.squeeze(-1), log_sum, mean, gap, ref_top.squeeze(-1))


def row_dlogits_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    state: RowState,
    c: Coefficients,
    temperature: Number,
    softcap: Optional[float],
) -> Tensor:
    """Overwrite `logits` with dloss/dlogits; `ref_logits` is left as it is.

    dz = c_logp (onehot - p) + c_entropy p (E_p[z] - z) + c_kl p ((z - r) - E_p[z - r]), dx = dz / temperature (1 -
    tanh^2). A row whose KL is infinite gets no gradient from it.
    """
    z = scaled(logits, temperature, softcap) - state.top.unsqueeze(-1)
    p = torch.where(z == -torch.inf, 0.0, (z - state.log_sum.unsqueeze(-1)).exp())
    live = p > 0
    dz = p * -c.logp.unsqueeze(-1)
    dz += p * c.entropy.unsqueeze(-1) * torch.where(live, state.mean.unsqueeze(-1) - z, 0.0)
    if ref_logits is not None:
        gap, c_kl = state.gap.unsqueeze(-1), c.kl.unsqueeze(-1)
        r = scaled(ref_logits, temperature, softcap) - state.ref_top.unsqueeze(-1)
        dz += p * torch.where(live & ~gap.isinf() & (c_kl != 0), c_kl * ((z - r) - gap), 0.0)
    empty = state.log_sum == -torch.inf
    dz.scatter_add_(-1, target.unsqueeze(-1), torch.where(empty, 0.0, c.logp).unsqueeze(-1).to(dz))
    if softcap is not None:
        dz *= 1 - torch.tanh(logits.to(dz.dtype) / softcap).square()
    dz /= temperature.unsqueeze(-1) if isinstance(temperature, Tensor) and temperature.dim() else temperature
    return logits.copy_(dz)


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
    """Statistics, loss and, with `backward`, the gradient in place of the logits; `ref_logits` are for exact KL
    only.
    """
    state = row_stats(logits, target, ref_logits, temperature, softcap, target_logit)
    leaves = [v.detach().requires_grad_(backward) for v in (state.logp, state.entropy, state.kl)]
    with torch.set_grad_enabled(backward):
        out = token_loss(*leaves, objective)
        c = derivatives(out.loss, leaves)
    if backward:
        row_dlogits_(logits, target, ref_logits, state, c, temperature, softcap)
    size = sum(x.abs() for x in c)
    return PolicyRows(out.loss.detach(), state.logp, state.entropy, out.kl, out.ratio, out.clipped, size)


def derivatives(loss: Tensor, leaves: list[Tensor]) -> Coefficients:
    """Of a loss [R] whose rows depend on their own logp, entropy and kl only."""
    if not loss.requires_grad:
        return Coefficients(*(torch.zeros_like(v) for v in leaves))
    grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return Coefficients(*(torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)))


def _safe_top(z: Tensor) -> Tensor:
    top = z.amax(-1, keepdim=True)
    return torch.where(top == -torch.inf, 0.0, top)


def _mean(e: Tensor, values: Tensor, live: Tensor, s: Tensor) -> Tensor:
    total = (e * torch.where(live, values, 0.0)).sum(-1)
    return torch.where(s == 0, 0.0, total / s)
