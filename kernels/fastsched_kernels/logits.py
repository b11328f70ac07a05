"""For those who already hold logits [R, V]: the same statistics and the same loss, without the head's GEMMs.

The logits are left as they are; the gradient is a tensor of their own size and dtype.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastsched_kernels.checks import check_target
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import KLKind, Number, Objective, token_loss
from fastsched_kernels.selection import active_rows, gather_objective, gather_rows, scatter_rows
from fastsched_kernels.table import Coefficients, RowState


class LogitStats(NamedTuple):
    """[R] fp32 (fp64 for fp64 logits), nats, differentiable for any upstream gradient."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor  # exact KL(pi || ref); NaN without reference logits
    sum_p2: Tensor | None = None  # sum of squared probabilities; only where asked for


class LogitLoss(NamedTuple):
    """`loss` carries the gradient; the vectors [R] are detached."""

    loss: Tensor  # scalar
    logp: Tensor
    entropy: Tensor
    kl: Tensor
    ratio: Tensor
    clipped: Tensor


def token_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: float | None = None,
    implementation: str | None = None,
    sum_p2: bool = False,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
) -> LogitStats:
    """Log-probability, entropy and exact KL of each row, for any loss in PyTorch on top; with `sum_p2` the sum of squared
    probabilities too, at three more passes over the logits.

    logits [R, V], target [R] int64 in [0, V), ref_logits [R, V] of the same dtype, temperature a scalar or [R]. target_logit and
    ref_target_logit [R] fp32: the target's entry of either in higher precision, for logits that were rounded (a bf16 head): it takes
    the rounded one's place everywhere, and its gradient is that column's. `sum_p2` is of the logits as they are.
    Raises ValueError or IndexError for shapes and targets that do not fit.
    """
    _check_shapes(logits, target, ref_logits)
    target = target.contiguous()
    check_target(target, logits.shape[1])
    rows, fine = choose(logits.device, logits.dtype, implementation), (target_logit, ref_target_logit)
    if any(x is not None and x.shape != target.shape for x in fine):
        raise ValueError(f"target_logit and ref_target_logit must be [{len(target)}]")
    stats = LogitStats(*_TokenStats.apply(logits, target, ref_logits, temperature, softcap, rows, fine))
    return stats._replace(sum_p2=_sum_p2(logits, temperature, softcap, rows)) if sum_p2 else stats


def _check_shapes(logits: Tensor, target: Tensor, ref_logits: Tensor | None) -> None:
    if logits.dim() != 2 or target.shape != logits.shape[:1] or (ref_logits is not None and ref_logits.shape != logits.shape):
        raise ValueError(f"logits [R, V], target [R] and ref_logits [R, V] do not fit: {tuple(logits.shape)}, {tuple(target.shape)}")


def _sum_p2(logits: Tensor, temperature: Number, softcap: float | None, rows) -> Tensor:
    """sum p^2 = exp(2 log p(y) - log p'(y)) for any y, p' at half the temperature: sum exp(2 z) normalises p'. y is the likeliest token."""
    likeliest = logits.detach().argmax(-1)
    logp = _TokenStats.apply(logits, likeliest, None, temperature, softcap, rows, (None, None))[0]
    return (2 * logp - _TokenStats.apply(logits, likeliest, None, temperature / 2, softcap, rows, (None, None))[0]).exp()


def policy_loss_from_logits(
    logits: Tensor, target: Tensor, *, advantage: Number, token_weight: Number, old_logp: Tensor | None = None,
    ref_logits: Tensor | None = None, ref_logp: Tensor | None = None, kl: KLKind = "none", kl_coef: Number = 0.0,
    entropy_coef: Number = 0.0, clip: tuple[Number, Number] = (0.2, 0.2), dual_clip: Number = float("inf"),
    rollout_weight: Number = 1.0, surrogate: Literal["clip", "cispo"] = "clip", temperature: Number = 1.0,
    softcap: float | None = None, implementation: str | None = None, target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
) -> LogitLoss:
    """`linear.policy_loss` from logits: the arguments mean the same, ref_logits [R, V] stand for the reference's head, target_logit and
    ref_target_logit [R] are as in `token_stats`.

    Rows of token_weight 0 get no loss and no gradient, whatever they hold, and are not computed: their vectors are NaN,
    `clipped` False. Every other row is measured. Raises ValueError or IndexError for shapes and targets that do not fit.
    """
    if kl == "exact" and ref_logits is None or kl in ("k1", "k2", "k3") and ref_logits is None and ref_logp is None:
        raise ValueError(f"kl={kl!r} needs ref_logits" + ("" if kl == "exact" else " or ref_logp"))
    _check_shapes(logits, target, ref_logits)
    objective = Objective(advantage, token_weight, old_logp, ref_logp, kl, kl_coef, entropy_coef, *clip, dual_clip, rollout_weight,
                          0.0, surrogate)
    rows = active_rows(objective, len(logits), logits.device, False)
    objective, y, temperature = gather_objective(objective, rows), gather_rows(target, rows), gather_rows(temperature, rows)
    ref = None if ref_logits is None else gather_rows(ref_logits, rows)
    fine, ref_fine = gather_rows(target_logit, rows), gather_rows(ref_target_logit, rows)
    stats = token_stats(gather_rows(logits, rows), y, ref if kl == "exact" else None, temperature, softcap, implementation,
                        target_logit=fine, ref_target_logit=ref_fine if kl == "exact" else None)
    if ref_logp is None and kl in ("k1", "k2", "k3"):
        with torch.no_grad():
            ref_logp = token_stats(ref, y, None, temperature, softcap, implementation, target_logit=ref_fine).logp
            objective = objective._replace(ref_logp=ref_logp)
    out = token_loss(stats.logp, stats.entropy, stats.kl, objective)
    vectors = (stats.logp.detach(), stats.entropy.detach(), out.kl, out.ratio, out.clipped)
    return LogitLoss(out.loss.sum(), *(scatter_rows(v, rows, len(logits)) for v in vectors))


class _TokenStats(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, ref_logits, temperature, softcap, rows, fine):
        fine = tuple(None if x is None else x.detach() for x in fine)
        state = rows.row_stats(logits, target, ref_logits, temperature, softcap, *fine)
        ctx.save_for_backward(logits, target, ref_logits, *fine, *state)
        ctx.scales, ctx.rows = (temperature, softcap), rows
        return state.logp.clone(), state.entropy.clone(), state.kl.clone()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        (logits, target, ref_logits, *fine), state = ctx.saved_tensors[:5], RowState(*ctx.saved_tensors[5:])
        c = Coefficients(*(torch.zeros_like(state.logp) if g is None else g.contiguous() for g in upstream))
        gradient = ctx.rows.row_dlogits_(logits.clone(), target, ref_logits, state, c, *ctx.scales, *fine)
        return gradient, None, None, None, None, None, None
