"""The head's GEMMs, chunk by chunk, around whatever is done to the rows of logits between them.

R rows, H hidden, V vocabulary. One buffer holds the logits of the current chunk and then their gradient.
"""

from types import ModuleType
from typing import Callable, NamedTuple

import torch
from torch import Tensor

from fastsched_kernels import compiled_ops
from fastsched_kernels.columns import accumulate_filtered
from fastsched_kernels.reference import Number
from fastsched_kernels.selection import gather_rows
from fastsched_kernels.table import Coefficients, PolicyRows, RowState


class HeadInputs(NamedTuple):
    """All that is not differentiated, for the R rows that are computed."""

    target: Tensor  # [R] int64
    temperature: Number
    softcap: float | None
    chunk: int  # most rows of logits at a time
    rows: ModuleType  # the implementation
    logits: torch.dtype  # in which the products write them: hidden's, or fp32 for hidden states of lower precision
    ref_hidden: Tensor | None = None  # [R, H']
    ref_weight: Tensor | None = None  # [V, H']
    ref_bias: Tensor | None = None  # [V]
    ref_rows: bool = False  # the reference enters row by row (exact KL) ...
    ref_target: bool = False  # ... or through its log-probability of the target
    filter_eps: float = 0.0


class Chunk(NamedTuple):
    """What a step is given; the gradient of `logits` goes to `dlogits`."""

    rows: slice
    logits: Tensor  # [C, V]
    target: Tensor  # [C]
    temperature: Number
    ref_logits: Tensor | None  # [C, V], for exact KL
    ref_logp: Tensor | None  # [C]
    target_logit: Tensor | None  # [C] fp32, where the logits are of lower precision
    ref_target_logit: Tensor | None  # [C] fp32, likewise
    dlogits: Tensor  # [C, V] in hidden's dtype: the place of `logits`, or beside fp32 logits of low-precision hidden states


Step = Callable[[Chunk, bool], PolicyRows]


class OnePass(torch.autograd.Function):
    """Three GEMMs: the gradient is formed in the forward pass, which a scalar loss allows."""

    @staticmethod
    def forward(ctx, hidden, weight, bias, head, step, backward):
        need = [backward and x for x in ctx.needs_input_grad[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = Gradients.of(hidden, weight, bias, need, head)
            parts, dropped = [], []
            for chunk, x, w in chunks(hidden, weight, bias, head):
                out = step(chunk, any(need))
                parts.append(out)
                if any(need):
                    dropped.append(gradients.add(chunk, x, w, out.size, head.filter_eps))
            vectors = [torch.cat(v) for v in zip(*parts, strict=True)] if parts else _no_rows(hidden)
        ctx.gradients = gradients
        share = sum(dropped) / max(len(dropped), 1) + torch.zeros((), device=hidden.device)
        out = (vectors[0].sum(), *vectors[1:6], share)
        ctx.mark_non_differentiable(*out[1:])
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_loss, *_):
        if ctx.gradients is None:
            raise RuntimeError("the gradient of this loss was formed in the forward pass and has been used: compute the loss again")
        gradients, ctx.gradients = ctx.gradients, None
        return *gradients.finish(grad_loss), None, None, None


class Recompute(torch.autograd.Function):
    """Four GEMMs: per-token statistics with a true backward for any upstream gradient; the logits are formed again
    in it.
    """

    @staticmethod
    def forward(ctx, hidden, weight, bias, head):
        with torch.autocast(hidden.device.type, enabled=False):
            states, refs = [], []
            for c, _, _ in chunks(hidden, weight, bias, head):
                states.append(head.rows.row_stats(c.logits, c.target, c.ref_logits, c.temperature, head.softcap, c.target_logit,
                                                  c.ref_target_logit))
                refs.append(torch.full_like(states[-1].logp, torch.nan) if c.ref_logp is None else c.ref_logp)
            state = RowState(*(torch.cat(v) for v in zip(*states, strict=True))) if states else RowState(*_no_rows(hidden, 8))
        ctx.save_for_backward(hidden, weight, bias, *state)
        ctx.head = head
        ref_logp = torch.cat(refs) if refs else torch.empty_like(state.logp)
        ctx.mark_non_differentiable(ref_logp)
        return state.logp.clone(), state.entropy.clone(), state.kl.clone(), ref_logp

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, *upstream):
        (hidden, weight, bias), state, head = ctx.saved_tensors[:3], RowState(*ctx.saved_tensors[3:]), ctx.head
        upstream = [torch.zeros_like(state.logp) if g is None else g.contiguous() for g in upstream[:3]]
        with torch.autocast(hidden.device.type, enabled=False):
            gradients = Gradients.of(hidden, weight, bias, ctx.needs_input_grad[:3], head)
            for c, x, w in chunks(hidden, weight, bias, head._replace(ref_target=False)):
                part, coefficients = RowState(*(v[c.rows] for v in state)), Coefficients(*(g[c.rows] for g in upstream))
                head.rows.row_dlogits_(c.logits, c.target, c.ref_logits, part, coefficients, c.temperature, head.softcap, c.target_logit,
                                       c.ref_target_logit, c.dlogits)
                gradients.add(c, x, w, sum(g.abs() for g in coefficients), head.filter_eps)
        return *gradients.finish(torch.ones((), device=hidden.device)), None


