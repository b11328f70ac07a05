"""Below three GEMMs: only the vocabulary columns that matter to some row of the chunk enter the two backward GEMMs.

A column stays when |dlogit| exceeds eps times the row's coefficient |dloss/dlogp| + |dloss/dentropy| + |dloss/dkl| in
at least one row. Judged on the gradient itself, so entropy and KL terms count; eps = 0 filters nothing.
"""



import torch
from torch import Tensor

from fastsched_kernels import compiled_ops


def accumulate_filtered(dz: Tensor, x: Tensor, w: Tensor, dx: Tensor | None, dw: Tensor | None, threshold: Tensor) -> Tensor:
    """dx <- dz w, dw += dz^T x over the active columns; returns the share of sum |dz| that was left out, fp32 scalar.

    dz [C, V], x [C, H], w [V, H], threshold [C] fp32, dw [V, H] fp32 (fp64 for fp64).
    """
    active, sums = active_columns(dz, threshold)
    columns = active.nonzero().squeeze(-1)
    compiled = _compiled(dz)
    kept = torch.ops.fastsched_kernels.gather_columns(dz, columns) if compiled else dz.index_select(1, columns)
    if dx is not None:
        torch.mm(kept, w.index_select(0, columns), out=dx)
    if dw is not None:
        product = torch.mm(kept.t(), x)
        if compiled:
            torch.ops.fastsched_kernels.add_rows_(dw, columns, product.contiguous())
        else:
            dw.index_add_(0, columns, product.to(dw.dtype))
    return torch.where(active, 0.0, sums).sum() / sums.sum().clamp(min=1e-30)


def active_columns(dz: Tensor, threshold: Tensor) -> tuple[Tensor, Tensor]:
    """[V] bool: |dz| > threshold in some row, NaN counts as active; [V] fp32: sum |dz| of each column."""
    if _compiled(dz):
        return torch.ops.fastsched_kernels.active_columns(dz, threshold.float().contiguous())
    size = dz.abs()
    active = ~(size <= threshold.unsqueeze(-1).to(dz.dtype)).all(0)
    return active, size.sum(0, dtype=torch.float32)


def _compiled(dz: Tensor) -> bool:
    return dz.device.type == "cpu" and dz.dtype in (torch.float32, torch.bfloat16) and compiled_ops.load() is None
