"""Hidden states and head weight in; policy loss and its gradients out, chunk by chunk.

Only three GEMMs: the gradient is formed in the forward pass, since a row's coefficients are known as soon as its own
statistics are. The logits of one chunk at a time exist, in one buffer, which the gradient overwrites. dW accumulates
in fp32. Rows that carry no coefficient leave before the first GEMM.
N rows as passed, R rows computed, H hidden, V vocabulary.
"""

from typing import Callable, Literal, NamedTuple, Optional

import torch
from torch import Tensor

from fastsched_kernels.checks import check_reference, check_shapes, check_target
from fastsched_kernels.reference import KLKind, Number, Objective, TokenLoss, token_loss
from fastsched_kernels.rows import Coefficients, row_dlogits_, row_stats

ChunkLoss = Callable[[Tensor, Tensor, Tensor, Tensor, slice], TokenLoss]  # logp, entropy, kl, ref_logp, rows


class PolicyLoss(NamedTuple):
    """`loss` carries the gradient; the vectors are detached. Rows that were not computed (see `policy_loss`) are
    NaN.
    """

    loss: Tensor  # scalar, sum of token_weight * loss over the rows, fp32
    logp: Tensor  # [N] fp32
    entropy: Tensor  # [N] fp32, nats
    kl: Tensor  # [N] fp32, the KL of kl=...; NaN for kl="none"
    ratio: Tensor  # [N] fp32, pi / pi_old (level="sequence": of the sequence)
    clipped: Tensor  # [N] bool


class LinearStats(NamedTuple):
    logp: Tensor  # [N] fp32
    entropy: Tensor  # [N] fp32, nats
    kl: Tensor  # [N] fp32, exact KL(pi || ref); NaN without a reference
    ref_logp: Tensor  # [N] fp32, log-probability of the target under the reference; NaN without one


class Problem(NamedTuple):
    """All that is not differentiated, for the R rows that are computed."""

    target: Tensor  # [R] int64
    loss: ChunkLoss
    ref_hidden: Optional[Tensor]  # [R, H']
    ref_weight: Optional[Tensor]  # [V, H']
    exact_kl: bool  # the reference enters row by row, not only through its log-probability of the target
    temperature: Number
    softcap: Optional[float]
    chunk: int
    backward: bool


