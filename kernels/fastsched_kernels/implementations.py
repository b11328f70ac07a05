"""Which code computes the rows: Triton on CUDA, C++ on the CPU, else the PyTorch formulas.

Chosen by device and dtype, never silently: `implementation` names the choice and its reason for the log.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

from fastsched_kernels import compiled_ops

MODULES = {"triton": "rows_triton", "cpp": "rows_cpp", "pytorch": "rows_pytorch"}


def choose(device: torch.device, dtype: torch.dtype, name: str | None = None) -> ModuleType:
    """The module with row_stats, row_dlogits_ and policy_rows_.

    `name` insists on an implementation: ValueError if there is none of that name, NotImplementedError if it cannot run.
    """
    if name is not None and name not in MODULES:
        raise ValueError(f"implementation={name!r} is none of {', '.join(MODULES)}")
    if name is not None and (reason := _lacks(name, device, dtype)):
        raise NotImplementedError(f"implementation={name!r}: {reason}")
    return import_module(f"fastsched_kernels.{MODULES[name or _pick(device, dtype)[0]]}")


def implementation(device: str | torch.device = "cpu", dtype: torch.dtype = torch.float32, name: str | None = None) -> str:
    """What will compute rows of this dtype on this device, for the log; if it is PyTorch, also why. `name` and errors as in `choose`."""
    if name is not None:
        choose(torch.device(device), dtype, name)
        return f"{name} (asked for)"
    name, note = _pick(torch.device(device), dtype)
    return f"{name} ({note})" if note else name


def _pick(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    fast = "cpp" if device.type == "cpu" else "triton"
    if reason := _lacks(fast, device, dtype):
        return "pytorch", reason
    return fast, torch.ops.fastsched_kernels.capability() if fast == "cpp" else ""


def _lacks(name: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why an implementation cannot run here; None if it can."""
    if name == "pytorch":
        return None
    if name == "cpp":
        if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
            return f"no C++ kernels for {dtype} on {device.type}"
        return compiled_ops.load()
    if dtype not in (torch.float32, torch.bfloat16, torch.float16):
        return f"no Triton kernels for {dtype}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if device.type != "cuda" and not import_module("fastsched_kernels.rows_triton").INTERPRETED:
        return f"Triton runs on {device.type} under TRITON_INTERPRET=1 only"
    return None
