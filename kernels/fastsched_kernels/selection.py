"""Which of N rows are computed: those that carry a coefficient. What is known on the host costs no trip to the device."""

import torch
from torch import Tensor

from fastsched_kernels.reference import Number, Objective


def active_rows(o: Objective, n: int, device: torch.device, skip_flat: bool) -> Tensor | None:
    """Indices [R] of the rows of token_weight other than 0, ascending; None: all n of them.

    `skip_flat` leaves out those too whose advantage, KL and entropy coefficients and distill are all 0.
    """
    active = _nonzero(o.token_weight, device)
    if skip_flat:
        kl = _nonzero(o.kl_coef, device) if o.kl != "none" else False
        active = active & (_nonzero(o.advantage, device) | kl | _nonzero(o.entropy_coef, device) | _nonzero(o.distill, device))
    if not isinstance(active, Tensor):
        return None if active else torch.zeros(0, dtype=torch.long, device=device)
    rows = active.expand(n).nonzero().squeeze(-1)
    return None if rows.numel() == n else rows


def _nonzero(value: Number, device: torch.device) -> bool | Tensor:
    return value.to(device) != 0 if isinstance(value, Tensor) else bool(value != 0)


def gather_rows(value, rows: Tensor | slice | None):
    """Rows of a per-token tensor [N, ...], differentiable; scalars, scalar tensors, options and None pass through."""
    if not isinstance(value, Tensor) or value.dim() == 0 or rows is None:
        return value
    return value[rows] if isinstance(rows, slice) else value.index_select(0, rows)


def gather_objective(objective: Objective, rows: Tensor | slice | None) -> Objective:
    return Objective(*(gather_rows(x, rows) for x in objective))


def scatter_rows(value: Tensor, rows: Tensor | None, n: int) -> Tensor:
    """[R] -> [n]; NaN (False) at the rows that were not computed."""
    if rows is None:
        return value
    fill = False if value.dtype == torch.bool else torch.nan
    return torch.full((n,), fill, dtype=value.dtype, device=value.device).index_copy_(0, rows, value)
