"""Loads the compiled ops (csrc) and says why, where they cannot be used."""

from functools import cache
from pathlib import Path

import torch

from fastsched_kernels.table import Result, State, layout

_OPS = ("row_stats", "row_dlogits_", "policy_rows_", "ema_and_drift_", "squared_norm", "weighted_row_sums", "add_", "active_columns",
        "gather_columns", "add_rows_", "table_layout")
_LEVELS = ("DEFAULT", "AVX2", "AVX512")


@cache
def load() -> str | None:
    """Load the compiled ops; None when they work, else why they do not. Loading twice is harmless."""
    library = Path(__file__).with_name("_C.so")
    if not library.exists():
        return "compiled ops not built: needs a C++ compiler and pip install --no-build-isolation -e ."
    torch.ops.load_library(str(library))
    ops = torch.ops.fastsched_kernels
    if missing := [op for op in _OPS if not hasattr(ops, op)]:
        return f"compiled ops are of another version (no {', '.join(missing)}): install again"
    built, here = ops.capability(), torch.backends.cpu.get_cpu_capability()
    if here in _LEVELS and _LEVELS.index(built) > _LEVELS.index(here):
        return f"compiled ops were built for {built}, this machine has {here}: install again on this machine"
    if other := dict(ops.table_layout()).items() ^ layout().items():
        return f"compiled ops are of another version ({', '.join(sorted({name for name, _ in other}))} differ): install again"
    _register_fakes()
    return None


def _register_fakes() -> None:
    fake = torch.library.register_fake
    fake("fastsched_kernels::row_stats")(lambda logits, *_: logits.new_empty((len(State), logits.shape[0]), dtype=torch.float32))
    fake("fastsched_kernels::row_dlogits_")(lambda *_: None)
    fake("fastsched_kernels::policy_rows_")(lambda logits, *_: logits.new_empty((len(Result), logits.shape[0]), dtype=torch.float32))
    fake("fastsched_kernels::ema_and_drift_")(lambda avg, *_: torch.empty(2, dtype=torch.float64))
    fake("fastsched_kernels::squared_norm")(lambda _: torch.empty((), dtype=torch.float64))
    fake("fastsched_kernels::weighted_row_sums")(lambda words, _: words.new_empty(words.shape[0]))
    fake("fastsched_kernels::add_")(lambda *_: None)
    fake("fastsched_kernels::active_columns")(
        lambda dlogits, _: (dlogits.new_empty(dlogits.shape[1], dtype=torch.bool), dlogits.new_empty(dlogits.shape[1], dtype=torch.float32))
    )
    fake("fastsched_kernels::gather_columns")(lambda dlogits, columns: dlogits.new_empty(dlogits.shape[0], columns.shape[0]))
    fake("fastsched_kernels::add_rows_")(lambda *_: None)
