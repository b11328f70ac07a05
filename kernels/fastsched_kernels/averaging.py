"""EMA of the policy and its distance to it, in one pass over the parameters.

avg <- alpha * avg + (1 - alpha) * param; drift |param - avg|^2 and |avg|^2 are of the updated average.
"""

from typing import NamedTuple, Sequence

import torch
from torch import Tensor

from fastsched_kernels import compiled_ops


class Drift(NamedTuple):
    """fp64 scalars on the parameters' device: sums, so that ranks which hold shards may add them."""

    squared_drift: Tensor  # sum |param - avg|^2
    squared_norm: Tensor  # sum |avg|^2


@torch.no_grad()
def ema_and_drift_(avg: Sequence[Tensor], params: Sequence[Tensor], alpha: float) -> Drift:
    """Update `avg` in place and measure how far the parameters are from it.

    avg: fp32 tensors, contiguous. params: bf16, fp16 or fp32 tensors of the same shapes. alpha in [0, 1]: 1 keeps the
    average. Raises ValueError for lists, shapes or devices that do not match and for an average that is not fp32.
    """
    _check(avg, params, alpha)
    if not avg:
        return Drift(torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    if _lacks(avg, params) is None:
        params = [p.detach() for p in params]
        return Drift(*torch.ops.fastsched_kernels.ema_and_drift_(list(avg), params, alpha).unbind(0))
    drift = torch.zeros((), dtype=torch.float64, device=avg[0].device)
    norm = torch.zeros_like(drift)
    for a, p in zip(avg, params, strict=True):
        a.lerp_(p.detach().float(), 1.0 - alpha)
        drift += (p.detach().float() - a).square_().sum(dtype=torch.float64)
        norm += a.square().sum(dtype=torch.float64)
    return Drift(drift, norm)


def implementation(avg: Sequence[Tensor], params: Sequence[Tensor]) -> str:
    """What `ema_and_drift_` computes these tensors with: "compiled", in one pass, or "pytorch (why)"."""
    reason = _lacks(avg, params)
    return "compiled" if reason is None else f"pytorch ({reason})"


def _lacks(avg: Sequence[Tensor], params: Sequence[Tensor]) -> str | None:
    """Why the compiled op does not take these tensors; None if it does."""
    if not all(a.is_contiguous() and p.is_contiguous() for a, p in zip(avg, params, strict=True)):
        return "not contiguous"
    if other := [p.dtype for p in params if p.dtype not in (torch.float32, torch.bfloat16)]:
        return f"no kernel for {other[0]}"
    if reason := compiled_ops.load():
        return reason
    device = avg[0].device.type
    if not torch._C._dispatch_has_kernel_for_dispatch_key("fastsched_kernels::ema_and_drift_", device.upper()):
        return f"compiled ops were built without {device}"
    return None


def _check(avg: Sequence[Tensor], params: Sequence[Tensor], alpha: float) -> None:
    if not 0.0 <= alpha <= 1.0:
        raise ValueError(f"alpha must lie in [0, 1], got {alpha}")
    if len(avg) != len(params):
        raise ValueError(f"{len(avg)} averages for {len(params)} parameters")
    for i, (a, p) in enumerate(zip(avg, params, strict=True)):
        if a.device != avg[0].device or p.device != avg[0].device:
            raise ValueError(f"tensor {i} lies on {a.device} and {p.device}, tensor 0 on {avg[0].device}: need one device")
        if a.shape != p.shape or a.dtype != torch.float32:
            raise ValueError(
                f"tensor {i}: the average is {a.dtype} {tuple(a.shape)}, the parameter {tuple(p.shape)}; need fp32 and equal shapes"
            )
