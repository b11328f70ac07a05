"""EMA with drift in one pass, against torch._foreach and norms: `pytest bench/kernels/bench_averaging.py`, `MILLIONS=135`
parameters by default.
"""

import os
import time

import pytest
import torch
from fastsched_kernels.averaging import ema_and_drift_, implementation

SIZE = int(float(os.environ.get("MILLIONS", "135")) * 1e6)
TENSORS = 30


def tensors(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    avg = [torch.randn(SIZE // TENSORS, generator=g) for _ in range(TENSORS)]
    return avg, [(a + 0.01).to(dtype) for a in avg]


def foreach(avg, params, alpha):
    wide = [p.float() for p in params]
    torch._foreach_lerp_(avg, wide, 1 - alpha)
    drift = torch._foreach_norm(torch._foreach_sub(wide, avg))
    norm = torch._foreach_norm(avg)
    return torch.stack(drift).square().sum(), torch.stack(norm).square().sum()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def bench_ema_and_drift(benchmark, dtype):
    avg, params = tensors(dtype)
    checked = [a.clone() for a in avg]
    squared_norm = ema_and_drift_(checked, params, 0.99).squared_norm
    true = sum(a.double().square().sum() for a in checked)  # torch._foreach_norm is 2e-4 off
    torch.testing.assert_close(squared_norm, true, rtol=1e-6, atol=0)
    ratio = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        foreach(avg, params, 0.99)
        middle = time.perf_counter()
        ema_and_drift_(avg, params, 0.99)
        ratio = min(ratio, (time.perf_counter() - middle) / (middle - start))
    benchmark.pedantic(ema_and_drift_, args=(avg, params, 0.99), rounds=5, iterations=1)
    moved = SIZE * (8 + dtype.itemsize)  # average read and written, parameter read
    label = implementation(avg, params)
    benchmark.extra_info.update(implementation=label, parameters=SIZE, times_foreach=round(ratio, 3),
                                gb_per_s=round(moved / benchmark.stats["min"] / 1e9, 1))
    print(f"\n{dtype}, {label}: {benchmark.stats['min'] * 1e3:.1f} ms, {ratio:.2f}x torch._foreach")
