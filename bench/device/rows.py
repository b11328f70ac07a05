"""What the parts of bench/device/device.sh share: shapes, the rows that they leave in $OUT/device.jsonl, their table."""

import json
import os
import time
from pathlib import Path
from typing import Callable, NamedTuple

import torch
from torch import Tensor

SMALL = os.environ.get("SMALL") == "1"
OUT = Path(os.environ.get("OUT", "/tmp/fastsched-device"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


class Shape(NamedTuple):
    rows: int
    hidden: int
    vocabulary: int

    def __str__(self) -> str:
        return " x ".join(map(str, self))


MAIN, ODD = (Shape(48, 64, 1024), Shape(48, 64, 1009)) if SMALL else (Shape(16384, 4096, 151936), Shape(16384, 4096, 50257))
PUBLISHED = (Shape(16, 64, 1000), Shape(48, 64, 1008)) if SMALL else (Shape(4096, 4096, 128256), Shape(16384, 4096, 131072))
"""What others have published H200 and H100 figures for."""


class Head(NamedTuple):
    hidden: Tensor  # [N, H] bf16, a leaf
    weight: Tensor  # [V, H] bf16, a leaf
    target: Tensor  # [N]
    advantage: Tensor  # [N]


def inputs(shape: Shape) -> Head:
    g = torch.Generator(DEVICE).manual_seed(0)
    n, h, v = shape
    hidden = torch.randn(n, h, generator=g, device=DEVICE).to(torch.bfloat16).requires_grad_()
    weight = (torch.randn(v, h, generator=g, device=DEVICE) * 0.03).to(torch.bfloat16).requires_grad_()
    target = torch.randint(v, (n,), generator=g, device=DEVICE)
    return Head(hidden, weight, target, torch.randn(n, generator=g, device=DEVICE))


class Case(NamedTuple):
    function: Callable[[], object]
    gemms: float | None = None  # products of N x H x V, where that is known


FAILURES = (RuntimeError, AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)
"""What a head may fail with: out of memory, a shape that it does not take, a compiler that is not there."""


def try_case(part: str, what: str, case: Case, head: Head) -> None:
    """One row; failing is a result, not the end of the part."""

    def clear():
        head.hidden.grad = head.weight.grad = None

    teraflop = 2e-12 * head.hidden.numel() * len(head.weight)
    try:
        ms, gb = measure(case.function, clear)
        rate = {} if case.gemms is None else {"tflops": case.gemms * teraflop / ms * 1e3}
        row(part, what, ms=ms, **rate, peak_gib=gb)
    except FAILURES as error:
        row(part, what, note=reason(error))
    clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:100]}"


def row(part: str, what: str, **numbers) -> None:
    with open(OUT / "device.jsonl", "a") as file:
        file.write(json.dumps({"part": part, "what": what, **numbers}) + "\n")


def rows() -> list[dict]:
    return [json.loads(line) for line in (OUT / "device.jsonl").read_text().splitlines()]


def padded(x: Tensor) -> Tensor:
    """A copy of [N, V] as the head's buffer holds logits: rows begin at multiples of 16 elements. `clone` would pack them."""
    return padded_empty(x, x.dtype).copy_(x)


def padded_empty(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[N, V] for a copy of x in another dtype, rows likewise."""
    n, v = x.shape
    return x.new_empty(n, -(-v // 16) * 16, dtype=dtype)[:, :v]


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
