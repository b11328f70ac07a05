"""What tests and benchmarks share: seeds, the tolerance table, the meaning of "close", NaN-poisoned allocation."""

from contextlib import contextmanager

import torch
from torch import Tensor

TOLERANCE = {torch.float64: 1e-11, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""Slack relative to the largest value of the truth, over the error that PyTorch makes in the same dtype."""


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def peaked_head(n: int, h: int, v: int, likeliest: float, place: str, g: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """bf16 hidden [n, h], bf16 weight [v, h], target [n] whose logits are as a trained policy's: the largest of a row lies between 20
    and 40 and has about the probability `likeliest`. The target is that token (`place` "argmax") or the one after it ("second").
    """
    options = {"generator": g, "device": g.device, "dtype": torch.float64}
    weight, hidden = torch.randn(v, h, **options) / h**0.5, 3 * torch.randn(n, h, **options)
    weight[:, 0], hidden[:, 0] = 0.0, 0.0
    top = torch.randint(v, (n, 1), generator=g, device=g.device)
    direction = weight[top.squeeze(1)] / weight[top.squeeze(1)].norm(dim=1, keepdim=True)
    others, along = hidden @ weight.t(), direction @ weight.t()
    low, high = hidden.new_zeros(n, 1), hidden.new_full((n, 1), 400.0)
    for _ in range(60):
        middle = (low + high) / 2
        enough = (others + middle * along).softmax(1).gather(1, top) > likeliest
        low, high = torch.where(enough, low, middle), torch.where(enough, middle, high)
    hidden += high * direction
    weight[:, 0] = 1.0  # moves all logits of a row alike
    hidden[:, :1] = 20.5 + 19 * torch.rand(n, 1, **options) - (others + high * along).gather(1, top)
    hidden, weight = hidden.bfloat16(), weight.bfloat16()
    order = (hidden.double() @ weight.double().t()).topk(2).indices
    return hidden, weight, order[:, 0 if place == "argmax" else 1].contiguous()


def relative_error(value: Tensor, truth: Tensor) -> float:
    """|value - truth| / |truth| in the 2-norm, fp64; sees errors in small entries that an absolute tolerance hides."""
    norm = truth.double().norm()
    return float((value.double() - truth.double()).norm() / norm.clamp(min=1e-300))


def assert_no_worse(ours: Tensor, baseline: Tensor, truth: Tensor, what: str = "", factor: float = 1.0) -> None:
    """The error of `ours` against fp64 `truth` is at most factor * that of `baseline` (PyTorch, same dtype) plus the
    tolerance.

    Infinities and NaN must sit at the same places in `ours` and `truth`.
    """
    finite = truth.isfinite()
    same = torch.equal(ours.isfinite(), finite) and torch.equal(ours[~finite].double().nan_to_num(), truth[~finite].nan_to_num())
    assert same, f"{what}: not finite at other places than the truth"
    slack = TOLERANCE[baseline.dtype]
    error, allowed = (relative_error(x[finite], truth[finite]) for x in (ours, baseline.nan_to_num()))
    assert error <= factor * allowed + slack, f"{what}: relative error {error:.3e}, PyTorch in {baseline.dtype} makes {allowed:.3e}"


@contextmanager
def poisoned_empty():
    """Inside, torch.empty, empty_like and new_empty return NaN (floating point only): what is not written shows."""
    originals = torch.empty, torch.empty_like, Tensor.new_empty

    def poison(function):
        def allocate(*args, **kwargs):
            tensor = function(*args, **kwargs)
            return tensor.fill_(torch.nan) if tensor.is_floating_point() else tensor

        return allocate

    torch.empty, torch.empty_like, Tensor.new_empty = (poison(f) for f in originals)
    try:
        yield
    finally:
        torch.empty, torch.empty_like, Tensor.new_empty = originals