class Gradients(NamedTuple):
    """dX in hidden's dtype, dW and db in fp32 (fp64 for fp64); what is not needed is None.

    A dW that is one product has nothing to accumulate and is in hidden's dtype at once.
    """

    hidden: Tensor | None
    weight: Tensor | None
    bias: Tensor | None
    dtypes: tuple

    @staticmethod
    def of(hidden: Tensor, weight: Tensor, bias: Tensor | None, need, head: HeadInputs) -> "Gradients":
        """Filled by the first chunk; zero where there is none."""
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        new = torch.empty if len(hidden) else torch.zeros
        one_product = len(hidden) <= head.chunk and weight.dtype == hidden.dtype and head.filter_eps == 0
        like = ((hidden, hidden.dtype), (weight, hidden.dtype if one_product else wide), (bias, wide))
        tensors = (new(x.shape, dtype=d, device=x.device) if n else None for (x, d), n in zip(like, need, strict=True))
        return Gradients(*tensors, (hidden.dtype, weight.dtype, None if bias is None else bias.dtype))

    def add(self, chunk: Chunk, x: Tensor, w: Tensor, size: Tensor, filter_eps: float):
        """Add a chunk's dlogits; returns the share of their absolute sum that the column filter left out."""
        dz, first = chunk.dlogits, chunk.rows.start == 0
        dx = None if self.hidden is None else self.hidden[chunk.rows]
        if self.bias is not None:
            db = dz.sum(0, dtype=self.bias.dtype)
            self.bias.copy_(db if first else db.add_(self.bias))
        if filter_eps > 0:
            if first and self.weight is not None:
                self.weight.zero_()
            return accumulate_filtered(dz, x, w, dx, self.weight, filter_eps * size)
        if dx is not None:
            torch.mm(dz, w, out=dx)
        if self.weight is not None:
            add_product_(self.weight, dz, x, first)
        return 0.0

    def finish(self, upstream: Tensor) -> tuple:
        """Times the upstream gradient, in the dtype of the tensor whose gradient it is."""
        unit = upstream.device.type == "cpu" and bool(upstream == 1)
        return tuple(_finished(g, upstream, unit, dtype) for g, dtype in zip(self[:3], self.dtypes, strict=True))


def _finished(gradient: Tensor | None, upstream: Tensor, unit: bool, dtype: torch.dtype | None) -> Tensor | None:
    if gradient is None or unit:
        return gradient if gradient is None else gradient.to(dtype)
    wide = upstream.to(torch.float64 if gradient.dtype == torch.float64 else torch.float32)
    factor = wide.reshape([1] * gradient.dim())  # with dimensions it promotes the product to its own dtype, which is rounded once
    return torch.mul(gradient, factor, out=gradient.new_empty(gradient.shape, dtype=dtype))


def add_product_(total: Tensor, dz: Tensor, x: Tensor, first: bool) -> None:
    """total [V, H] += dz [C, V]^T x [C, H], accumulated in total's dtype; the first product overwrites it."""
    if dz.dtype == total.dtype:
        torch.mm(dz.t(), x, out=total) if first else torch.addmm(total, dz.t(), x, out=total)
    elif dz.is_cuda:
        torch.addmm(total, dz.t(), x, beta=0.0 if first else 1.0, out_dtype=total.dtype, out=total)
    else:
        _add_in_tiles(total, dz, x, first)


def _add_in_tiles(total: Tensor, dz: Tensor, x: Tensor, first: bool) -> None:
    compiled = dz.dtype == torch.bfloat16 and compiled_ops.load() is None
    buffer = x.new_empty(min(_TILE, len(total)), x.shape[1])
    for part, columns in zip(total.split(_TILE), dz.split(_TILE, dim=1), strict=True):
        product = torch.mm(columns.t(), x, out=buffer[: len(part)])
        if compiled:
            torch.ops.fastsched_kernels.add_(part, product, first)
        else:
            part.copy_(product if first else part + product)


_TILE = 8192
"""Vocabulary rows of a low-precision product that a CPU forms before it adds them up in fp32: they stay in cache."""