def policy_loss(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    advantage: Number,
    token_weight: Number,
    old_logp: Optional[Tensor] = None,
    ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None,
    ref_logp: Optional[Tensor] = None,
    kl: KLKind = "none",
    kl_coef: Number = 0.0,
    entropy_coef: Number = 0.0,
    clip: Optional[tuple[Number, Number]] = (0.2, 0.2),
    dual_clip: Optional[Number] = None,
    rollout_weight: Number = 1.0,
    distill: Number = 0.0,
    surrogate: Literal["clip", "cispo"] = "clip",
    temperature: Number = 1.0,
    softcap: Optional[float] = None,
    bias: Optional[Tensor] = None,
    level: Literal["token"] = "token",
    skip_flat: bool = True,
    chunk_rows: Optional[int] = None,
    compute: Literal["auto", "forward"] = "auto",
) -> PolicyLoss:
    """Sum over rows of token_weight * (-rollout_weight * surrogate + kl_coef * KL - entropy_coef * H).

    hidden [N, H], weight [V, H], bias [V]: differentiable; logits are formed in hidden's dtype, gradients have the
    dtype of their tensor. target [N] int64. Every `Number` is a runtime scalar or an fp32 tensor [N]. There is no mean
    and no collective: token_weight carries mask and global denominator.
    old_logp [N]: None is on-policy, the ratio is 1 with its gradient. kl: "k1", "k2", "k3" on the sampled token, from
    ref_logp [N] or from ref_hidden [N, H'] and ref_weight [V, H']; "exact" over the vocabulary, which needs the latter
    two. clip: lower and upper distance from 1, None is off.
    Rows of token_weight 0 get no loss and no gradient, whatever they hold (NaN, target -100); with `skip_flat` so do
    rows whose advantage, kl_coef and entropy_coef are all 0, as their loss has no gradient. Neither kind is computed:
    their logp, entropy, kl and ratio are NaN. skip_flat=False measures the second kind all the same.
    chunk_rows: rows of logits formed at a time; 4096 on CUDA, 512 elsewhere by default.
    Raises ValueError for shapes and options that do not fit together, IndexError for a target outside [0, V).
    """
    if level != "token" or compute not in ("auto", "forward"):
        raise ValueError(f"level={level!r}, compute={compute!r}: only level='token' with compute='auto' or 'forward'")
    check_shapes(hidden, weight, target, ref_hidden, ref_weight)
    check_reference(kl, ref_logp, ref_hidden, distill)
    low, high = (float("inf"), float("inf")) if clip is None else clip
    objective = Objective(
        advantage,
        token_weight,
        old_logp,
        ref_logp,
        kl,
        kl_coef,
        entropy_coef,
        low,
        high,
        float("inf") if dual_clip is None else dual_clip,
        rollout_weight,
        distill,
        surrogate,
    )
    rows = _active_rows(objective, hidden, skip_flat)
    kept = Objective(*(_pick(x, rows) for x in objective))
    needs_ref = ref_logp is None and (kl != "none" or not _is_zero(distill)) or kl == "exact"

    def loss(logp: Tensor, entropy: Tensor, kl_exact: Tensor, ref: Tensor, chunk: slice) -> TokenLoss:
        part = Objective(*(_pick(x, chunk) for x in kept))
        return token_loss(logp, entropy, kl_exact, part if part.ref_logp is not None else part._replace(ref_logp=ref))

    problem = Problem(
        _pick(target, rows),
        loss,
        _pick(ref_hidden, rows) if needs_ref else None,
        ref_weight,
        kl == "exact",
        _pick(temperature, rows),
        softcap,
        _chunk_size(chunk_rows, hidden),
        _needs_grad(hidden, weight, bias),
    )
    return _run(hidden, weight, bias, rows, problem)


