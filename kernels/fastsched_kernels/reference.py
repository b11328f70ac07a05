"""The specification: every quantity of the policy loss in the shortest PyTorch, differentiated by autograd, any dtype.

fp64 inputs give the truth that the kernels are judged against; nothing here is meant to be fast.
R rows (one token each), V vocabulary, H hidden. z = softcap * tanh(x / softcap) / temperature, p = softmax(z), q =
softmax(r), where r is the reference model's row after the same softcap and temperature.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Number = float | Tensor  # a runtime scalar, or one number for each token [R]
KLKind = Literal["none", "k1", "k2", "k3", "exact"]
KL_KINDS = ("none", "k1", "k2", "k3", "exact")
LOG_LIMIT = 20.0
"""Log-ratios are clamped to +-LOG_LIMIT before `exp`, with the clamp's own gradient (0 outside), so nothing
overflows.
"""


class TokenStats(NamedTuple):
    """One number for each row, nats, fp32 (fp64 for fp64 logits)."""

    logp: Tensor  # [R] log p_target
    entropy: Tensor  # [R] -sum p log p
    kl: Tensor  # [R] KL(p || q), NaN without reference logits
    kl_forward: Tensor  # [R] KL(q || p), NaN without reference logits
    sum_p2: Tensor  # [R] sum of p squared


class Objective(NamedTuple):
    """What the loss needs to know of every token beside its statistics; numbers are runtime scalars or [R] tensors."""

    advantage: Number
    token_weight: Number  # mask / global denominator
    old_logp: Tensor | None = None  # [R]; None: on-policy, the ratio is exactly 1 and still has its gradient
    ref_logp: Tensor | None = None  # [R], for k1, k2, k3 and distill
    kl: KLKind = "none"
    kl_coef: Number = 0.0
    entropy_coef: Number = 0.0
    clip_low: Number = float("inf")  # the ratio is clipped to [1 - clip_low, 1 + clip_high]; inf: no clip
    clip_high: Number = float("inf")
    dual_clip: Number = float("inf")  # for A < 0 the surrogate is at least dual_clip * A; inf: off
    rollout_weight: Number = 1.0
    distill: Number = 0.0  # adds distill * (ref_logp - logp), detached, to the advantage (OPD)
    surrogate: Literal["clip", "cispo"] = "clip"
    sequence: Tensor | None = None  # [R] int64 sequence of each row: sequence-level ratio (GSPO)


class TokenLoss(NamedTuple):
    loss: Tensor  # [R] token_weight included
    ratio: Tensor  # [R] pi / pi_old, detached
    kl: Tensor  # [R] the KL that the loss used, detached; NaN for kl="none"
    clipped: Tensor  # [R] bool, the surrogate has no gradient here (cispo: the ratio sits on a bound)


def scaled(logits: Tensor, temperature: Number = 1.0, softcap: float | None = None) -> Tensor:
    """[R, V] logits of any dtype -> z in fp32 (fp64 stays fp64)."""
    x = logits if logits.dtype == torch.float64 else logits.float()
    if softcap is not None:
        x = softcap * torch.tanh(x / softcap)
    return x / (temperature.unsqueeze(-1).to(x) if isinstance(temperature, Tensor) and temperature.dim() else temperature)


def token_stats(
    logits: Tensor,
    target: Tensor,
    *,
    ref_logits: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: float | None = None,
) -> TokenStats:
    """Statistics of each row, differentiable in `logits`.

    logits [R, V], target [R] int64 in [0, V), ref_logits [R, V]. -inf logits are probability 0 and enter no sum; a row
    of nothing but -inf has logp -inf and zeros elsewhere. q = 0 where p > 0 gives KL +inf by definition.
    """
    z = scaled(logits, temperature, softcap)
    empty = (z == -torch.inf).all(-1, keepdim=True)
    log_p = torch.log_softmax(torch.where(empty, 0.0, z), -1)
    p = torch.where(empty, 0.0, log_p.exp())
    logp = torch.where(empty.squeeze(-1), -torch.inf, log_p.gather(-1, target.unsqueeze(-1)).squeeze(-1))
    entropy = -_expectation(p, log_p)
    nan = torch.full_like(logp, torch.nan)
    if ref_logits is None:
        return TokenStats(logp, entropy, nan, nan, p.square().sum(-1))
    log_q = torch.log_softmax(scaled(ref_logits, temperature, softcap), -1)
    q = log_q.exp()
    return TokenStats(logp, entropy, _expectation(p, log_p - log_q), _expectation(q, log_q - log_p), p.square().sum(-1))


def _expectation(p: Tensor, values: Tensor) -> Tensor:
    return (p * torch.where(p > 0, values, 0.0)).sum(-1)


def kl_estimate(kind: KLKind, logp: Tensor, ref_logp: Tensor) -> Tensor:
    """k1, k2, k3 of KL(pi || ref) on a token sampled from pi [R]; d = log pi - log ref: d, d^2 / 2, exp(-d) - 1 + d."""
    d = logp - ref_logp
    if kind == "k1":
        return d
    if kind == "k2":
        return d.square() / 2
    d = d.clamp(-LOG_LIMIT, LOG_LIMIT)
    return torch.expm1(-d) + d


def log_ratio(logp: Tensor, objective: Objective) -> Tensor:
    """Clamped log(pi / pi_old) [R]; with `sequence`, its mean over the rows of a sequence (GSPO, arXiv 2507.18071)."""
    old = logp.detach() if objective.old_logp is None else objective.old_logp
    value = (logp - old).clamp(-LOG_LIMIT, LOG_LIMIT)
    if objective.sequence is None:
        return value
    index = objective.sequence
    size = int(index.max()) + 1 if index.numel() else 0
    zeros = value.new_zeros(size)
    return (zeros.index_add(0, index, value) / zeros.index_add(0, index, torch.ones_like(value)).clamp(min=1))[index]


def token_loss(logp: Tensor, entropy: Tensor, kl: Tensor, objective: Objective) -> TokenLoss:
    """Loss of each token from its statistics [R], differentiable in logp, entropy and kl.

    token_weight * (-rollout_weight * surrogate + kl_coef * KL - entropy_coef * H), where the surrogate is
    min(r A, clip(r) A), dual-clipped for A < 0 (PPO), or sg(clip(r)) A log pi (CISPO, arXiv 2506.13585).
    `kl` is the exact KL, used by kl="exact" only.
    """
    o = objective
    ratio = log_ratio(logp, o).exp()
    advantage = _number(o.advantage, logp).expand_as(logp)
    if not (isinstance(o.distill, (int, float)) and o.distill == 0):
        advantage = advantage + o.distill * (o.ref_logp - logp).detach()
    low, high = 1 - _number(o.clip_low, ratio), 1 + _number(o.clip_high, ratio)
    if o.surrogate == "cispo":
        clipped = (ratio < low) | (ratio > high)
        surrogate = torch.minimum(torch.maximum(ratio, low), high).detach() * advantage * logp
    else:
        surrogate, clipped = _clipped_surrogate(ratio, advantage, low, high, o.dual_clip)
    if o.kl in ("k1", "k2", "k3"):
        kl = kl_estimate(o.kl, logp, o.ref_logp)
    loss = -o.rollout_weight * surrogate - _times(o.entropy_coef, entropy)
    if o.kl != "none":
        loss = loss + _times(o.kl_coef, kl)
    used = torch.full_like(logp, torch.nan) if o.kl == "none" else kl.detach()
    return TokenLoss(o.token_weight * loss, ratio.detach(), used, clipped)


def _times(coefficient: Number, value: Tensor) -> Tensor:
    """Their product, 0 where the coefficient is 0, whatever the value."""
    return torch.where(_number(coefficient, value) == 0, 0.0, coefficient * value)


def _number(value: Number, like: Tensor) -> Tensor:
    """On the device and in the dtype of `like`; a number of the host is filled in there, which waits for nothing."""
    return value.to(like) if isinstance(value, Tensor) else like.new_full((), value)


def _clipped_surrogate(ratio: Tensor, advantage: Tensor, low: Tensor, high: Tensor, dual_clip: Number):
    above, below = (advantage > 0) & (ratio > high), (advantage < 0) & (ratio < low)
    bound = torch.where(above, high, torch.where(below, low, ratio))
    dual = _number(dual_clip, ratio).expand_as(ratio)
    dual_clipped = (advantage < 0) & (bound > dual)
    return torch.where(dual_clipped, dual, bound) * advantage, above | below | dual_clipped


def policy_loss(
    logits: Tensor,
    target: Tensor,
    objective: Objective,
    *,
    ref_logits: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: float | None = None,
) -> TokenLoss:
    """Truth for the fused loss: every row's loss from its logits [R, V]; `.loss.sum()` is what the kernels return."""
    stats = token_stats(logits, target, ref_logits=ref_logits, temperature=temperature, softcap=softcap)
    if objective.ref_logp is None and ref_logits is not None:
        with torch.no_grad():
            ref = token_stats(ref_logits, target, temperature=temperature, softcap=softcap)
        objective = objective._replace(ref_logp=ref.logp)
    return token_loss(stats.logp, stats.entropy, stats.kl, objective)


def ema_and_drift(avg: list[Tensor], params: list[Tensor], alpha: float) -> tuple[list[Tensor], Tensor, Tensor]:
    """New average alpha * avg + (1 - alpha) * param, sum |param - avg|^2 and sum |avg|^2 after the update, in fp64."""
    new = [alpha * a.double() + (1 - alpha) * p.double() for a, p in zip(avg, params, strict=True)]
    drift = sum((p.double() - a).square().sum() for a, p in zip(new, params, strict=True))
    return new, drift, sum(a.square().sum() for a in new)
