"""Below three GEMMs: only the vocabulary columns that matter to some row of the chunk enter the two backward GEMMs.

A column stays when |dlogit| exceeds eps times the row's coefficient |dloss/dlogp| + |dloss/dentropy| + |dloss/dkl| in
at least one row. Judged on the gradient itself, so entropy and KL terms count; eps = 0 filters nothing.
"""

from typing import Optional

import torch
from torch import Tensor

from fastsched_kernels import cpu_ops


def accumulate_filtered(
    dz: Tensor, x: Tensor, w: Tensor, dx: Optional[Tensor], dw: Optional[Tensor], threshold: Tensor
) -> Tensor:
    """dx <- dz w, dw += dz^T x over the active columns; returns the share of sum |dz| that was left out, fp32 scalar.

    dz [C, V], x [C, H], w [V, H], threshold [C] fp32.
    """
    columns = active_columns(dz, threshold).nonzero().squeeze(-1)
    kept = dz.index_select(1, columns)
    if dx is not None:
        torch.mm(kept, w.index_select(0, columns), out=dx)
    if dw is not None:
        dw.index_add_(0, columns, torch.mm(kept.t(), x).to(dw.dtype))
    total = torch.linalg.vector_norm(dz, 1, dtype=torch.float32)
    return 1 - torch.linalg.vector_norm(kept, 1, dtype=torch.float32) / total.clamp(min=1e-30)


def active_columns(dz: Tensor, threshold: Tensor) -> Tensor:
    """[V] bool: |dz| > threshold in some row; NaN counts as active."""
    compiled = dz.device.type == "cpu" and dz.dtype in (torch.float32, torch.bfloat16) and cpu_ops.load() is None
    if compiled:
        return torch.ops.fastsched_kernels.active_columns(dz, threshold.float().contiguous())
    return ~(dz.abs() <= threshold.unsqueeze(-1).to(dz.dtype)).all(0)
