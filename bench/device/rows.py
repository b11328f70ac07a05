"""What the parts of bench/device/device.sh share: sizes, the rows that they leave in $OUT/device.jsonl, their table."""

import json
import os
import time
from pathlib import Path
from typing import Callable

import torch

SMALL = os.environ.get("SMALL") == "1"
OUT = Path(os.environ.get("OUT", "/tmp/fastsched-device"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def row(part: str, what: str, **numbers) -> None:
    with open(OUT / "device.jsonl", "a") as file:
        file.write(json.dumps({"part": part, "what": what, **numbers}) + "\n")


def rows() -> list[dict]:
    return [json.loads(line) for line in (OUT / "device.jsonl").read_text().splitlines()]


def padded(x: torch.Tensor) -> torch.Tensor:
    """A copy of [N, V] as the head's buffer holds logits: rows begin at multiples of 16 elements. `clone` would pack them."""
    n, v = x.shape
    return x.new_empty(n, -(-v // 16) * 16)[:, :v].copy_(x)


def measure(function: Callable, clear: Callable = lambda: None, repeats: int = 3) -> tuple[float, float]:
    """(best milliseconds, peak GiB beyond what is allocated after `clear`, which runs before every call, not timed)."""
    cuda = DEVICE.type == "cuda"
    function()
    clear()
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeats):
        clear()
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0


def table() -> None:
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, no measurement"
    checks = [line["ok"] for line in rows() if "ok" in line]
    print(f"\n{name}, torch {torch.__version__}; {sum(checks)} of {len(checks)} checks passed")
    for line in rows():
        numbers = {k: v for k, v in line.items() if k not in ("part", "what")}
        shown = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
        print(f"{line['part']:13} {line['what']:46} {shown}")
