"""Rows as trained policies have them, from hidden states: what is left of the rounding of bf16 logits in log p and in the gradient.

The truth is fp64 on the same bf16 hidden states and weights. Beside it: PyTorch's log_softmax in fp32 of the bf16 product.
"""

import torch
from fastsched_kernels import linear, reference
from fastsched_kernels.reference import Objective
from fastsched_kernels.testing import peaked_head, relative_error
from torch import Tensor

from bench.device.rows import DEVICE, SMALL, row

N, H, V, CHUNK = (8, 64, 1000, 5) if SMALL else (256, 256, 151936, 128)
LIKELIEST, PLACES = (0.5, 0.9, 0.99, 0.9999), ("argmax", "second")
ROUNDING = 2.0**-8
"""Of bf16, relative; the nearest errs by half of it."""


def of_statistics(hidden: Tensor, weight: Tensor, target: Tensor, logits: torch.dtype) -> Tensor:
    return linear.linear_token_stats(hidden, weight, target, ref_hidden=hidden, ref_weight=weight, logits_dtype=logits, chunk_rows=CHUNK,
                                     implementation="triton").logp


def of_the_loss(hidden: Tensor, weight: Tensor, target: Tensor, logits: torch.dtype) -> Tensor:
    return linear.policy_loss(hidden, weight, target, advantage=1.0, token_weight=1.0, kl="k3", ref_hidden=hidden, ref_weight=weight,
                              logits_dtype=logits, chunk_rows=CHUNK, implementation="triton").logp


WAYS = {"statistics": of_statistics, "loss": of_the_loss}


def peaked() -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    for likeliest in LIKELIEST:
        for place in PLACES:
            check_logp(likeliest, place, *peaked_head(N, H, V, likeliest, place, g))
    hidden, weight, target = peaked_head(N, H, V, 0.99, "argmax", g)
    for kl in ("k3", "exact"):
        check_gradients(kl, hidden, weight, target)


def check_logp(likeliest: float, place: str, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """log p is at most 0 and errs by the rounding of the other tokens at most, so less than PyTorch's where the target is likely."""
    what, y = f"log p, {likeliest} {place}", target[:, None]
    z = hidden.double() @ weight.double().t()
    truth, size = z.log_softmax(1).gather(1, y).squeeze(1), z.abs().scatter(1, y, 0.0) * ROUNDING
    others, fp32 = (z.softmax(1) * (size + size.square())).sum(1), 4e-6 * z.abs().amax(1) + 2e-5
    plain = (hidden @ weight.t()).float().log_softmax(1).gather(1, y).squeeze(1) - truth
    row("peaked", f"{what}: PyTorch, bf16 logits", bias=float(plain.mean()), error=float(plain.abs().mean()))
    for logits, bound in ((torch.bfloat16, others + fp32), (torch.float32, fp32)):
        for way, logp in WAYS.items():
            found = logp(hidden, weight, target, logits)
            error = found - truth
            ok = bool((found <= 0).all() and (error.abs() <= bound).all())
            ok = ok and (place == "second" or float(error.abs().mean()) <= float(plain.abs().mean()) + 1e-5)
            row("peaked", f"{what}: {way}, {name(logits)} logits", bias=float(error.mean()), error=float(error.abs().mean()), ok=ok)


def check_gradients(kl: str, hidden: Tensor, weight: Tensor, target: Tensor) -> None:
    """fp32 logits leave what rounding dlogits once costs; bf16 logits do no worse than autograd on them, by a fifth at most."""
    numbers = {"advantage": torch.linspace(-1, 1, N, device=DEVICE), "token_weight": 1 / N, "kl": kl, "kl_coef": 0.2, "entropy_coef": 0.1}
    ref = (hidden.float() * 0.98).bfloat16()

    def by_autograd(wide: torch.dtype) -> tuple[Tensor, ...]:
        x, w = hidden.to(wide, copy=True).requires_grad_(), weight.to(wide, copy=True).requires_grad_()
        z_ref = ref.to(wide) @ weight.to(wide).t()
        return torch.autograd.grad(reference.policy_loss(x @ w.t(), target, Objective(**numbers), ref_logits=z_ref).loss.sum(), (x, w))

    truth, eager = by_autograd(torch.float64), by_autograd(torch.bfloat16)
    for logits in (torch.bfloat16, torch.float32):
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        out = linear.policy_loss(x, w, target, **numbers, ref_hidden=ref, ref_weight=weight, clip=None, logits_dtype=logits,
                                 chunk_rows=CHUNK, implementation="triton")
        for leaf, mine, true, theirs in zip(("hidden", "weight"), torch.autograd.grad(out.loss, (x, w)), truth, eager, strict=True):
            error, allowed = relative_error(mine, true), relative_error(theirs, true)
            ok = error <= (2 * ROUNDING if logits == torch.float32 else 1.2 * allowed + ROUNDING)
            row("peaked", f"gradient, kl={kl}, {name(logits)} logits: {leaf}", error=error, eager_error=allowed, ok=ok)


def name(dtype: torch.dtype) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32"}[dtype]
