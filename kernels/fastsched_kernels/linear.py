"""Hidden states and head weight in; policy loss and its gradients out, chunk by chunk.

Three GEMMs: the gradient is formed in the forward pass, since a row's coefficients are known as soon as its own
statistics are. The logits of one chunk at a time exist, in one buffer, which the gradient overwrites. dW accumulates
in fp32. Rows that carry no coefficient leave before the first GEMM. N rows as passed, R rows computed, H hidden, V
vocabulary.
"""

from typing import Callable, Literal, Mapping, NamedTuple

import torch
from torch import Tensor

from fastsched_kernels.checks import check_level, check_reference, check_shapes, check_target, is_zero
from fastsched_kernels.chunks import Chunk, HeadInputs, OnePass, Recompute
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import KLKind, Number, Objective, TokenLoss, token_loss
from fastsched_kernels.selection import active_rows, gather_objective, gather_rows, scatter_rows
from fastsched_kernels.table import PolicyRows, derivatives

TokenLossFunction = Callable[[Tensor, Tensor, Tensor, Mapping[str, Tensor]], Tensor]


class PolicyLoss(NamedTuple):
    """`loss` carries the gradient; the rest is detached. Rows that were not computed (see `policy_loss`) are NaN."""

    loss: Tensor  # scalar, sum of token_weight * loss over the rows, fp32
    logp: Tensor  # [N] fp32
    entropy: Tensor  # [N] fp32, nats
    kl: Tensor  # [N] fp32, the KL of kl=...; NaN for kl="none"
    ratio: Tensor  # [N] fp32, pi / pi_old (level="sequence": of the sequence)
    clipped: Tensor  # [N] bool
    dropped: Tensor  # scalar, share of sum |dlogits| that filter_eps left out; NaN where backward forms the logits again


class LinearStats(NamedTuple):
    """All fp32; logp, entropy and kl are differentiable."""

    logp: Tensor  # [N]
    entropy: Tensor  # [N] nats
    kl: Tensor  # [N] exact KL(pi || ref); NaN without a reference
    ref_logp: Tensor  # [N] log-probability of the target under the reference; NaN without one


def policy_loss(
    hidden: Tensor, weight: Tensor, target: Tensor, *, advantage: Number, token_weight: Number, old_logp: Tensor | None = None,
    ref_hidden: Tensor | None = None, ref_weight: Tensor | None = None, ref_bias: Tensor | None = None,
    ref_logp: Tensor | None = None, kl: KLKind = "none", kl_coef: Number = 0.0, entropy_coef: Number = 0.0,
    clip: tuple[Number, Number] | None = (0.2, 0.2), dual_clip: Number | None = None, rollout_weight: Number = 1.0,
    distill: Number = 0.0, surrogate: Literal["clip", "cispo"] = "clip", temperature: Number = 1.0, softcap: float | None = None,
    bias: Tensor | None = None, level: Literal["token", "sequence"] = "token", sequence: Tensor | None = None,
    skip_flat: bool = True, chunk_rows: int | None = None, compute: Literal["auto", "forward", "recompute"] = "auto",
    filter_eps: float = 0.0, implementation: str | None = None, logits_dtype: torch.dtype | None = None,
) -> PolicyLoss:
    """Sum over rows of token_weight * (-rollout_weight * surrogate + kl_coef * KL - entropy_coef * H).

    hidden [N, H], weight [V, H], bias [V]: differentiable; products are formed in hidden's dtype, gradients have the
    dtype of their tensor. logits_dtype: hidden's or, for hidden states of low precision, fp32; by default fp32 on CUDA,
    where the products write it at no price, and hidden's on a CPU, where it takes fp32 factors. Logits that round have
    their target's in fp32 all the same. target [N] int64. Every `Number` is a runtime scalar or an fp32 tensor [N]. There is no mean
    and no collective: token_weight carries mask and global denominator.
    old_logp [N]: None is on-policy, the ratio is 1 with its gradient. kl: "k1", "k2", "k3" on the sampled token, from
    ref_logp [N] or from ref_hidden [N, H'] and ref_weight [V, H'] (and ref_bias [V]); "exact" over the vocabulary, which needs the
    hidden states. clip: lower and upper distance from 1, None is off. distill adds distill * (ref_logp - logp), detached, to the
    advantage. level="sequence" takes the ratio of whole sequences (GSPO) from `sequence` [N] int64, over their rows of
    weight > 0. Rows of token_weight 0 get no loss and no gradient, whatever they hold (NaN, target -100); with
    `skip_flat` so do rows whose advantage, kl_coef and entropy_coef are all 0, as their loss has no gradient. Neither
    kind is computed: their logp, entropy, kl and ratio are NaN. skip_flat=False measures the second kind all the same.
    chunk_rows: rows of logits formed at a time; 4096 by default, on the CPU at most 128 MiB of logits. compute:
    "forward" forms the gradient in the forward pass (three GEMMs, one backward only), "recompute" forms the logits
    again in backward (four, any upstream), "auto" takes the first unless level="sequence". filter_eps: see `columns`.
    implementation: None chooses by device and dtype. Raises ValueError for shapes and options that do not fit
    together, IndexError for a target outside [0, V), NotImplementedError for an implementation that cannot run.
    """
    check_shapes(hidden, weight, target, ref_hidden, ref_weight)
    check_reference(kl, ref_logp, ref_hidden, distill)
    check_level(level, sequence, compute)
    low, high = (float("inf"), float("inf")) if clip is None else clip
    objective = Objective(
        advantage, token_weight, old_logp, ref_logp, kl, kl_coef, entropy_coef, low, high,
        float("inf") if dual_clip is None else dual_clip, rollout_weight, distill, surrogate, sequence if level == "sequence" else None,
    )
    rows = active_rows(objective, len(hidden), hidden.device, skip_flat and level == "token")
    objective = gather_objective(objective, rows)
    needs_logp = ref_logp is None and (kl in ("k1", "k2", "k3") or not is_zero(distill))
    head = _head(hidden, weight, target, rows, temperature, softcap, chunk_rows, filter_eps, implementation, logits_dtype)
    head = head._replace(ref_hidden=gather_rows(ref_hidden, rows), ref_weight=ref_weight, ref_bias=ref_bias, ref_rows=kl == "exact",
                         ref_target=needs_logp)
    computed = gather_rows(hidden, rows)
    if compute == "recompute" or level == "sequence":
        values = _recomputed(computed, weight, bias, head, objective)
    else:
        values = OnePass.apply(computed, weight, bias, head, _policy_step(head, objective), torch.is_grad_enabled())
    loss, *vectors, dropped = values
    return PolicyLoss(loss, *(scatter_rows(v, rows, hidden.shape[0]) for v in vectors), dropped)


