"""Which code computes the rows: C++ on the CPU, else the PyTorch formulas. Chosen by device and dtype, named in
every log.
"""

from types import ModuleType
from typing import Optional, Union

import torch

from fastsched_kernels import cpu_ops, rows

NAMES = {"pytorch": rows, "cpp": cpu_ops}


def choose(device: torch.device, dtype: torch.dtype, name: Optional[str] = None) -> ModuleType:
    """The module with row_stats, row_dlogits_ and policy_rows_; `name` insists on one and raises where it cannot
    run.
    """
    if name is None:
        return NAMES[_pick(device, dtype)[0]]
    if name not in NAMES:
        raise ValueError(f"implementation={name!r} is none of {', '.join(NAMES)}")
    if name == "cpp" and (reason := _cpp_lacks(device, dtype)):
        raise NotImplementedError(f"implementation='cpp': {reason}")
    return NAMES[name]


def implementation(device: Union[str, torch.device] = "cpu", dtype: torch.dtype = torch.float32) -> str:
    """What will compute rows of this dtype on this device, for the log: its name and, if it is not the compiled
    one, why.
    """
    name, note = _pick(torch.device(device), dtype)
    return f"{name} ({note})" if note else name


def _pick(device: torch.device, dtype: torch.dtype) -> tuple[str, str]:
    reason = _cpp_lacks(device, dtype)
    return ("pytorch", reason) if reason else ("cpp", torch.ops.fastsched_kernels.capability())


def _cpp_lacks(device: torch.device, dtype: torch.dtype) -> Optional[str]:
    if device.type != "cpu":
        return f"no C++ kernels for {device.type}"
    if dtype not in (torch.float32, torch.bfloat16):
        return f"no C++ kernels for {dtype}"
    return cpu_ops.load()