def _run(
    hidden: Tensor, weight: Tensor, bias: Optional[Tensor], rows: Optional[Tensor], problem: Problem
) -> PolicyLoss:
    kept = hidden if rows is None else hidden.index_select(0, rows)
    check_target(problem.target, weight.shape[0])
    loss, logp, entropy, kl, ratio, clipped = _ChunkedLoss.apply(kept, weight, bias, problem)
    if rows is None:
        return PolicyLoss(loss, logp, entropy, kl, ratio, clipped)
    n = hidden.shape[0]
    logp, entropy, kl, ratio = (_spread(x, rows, n, torch.nan) for x in (logp, entropy, kl, ratio))
    return PolicyLoss(loss, logp, entropy, kl, ratio, _spread(clipped, rows, n, False))


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias, problem):
        need = [problem.backward and x for x in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            out, ctx.gradients = _forward(hidden.detach(), weight.detach(), bias, problem, need)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError(
                "policy_loss: its gradient was formed in the forward pass and has been used; call policy_loss again"
            )
        gradients, ctx.gradients = ctx.gradients, None
        return *(None if g is None else g.mul_(grad_loss.to(g.dtype)).to(dtype) for g, dtype in gradients), None


def _forward(hidden: Tensor, weight: Tensor, bias: Optional[Tensor], problem: Problem, need: list[bool]):
    """Loss, per-row vectors and (gradient, its final dtype) of hidden, weight and bias; gradients that are not
    needed are None.
    """
    w = weight.to(hidden.dtype)
    accumulate = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    dx = torch.zeros_like(hidden) if need[0] else None
    dw = torch.zeros(weight.shape, dtype=accumulate, device=weight.device) if need[1] else None
    db = torch.zeros(weight.shape[0], dtype=accumulate, device=weight.device) if need[2] else None
    buffer, ref_buffer = _buffers(hidden, weight, problem)
    parts = []
    for rows in _chunks(hidden.shape[0], problem.chunk):
        x = hidden[rows]
        z = _logits(x, w, bias, buffer)
        out, state, ref, c = _chunk_loss(x, w, bias, z, problem, rows, ref_buffer)
        parts.append((out.loss.detach(), state.logp, state.entropy, out.kl, out.ratio, out.clipped))
        if any(need):
            dz = row_dlogits_(
                z,
                problem.target[rows],
                ref if problem.exact_kl else None,
                state,
                c,
                _pick(problem.temperature, rows),
                problem.softcap,
            )
            _accumulate(dz, x, w, None if dx is None else dx[rows], dw, db)
    vectors = [torch.cat(v) for v in zip(*parts, strict=True)] if parts else _no_rows(hidden, accumulate)
    gradients = tuple(None if g is None else g for g in (dx, dw, db))
    dtypes = (hidden.dtype, weight.dtype, None if bias is None else bias.dtype)
    return (vectors[0].sum(), *vectors[1:]), tuple(zip(gradients, dtypes, strict=True))


def _chunk_loss(
    x: Tensor, w: Tensor, bias: Optional[Tensor], z: Tensor, problem: Problem, rows: slice, ref_buffer: Optional[Tensor]
):
    """The loss of a chunk on [R] vectors and its derivative by each row's logp, entropy and KL."""
    target, temperature = problem.target[rows], _pick(problem.temperature, rows)
    ref, ref_logp = None, None
    if problem.ref_hidden is not None:
        ref_x, ref_w = problem.ref_hidden[rows], problem.ref_weight.to(problem.ref_hidden.dtype)
        ref = _logits(ref_x, ref_w, None, ref_buffer)
        ref_logp = row_stats(
            ref, target, None, temperature, problem.softcap, _target_logit(ref_x, ref_w, None, target)
        ).logp
    state = row_stats(
        z, target, ref if problem.exact_kl else None, temperature, problem.softcap, _target_logit(x, w, bias, target)
    )
    leaves = [v.detach().requires_grad_(problem.backward) for v in (state.logp, state.entropy, state.kl)]
    with torch.set_grad_enabled(problem.backward):
        out = problem.loss(*leaves, ref_logp, rows)
        return out, state, ref, _derivatives(out.loss, leaves) if problem.backward else None


def _derivatives(loss: Tensor, leaves: list[Tensor]) -> Coefficients:
    if not loss.requires_grad:
        return Coefficients(*(torch.zeros_like(v) for v in leaves))
    grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return Coefficients(*(torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)))


def _accumulate(
    dz: Tensor, x: Tensor, w: Tensor, dx: Optional[Tensor], dw: Optional[Tensor], db: Optional[Tensor]
) -> None:
    if dx is not None:
        torch.mm(dz, w, out=dx)
    if dw is not None:
        if dz.dtype == dw.dtype:
            dw.addmm_(dz.t(), x)
        else:
            dw.add_(torch.mm(dz.t(), x))
    if db is not None:
        db.add_(dz.sum(0, dtype=db.dtype))


def _logits(x: Tensor, w: Tensor, bias: Optional[Tensor], buffer: Tensor) -> Tensor:
    z = torch.mm(x, w.t(), out=buffer[: x.shape[0]])
    return z if bias is None else z.add_(bias.detach().to(z.dtype))


def _target_logit(x: Tensor, w: Tensor, bias: Optional[Tensor], target: Tensor) -> Optional[Tensor]:
    """[R] fp32: the target's logit as its own dot product, free of the rounding of low-precision logits."""
    if x.dtype in (torch.float32, torch.float64):
        return None
    dot = (x.float() * w.index_select(0, target).float()).sum(-1)
    return dot if bias is None else dot + bias.detach().float().index_select(0, target)


