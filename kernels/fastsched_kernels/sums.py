"""Sums over tensors as they are: no copy in another dtype."""

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


CHUNK_WORDS = 2**24  # of products held at a time where there is no kernel


@torch.no_grad()
def weighted_row_sums(words: Tensor, factors: Tensor) -> Tensor:
    """[R] int64: words [R, W] times factors [W], both int64, modulo 2^64."""
    if words.device.type == "cpu" and not compiled_ops.load():
        return torch.ops.fastsched_kernels.weighted_row_sums(words.contiguous(), factors.contiguous())
    step = max(1, CHUNK_WORDS // max(words.shape[1], 1))
    return torch.cat([(part * factors).sum(1) for part in words.split(step)])
