"""The C++ implementation (csrc/cpu): fp32 and bf16 logits on the CPU, rows in parallel over torch's threads."""

from functools import cache
from pathlib import Path
from typing import Optional

import torch
from torch import Tensor

from fastsched_kernels.reference import Number, Objective
from fastsched_kernels.rows import Coefficients, RowState
from fastsched_kernels.table import PolicyRows, kl_index, number_vector, objective_flags, objective_table, policy_rows

_OPS = ("row_stats", "row_dlogits_", "policy_rows_", "ema_and_drift_", "add_", "active_columns", "gather_columns", "add_rows_")
_LEVELS = ("DEFAULT", "AVX2", "AVX512")


@cache
def load() -> Optional[str]:
    """Load the compiled ops; None when they work, else why they do not. Loading twice is harmless."""
    library = Path(__file__).with_name("_C.so")
    if not library.exists():
        return "compiled ops not built: needs a C++ compiler and pip install --no-build-isolation -e ."
    torch.ops.load_library(str(library))
    if missing := [op for op in _OPS if not hasattr(torch.ops.fastsched_kernels, op)]:
        return f"compiled ops are of another version (no {', '.join(missing)}): install again"
    built, here = torch.ops.fastsched_kernels.capability(), torch.backends.cpu.get_cpu_capability()
    if here in _LEVELS and _LEVELS.index(built) > _LEVELS.index(here):
        return f"compiled ops were built for {built}, this machine has {here}: install again on this machine"
    _register_fakes()
    return None


def row_stats(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    temperature: Number,
    softcap: Optional[float],
    target_logit: Optional[Tensor] = None,
) -> RowState:
    """As rows.row_stats."""
    t = number_vector(temperature, len(target), logits.device)
    fine = None if target_logit is None else target_logit.float()
    return RowState(*torch.ops.fastsched_kernels.row_stats(logits, target, ref_logits, t, softcap or 0.0, fine).unbind(0))


def row_dlogits_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    state: RowState,
    c: Coefficients,
    temperature: Number,
    softcap: Optional[float],
) -> Tensor:
    """As rows.row_dlogits_."""
    t = number_vector(temperature, len(target), logits.device)
    torch.ops.fastsched_kernels.row_dlogits_(logits, target, ref_logits, torch.stack(state), torch.stack(c).float(), t, softcap or 0.0)
    return logits


def policy_rows_(
    logits: Tensor,
    target: Tensor,
    ref_logits: Optional[Tensor],
    objective: Objective,
    temperature: Number,
    softcap: Optional[float],
    target_logit: Optional[Tensor],
    backward: bool,
) -> PolicyRows:
    """As rows.policy_rows_, each row read once from memory."""
    table = objective_table(objective, len(target), temperature, target_logit, logits.device)
    flags = objective_flags(objective, target_logit, backward)
    return policy_rows(
        torch.ops.fastsched_kernels.policy_rows_(logits, target, ref_logits, table, kl_index(objective), flags, softcap or 0.0)
    )


def _register_fakes() -> None:
    fake = torch.library.register_fake
    fake("fastsched_kernels::row_stats")(lambda logits, *_: logits.new_empty((8, logits.shape[0]), dtype=torch.float32))
    fake("fastsched_kernels::row_dlogits_")(lambda *_: None)
    fake("fastsched_kernels::policy_rows_")(lambda logits, *_: logits.new_empty((7, logits.shape[0]), dtype=torch.float32))
    fake("fastsched_kernels::ema_and_drift_")(lambda avg, *_: torch.empty(2, dtype=torch.float64))
    fake("fastsched_kernels::add_")(lambda *_: None)
    fake("fastsched_kernels::active_columns")(
        lambda dlogits, _: (dlogits.new_empty(dlogits.shape[1], dtype=torch.bool), dlogits.new_empty(dlogits.shape[1], dtype=torch.float32))
    )
    fake("fastsched_kernels::gather_columns")(lambda dlogits, columns: dlogits.new_empty(dlogits.shape[0], columns.shape[0]))
    fake("fastsched_kernels::add_rows_")(lambda *_: None)