def linear_token_stats(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    *,
    ref_hidden: Optional[Tensor] = None,
    ref_weight: Optional[Tensor] = None,
    temperature: Number = 1.0,
    softcap: Optional[float] = None,
    bias: Optional[Tensor] = None,
    chunk_rows: Optional[int] = None,
) -> LinearStats:
    """Log-probability, entropy and exact KL of every row, without gradient: one GEMM (two with a reference).

    hidden [N, H], weight [V, H], target [N] int64 in [0, V); temperature a scalar or [N]. Errors as in `policy_loss`.
    """
    check_shapes(hidden, weight, target, ref_hidden, ref_weight)
    check_target(target, weight.shape[0])
    refs: list[Tensor] = []

    def loss(logp: Tensor, entropy: Tensor, kl: Tensor, ref: Optional[Tensor], rows: slice) -> TokenLoss:
        refs.append(torch.full_like(logp, torch.nan) if ref is None else ref)
        return TokenLoss(torch.zeros_like(logp), torch.ones_like(logp), kl, torch.zeros_like(logp, dtype=torch.bool))

    problem = Problem(
        target,
        loss,
        ref_hidden,
        ref_weight,
        ref_hidden is not None,
        temperature,
        softcap,
        _chunk_size(chunk_rows, hidden),
        False,
    )
    with torch.no_grad():
        out = _run(hidden, weight, bias, None, problem)
    return LinearStats(out.logp, out.entropy, out.kl, torch.cat(refs) if refs else torch.empty_like(out.logp))


def _active_rows(o: Objective, hidden: Tensor, skip_flat: bool) -> Optional[Tensor]:
    """Indices of the rows that carry a coefficient, ascending; None: all of them."""
    n, numbers = hidden.shape[0], (o.token_weight, o.advantage, o.kl_coef, o.entropy_coef, o.distill)
    weighted, *others = (torch.as_tensor(x, device=hidden.device).expand(n) != 0 for x in numbers)
    if skip_flat:
        weighted = weighted & (others[0] | others[1] & (o.kl != "none") | others[2] | others[3])
    rows = weighted.nonzero().squeeze(-1)
    return None if rows.numel() == n else rows


def _pick(value, index):
    """Rows of a per-token tensor; scalars, scalar tensors, options and None pass through."""
    if not isinstance(value, Tensor) or value.dim() == 0 or index is None:
        return value
    return value[index]


def _spread(value: Tensor, rows: Tensor, n: int, fill: float) -> Tensor:
    return torch.full((n,), fill, dtype=value.dtype, device=value.device).index_copy_(0, rows, value)


def _chunks(n: int, size: int) -> list[slice]:
    count = -(-n // size)
    bounds = [n * i // count for i in range(count + 1)] if count else [0]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def _chunk_size(chunk_rows: Optional[int], hidden: Tensor) -> int:
    if chunk_rows is not None and chunk_rows < 1:
        raise ValueError(f"chunk_rows must be at least 1, got {chunk_rows}")
    return chunk_rows or (4096 if hidden.is_cuda else 512)


def _buffers(hidden: Tensor, weight: Tensor, problem: Problem) -> tuple[Tensor, Optional[Tensor]]:
    shape = (min(problem.chunk, hidden.shape[0]), weight.shape[0])
    ref = problem.ref_hidden
    return hidden.new_empty(shape), None if ref is None else ref.new_empty(shape)


def _no_rows(hidden: Tensor, dtype: torch.dtype) -> list[Tensor]:
    return [torch.zeros(0, dtype=dtype, device=hidden.device) for _ in range(5)] + [
        torch.zeros(0, dtype=torch.bool, device=hidden.device)
    ]


def _needs_grad(*tensors: Optional[Tensor]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def _is_zero(value: Number) -> bool:
    return not isinstance(value, Tensor) and value == 0
