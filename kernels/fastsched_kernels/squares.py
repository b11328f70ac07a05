"""The squared norm of a gradient as autograd left it, without a copy in fp32."""

import torch
from torch import Tensor

from fastsched_kernels import compiled_ops


@torch.no_grad()
def squared_norm(values: Tensor) -> Tensor:
    """fp64 scalar on the tensor's device: the sum of squares of a floating-point tensor, squared and added up in fp32 or better."""
    compiled = values.device.type == "cpu" and values.dtype in (torch.float32, torch.bfloat16) and values.is_contiguous()
    if compiled and not compiled_ops.load():
        return torch.ops.fastsched_kernels.squared_norm(values.detach())
    return torch.linalg.vector_norm(values, dtype=torch.float32).double().square()