def chunks(hidden: Tensor, weight: Tensor, bias: Tensor | None, head: HeadInputs):
    """Yields (Chunk, x [C, H], w [V, H] in hidden's dtype); every chunk's logits live in the same buffer."""
    x_all, w, v = hidden.detach(), weight.detach().to(hidden.dtype), weight.shape[0]
    product = Product.of(w, bias, head)
    ref_w = None if head.ref_weight is None else head.ref_weight.detach().to(head.ref_hidden.dtype)
    ref_product = None if ref_w is None else Product.of(ref_w, head.ref_bias, head)
    dz_buffer = None if head.logits == hidden.dtype else _buffer(hidden, head.chunk, v, hidden.dtype)
    for rows in chunk_slices(hidden.shape[0], head.chunk):
        x, target = x_all[rows], head.target[rows]
        temperature = gather_rows(head.temperature, rows)
        ref, ref_fine, ref_logp = None, None, None
        if head.ref_rows or head.ref_target:
            ref_x = head.ref_hidden[rows].detach()
            ref, ref_fine = ref_product(ref_x), target_logit(ref_x, ref_w, head.ref_bias, target, head.logits)
        if head.ref_target:
            ref_logp = head.rows.row_stats(ref, target, None, temperature, head.softcap, ref_fine).logp
        z, fine = product(x), target_logit(x, w, bias, target, head.logits)
        dz = z if dz_buffer is None else dz_buffer[: len(x)]
        if not head.ref_rows:
            ref, ref_fine = None, None
        yield Chunk(rows, z, target, temperature, ref, ref_logp, fine, ref_fine, dz), x, w


def chunk_slices(n: int, size: int) -> list[slice]:
    """[0, n) in even slices of at most `size` rows, as few as there can be if each begins at a multiple of 16 (of 1 where size < 16).

    Triton compiles a kernel once more for a pointer that is no multiple of 16 bytes: [R] tensors must not be cut anywhere.
    """
    if n <= size:
        return [slice(0, n)] if n else []
    unit = 16 if size >= 16 else 1
    units = -(-n // unit)
    count = -(-units // (size // unit))
    bounds = [min(n, unit * (units * i // count)) for i in range(count + 1)]
    return [slice(a, b) for a, b in zip(bounds, bounds[1:], strict=False)]


def target_logit(x: Tensor, w: Tensor, bias: Tensor | None, target: Tensor, logits: torch.dtype) -> Tensor | None:
    """[R] fp32: the target's logit as its own dot product, free of the rounding of low-precision logits; None where they do not round."""
    if logits in (torch.float32, torch.float64):
        return None
    dot = (x.float() * w.index_select(0, target).float()).sum(-1)
    return dot if bias is None else dot + bias.detach().float().index_select(0, target)


class Product(NamedTuple):
    """x [C, H] -> logits [C, V] in a buffer that the next chunk's overwrite."""

    weight: Tensor  # [V, H]
    bias: Tensor | None  # [V] in the dtype of the logits
    buffer: Tensor

    @staticmethod
    def of(weight: Tensor, bias: Tensor | None, head: HeadInputs) -> "Product":
        """CUDA writes fp32 from low-precision factors, whose products it adds up in fp32 anyway; a CPU is given fp32 factors."""
        wide = head.logits if weight.device.type == "cpu" else weight.dtype
        bias = None if bias is None else bias.detach().to(head.logits)
        return Product(weight.to(wide), bias, _buffer(head.target, head.chunk, len(weight), head.logits))

    def __call__(self, x: Tensor) -> Tensor:
        x, out = x.to(self.weight.dtype), self.buffer[: len(x)]
        if out.dtype == x.dtype:
            torch.mm(x, self.weight.t(), out=out)
        else:
            torch.mm(x, self.weight.t(), out_dtype=out.dtype, out=out)
        return out if self.bias is None else out.add_(self.bias)


def _buffer(rows: Tensor, chunk: int, v: int, dtype: torch.dtype) -> Tensor:
    """[C, V], C as many of `rows` as a chunk has at most; on CUDA the row stride is a multiple of 16 elements, so that the kernels load
    16 bytes at a time.
    """
    stride = -(-v // 16) * 16 if rows.is_cuda else v
    return rows.new_empty(min(chunk, len(rows)), stride, dtype=dtype)[:, :v]


def _no_rows(hidden: Tensor, count: int = 7) -> list[Tensor]:
    dtype = torch.float64 if hidden.dtype == torch.float64 else torch.float32
    return [torch.zeros(0, dtype=torch.bool if count == 7 and i == 5 else dtype, device=hidden.device) for i in range(count)]
