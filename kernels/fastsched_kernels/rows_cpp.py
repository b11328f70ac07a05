"""Rows of logits in C++ (csrc/cpu/rows.cpp): fp32 and bf16 on the CPU, rows in parallel over torch's threads.

Needs `compiled_ops.load`. The contract is that of rows_pytorch.
"""

import torch
from torch import Tensor

from fastsched_kernels.reference import Number, Objective
from fastsched_kernels.table import (
    Coefficients,
    PolicyRows,
    RowState,
    kl_index,
    number_vector,
    objective_flags,
    objective_table,
    policy_rows,
)


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
) -> RowState:
    """As rows_pytorch.row_stats."""
    t = number_vector(temperature, len(target), logits.device)
    fine = _fp32(target_logit), _fp32(ref_target_logit)
    return RowState(*torch.ops.fastsched_kernels.row_stats(logits, target, ref_logits, t, softcap or 0.0, *fine).unbind(0))


def row_dlogits_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    state: RowState,
    c: Coefficients,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None = None,
    ref_target_logit: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As rows_pytorch.row_dlogits_."""
    t, out = number_vector(temperature, len(target), logits.device), logits if out is None else out
    numbers = torch.stack(state), torch.stack(c).float(), t, softcap or 0.0, _fp32(target_logit), _fp32(ref_target_logit)
    torch.ops.fastsched_kernels.row_dlogits_(logits, target, ref_logits, *numbers, out)
    return out


def policy_rows_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Tensor | None,
    objective: Objective,
    temperature: Number,
    softcap: float | None,
    target_logit: Tensor | None,
    backward: bool,
    ref_target_logit: Tensor | None = None,
    out: Tensor | None = None,
) -> PolicyRows:
    """As rows_pytorch.policy_rows_, each row read once from memory."""
    table = objective_table(objective, len(target), temperature, target_logit, ref_target_logit, logits.device)
    flags, out = objective_flags(objective, target_logit, ref_target_logit, backward), logits if out is None else out
    return policy_rows(
        torch.ops.fastsched_kernels.policy_rows_(logits, target, ref_logits, table, kl_index(objective), flags, softcap or 0.0, out)
    )


def _fp32(fine: Tensor | None) -> Tensor | None:
    return None if fine is None else fine.float().contiguous()
