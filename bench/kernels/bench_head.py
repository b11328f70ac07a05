"""The head, forward and backward, on the CPU: its three-GEMM floor, eager PyTorch, Liger, ours.

`pytest bench/kernels/bench_head.py` at 2048 rows x 576 x 49152 (SmolLM2), or `HEAD=N,H,V`. Floor and case run in turns, `ROUNDS` of
them; what is reported is the median of the rounds' ratios, each of neighbours, with the smallest and the largest, and the
median time of either. extra_info holds the peak memory beyond inputs and final gradients' dtype-sized results, measured in a
process of its own.
"""

import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from fastsched_kernels.linear import policy_loss

N, H, V = (int(x) for x in os.environ.get("HEAD", "2048,576,49152").split(","))
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUNDS = int(os.environ.get("ROUNDS", "7"))


def inputs(dtype: torch.dtype):
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, H, generator=g).to(dtype).requires_grad_()
    weight = (torch.randn(V, H, generator=g) * 0.05).to(dtype).requires_grad_()
    target = torch.randint(V, (N,), generator=g)
    return hidden, weight, target, torch.randn(N, generator=g)


def floor(hidden, weight, target, advantage):
    with torch.no_grad():
        z = hidden @ weight.t()
        return z @ weight, z.t() @ hidden


def eager(hidden, weight, target, advantage):
    logp = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, target[:, None]).squeeze(-1)
    (-(logp - logp.detach()).exp() * advantage / N).sum().backward()


def liger(hidden, weight, target, advantage):
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss = LigerFusedLinearGRPOLoss(beta=0.0, compiled=False, use_ref_model=False, chunk_size=1)
    batch = 8
    x, y = hidden.view(batch, N // batch, H), target.view(batch, N // batch)
    loss(x, weight, y, torch.ones_like(y), advantage[:batch])[0].backward()


def ours(hidden, weight, target, advantage, kept=1.0, **options):
    weights = torch.where(torch.arange(N) % 10 < round(10 * kept), 1.0 / N, 0.0)
    policy_loss(hidden, weight, target, advantage=advantage, token_weight=weights, **options).loss.backward()


CASES = {
    "floor": floor,
    "eager": eager,
    "liger": liger,
    "ours": ours,
    "ours, half kept": lambda *a: ours(*a, kept=0.5),
    "ours, fifth kept": lambda *a: ours(*a, kept=0.2),
    "ours, entropy": lambda *a: ours(*a, entropy_coef=0.01),
    "ours, recompute": lambda *a: ours(*a, compute="recompute"),
}


def run(case: str, tensors) -> None:
    for leaf in tensors[:2]:
        leaf.grad = None
    CASES[case](*tensors)


def once(case: str, dtype: str) -> float:
    tensors = inputs(DTYPES[dtype])
    start = time.perf_counter()
    run(case, tensors)
    return time.perf_counter() - start


def high_water_kb() -> int:
    """Peak resident memory of this process; getrusage's would start at the peak of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(re.search(r"VmHWM:\s+(\d+) kB", status)[1])


def peak_gb(case: str, dtype: str) -> float:
    """Peak resident memory of a process that runs the case once, less that of one that only makes the inputs."""

    def peak(code: str) -> int:
        program = f"from bench.kernels import bench_head as b; {code}; print(b.high_water_kb())"
        return int(subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout.split()[-1])

    return (peak(f"b.once({case!r}, {dtype!r})") - peak(f"b.inputs(b.DTYPES[{dtype!r}])")) * 1024 / 1e9


def seconds(function, *args) -> float:
    start = time.perf_counter()
    function(*args)
    return time.perf_counter() - start


def in_turns(one, other, rounds: int) -> list[tuple[float, float]]:
    """Seconds of both, measured one after the other in every round, after one round that is not counted."""
    return [(seconds(one), seconds(other)) for _ in range(rounds + 1)][1:]


class Ratios(NamedTuple):
    """Of the second to the first of each round."""

    median: float
    smallest: float
    largest: float

    @staticmethod
    def of(times: list[tuple[float, float]]) -> "Ratios":
        ratios = [b / a for a, b in times]
        return Ratios(statistics.median(ratios), min(ratios), max(ratios))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", CASES)
def bench_head(benchmark, case, dtype):
    tensors = inputs(DTYPES[dtype])
    times = in_turns(lambda: floor(*tensors), lambda: run(case, tensors), ROUNDS)
    ratio, time_of_floor, time_of_case = Ratios.of(times), *(statistics.median(x) for x in zip(*times, strict=True))
    benchmark.pedantic(run, args=(case, tensors), rounds=1, iterations=1)
    benchmark.extra_info.update(
        rows=N,
        hidden=H,
        vocabulary=V,
        threads=torch.get_num_threads(),
        rounds=ROUNDS,
        times_the_floor=round(ratio.median, 3),
        spread=[round(ratio.smallest, 3), round(ratio.largest, 3)],
        seconds=round(time_of_case, 4),
        floor_seconds=round(time_of_floor, 4),
        peak_extra_gb=round(peak_gb(case, dtype), 3),
        tflops=round(6e-12 * N * H * V / time_of_case, 3),
    )
    info = benchmark.extra_info
    print(f"\n{case:18} {dtype}: median {time_of_case:.3f} s, {ratio.median:.2f}x the floor ({ratio.smallest:.2f}-{ratio.largest:.2f} in "
          f"{ROUNDS} rounds), {info['peak_extra_gb']} GB more")


__all__ = ["bench_head", "high_water_kb", "inputs", "once"]