def _policy_step(head: HeadInputs, objective: Objective):
    def step(c: Chunk, backward: bool) -> PolicyRows:
        o = gather_objective(objective, c.rows)
        o = o if c.ref_logp is None else o._replace(ref_logp=c.ref_logp)
        return head.rows.policy_rows_(c.logits, c.target, c.ref_logits, o, c.temperature, head.softcap, c.target_logit, backward,
                                      c.ref_target_logit, c.dlogits)

    return step


def _recomputed(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadInputs, objective: Objective) -> tuple:
    logp, entropy, kl, ref_logp = Recompute.apply(hidden, weight, bias, head)
    out: TokenLoss = token_loss(logp, entropy, kl, objective._replace(ref_logp=ref_logp) if head.ref_target else objective)
    dropped = torch.full((), torch.nan if head.filter_eps else 0.0, device=hidden.device)
    return out.loss.sum(), logp.detach(), entropy.detach(), out.kl, out.ratio, out.clipped, dropped


class TokenLossResult(NamedTuple):
    """`loss` carries the gradient; the vectors are detached and NaN where `keep` is False."""

    loss: Tensor  # scalar
    logp: Tensor  # [N] fp32
    entropy: Tensor  # [N] fp32
    kl: Tensor  # [N] fp32, exact KL(pi || ref); NaN without a reference


def linear_token_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    loss: TokenLossFunction,
    *,
    tokens: Mapping[str, Tensor] | None = None,
    keep: Tensor | None = None,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk_rows: int | None = None,
    filter_eps: float = 0.0,
    implementation: str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> TokenLossResult:
    """Any per-token loss at the cost of the built-in one: three GEMMs.

    `loss(logp, entropy, kl, tokens) -> [C]` is PyTorch on the vectors of a chunk; row i of the result may depend on
    row i of its arguments only. kl is the exact KL to the reference, NaN without one. `tokens` are [N] tensors, handed
    over row by row; `keep` [N] bool leaves rows out before the first GEMM. The rest is as in `policy_loss`. For
    example, REINFORCE with a squared-KL leash:

        def loss(logp, entropy, kl, tokens):
            return tokens["weight"] * (-tokens["advantage"] * logp + 0.1 * kl.square() - 0.01 * entropy)

        linear_token_loss(hidden, weight, target, loss, tokens={"weight": w, "advantage": a},
                          ref_hidden=r, ref_weight=rw).loss.backward()
    """
    check_shapes(hidden, weight, target, ref_hidden, ref_weight)
    rows = None if keep is None or bool(keep.all()) else keep.nonzero().squeeze(-1)
    head = _head(hidden, weight, target, rows, temperature, softcap, chunk_rows, filter_eps, implementation, logits_dtype)
    head = head._replace(ref_hidden=gather_rows(ref_hidden, rows), ref_weight=ref_weight, ref_bias=ref_bias,
                         ref_rows=ref_hidden is not None)
    tokens = {k: gather_rows(v, rows) for k, v in (tokens or {}).items()}

    def step(c: Chunk, backward: bool) -> PolicyRows:
        state = head.rows.row_stats(c.logits, c.target, c.ref_logits, c.temperature, head.softcap, c.target_logit, c.ref_target_logit)
        leaves = [v.detach().requires_grad_(backward) for v in (state.logp, state.entropy, state.kl)]
        with torch.set_grad_enabled(backward):
            value = loss(*leaves, {k: gather_rows(v, c.rows) for k, v in tokens.items()})
            if value.shape != state.logp.shape:
                raise ValueError(f"the loss must return one number for each row, [{len(state.logp)}], got {tuple(value.shape)}")
            d = derivatives(value, leaves)
        if backward:
            head.rows.row_dlogits_(c.logits, c.target, c.ref_logits, state, d, c.temperature, head.softcap, c.target_logit,
                                   c.ref_target_logit, c.dlogits)
        zeros = torch.zeros_like(state.logp)
        return PolicyRows(value.detach(), state.logp, state.entropy, state.kl, zeros, zeros.bool(), sum(x.abs() for x in d))

    total, *vectors = OnePass.apply(gather_rows(hidden, rows), weight, bias, head, step, torch.is_grad_enabled())[:4]
    return TokenLossResult(total, *(scatter_rows(v, rows, hidden.shape[0]) for v in vectors))


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ref_hidden: Tensor | None = None,
    ref_weight: Tensor | None = None,
    ref_bias: Tensor | None = None,
    temperature: Number = 1.0,
    softcap: float | None = None,
    bias: Tensor | None = None,
    chunk_rows: int | None = None,
    filter_eps: float = 0.0,
    implementation: str | None = None,
    logits_dtype: torch.dtype | None = None,
) -> LinearStats:
    """Log-probability, entropy and exact KL of every row: one GEMM (two with a reference), three more in backward.

    hidden [N, H], weight [V, H], target [N] int64 in [0, V); temperature a scalar or [N]. Differentiable in hidden,
    weight and bias for any upstream gradient (the logits are formed again), so that coefficients may depend on other
    tokens. filter_eps acts in backward. Errors as in `policy_loss`.
    """
    check_shapes(hidden, weight, target, ref_hidden, ref_weight)
    head = _head(hidden, weight, target, None, temperature, softcap, chunk_rows, filter_eps, implementation, logits_dtype)
    with_ref = ref_hidden is not None
    head = head._replace(ref_hidden=ref_hidden, ref_weight=ref_weight, ref_bias=ref_bias, ref_rows=with_ref, ref_target=with_ref)
    return LinearStats(*Recompute.apply(hidden, weight, bias, head))


def _head(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    rows: Tensor | None,
    temperature: Number,
    softcap: float | None,
    chunk_rows: int | None,
    filter_eps: float,
    implementation: str | None,
    logits_dtype: torch.dtype | None,
) -> HeadInputs:
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    if not 0 <= filter_eps < 1:
        raise ValueError(f"filter_eps must lie in [0, 1), got {filter_eps}")
    target = gather_rows(target, rows).contiguous()
    check_target(target, weight.shape[0])
    logits = _logits_dtype(hidden, logits_dtype)
    chunk = chunk_rows or _default_chunk(hidden, weight.shape[0], logits)
    kernels = choose(hidden.device, hidden.dtype, implementation)
    return HeadInputs(target, gather_rows(temperature, rows), softcap, chunk, kernels, logits, filter_eps=filter_eps)


def _logits_dtype(hidden: Tensor, asked: torch.dtype | None) -> torch.dtype:
    low = hidden.dtype in (torch.bfloat16, torch.float16)
    if asked not in (None, hidden.dtype, torch.float32 if low else None):
        raise ValueError(f"logits_dtype must be that of the hidden states, {hidden.dtype}{', or torch.float32' * low}, got {asked}")
    return asked or (torch.float32 if low and hidden.is_cuda else hidden.dtype)


def _default_chunk(hidden: Tensor, vocabulary: int, logits: torch.dtype) -> int:
    """4096 rows, on the CPU no more than 128 MiB of logits."""
    return 4096 if hidden.is_cuda else min(4096, max(64, 2**27 // (vocabulary * logits.itemsize)))
