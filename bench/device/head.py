"""The parts of bench/device/device.sh, each a process of its own that appends rows to $OUT/device.jsonl; `table` prints them all.

SMALL=1 takes small shapes and, without a GPU, Triton's interpreter. Correctness is in checks, GRPO in grpo.
"""

import sys
from typing import NamedTuple

import torch
from fastsched_kernels import averaging as average
from fastsched_kernels import linear
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import Objective

from bench.device.checks import averaging_check, head_check, kernels
from bench.device.grpo import grpo
from bench.device.rows import DEVICE, OUT, SMALL, measure, padded, row, table

N, H, V, ODD_V = (48, 64, 1024, 1009) if SMALL else (16384, 4096, 151936, 50257)


class Case(NamedTuple):
    function: object
    gemms: float | None = None  # products of N x H x V, where that is known


def head(v: int = V, part: str = "head") -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    dtype = torch.bfloat16
    hidden = torch.randn(N, H, generator=g, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(v, H, generator=g, device=DEVICE) * 0.03).to(dtype).requires_grad_()
    target, a = torch.randint(v, (N,), generator=g, device=DEVICE), torch.randn(N, generator=g, device=DEVICE)
    floor = {"three bare GEMMs": Case(lambda: gemms(hidden, weight), 3)}
    for what, case in (floor | ours(hidden, weight, target, a) | rivals(hidden, weight, target, a)).items():
        try_case(part, what, case, 2e-12 * N * H * v, hidden, weight)


@torch.no_grad()
def gemms(hidden, weight) -> None:
    """The floor: what the head multiplies, in buffers laid out as its own."""
    z = padded(hidden.new_zeros(min(N, 4096), len(weight)))
    for i in range(0, N, 4096):
        x = hidden[i : i + 4096]
        torch.mm(x, weight.t(), out=z[: len(x)])
        z[: len(x)] @ weight
        z[: len(x)].t() @ x


def ours(hidden, weight, target, a) -> dict[str, Case]:
    order = torch.rand(N, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    ref_hidden, ref_weight = hidden.detach() + 0.01, weight.detach().clone()

    def case(gemms=3.0, kept=1.0, **options) -> Case:
        weights = (order < kept).float() / N
        share = float((weights > 0).float().mean())
        loss = lambda: linear.policy_loss(hidden, weight, target, advantage=a, token_weight=weights, **options).loss.backward()
        return Case(loss, gemms and gemms * share)

    def custom():
        loss = lambda logp, entropy, kl, tokens: -tokens["a"] * (logp - logp.detach()).exp() / N
        linear.linear_token_loss(hidden, weight, target, loss, tokens={"a": a}).loss.backward()

    return {
        "ours": case(),
        "ours, entropy": case(entropy_coef=0.01),
        "ours, custom loss": Case(custom, 3),
        "ours, recompute": case(4.0, compute="recompute"),
        "ours, kept 0.5": case(kept=0.5),
        "ours, kept 0.2": case(kept=0.2),
        "ours, column filter 2^-13": case(None, filter_eps=2.0**-13),
        "ours, exact KL": case(4.0, kl="exact", kl_coef=0.1, ref_hidden=ref_hidden, ref_weight=ref_weight),
    }


def rivals(hidden, weight, target, a) -> dict[str, Case]:
    def eager():
        logp = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, target[:, None]).squeeze(-1)
        (-(logp - logp.detach()).exp() * a / N).sum().backward()

    cases = {"eager": Case(eager, 3), "torch.compile": Case(torch.compile(eager), 3)}
    try:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return cases
    loss, batch = LigerFusedLinearGRPOLoss(beta=0.0, compiled=not SMALL, use_ref_model=False, chunk_size=1), 8
    shape = (batch, N // batch)
    y = target.view(shape)
    return cases | {"liger": Case(lambda: loss(hidden.view(*shape, H), weight, y, torch.ones_like(y), a[:batch])[0].backward(), 3)}


def try_case(part: str, what: str, case: Case, teraflop: float, *leaves) -> None:
    """One row; running out of memory or a rival's failure to compile is a result, not the end of the part."""

    def clear():
        for leaf in leaves:
            leaf.grad = None

    try:
        ms, gb = measure(case.function, clear)
        rate = {} if case.gemms is None else {"tflops": case.gemms * teraflop / ms * 1e3}
        row(part, what, ms=ms, **rate, peak_gib=gb)
    except (RuntimeError, NotImplementedError) as error:
        row(part, what, note=f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    clear()
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def head_odd() -> None:
    head(ODD_V, "head_odd")


def compilations() -> None:
    """Compilations of the policy kernel over 20 lengths and 5 settings of the coefficients, by real launches."""
    from fastsched_kernels.rows_triton import INTERPRETED, policy_kernel

    fast = choose(DEVICE, torch.bfloat16, "triton")
    for n in range(1, 21):
        o = Objective(0.1 * (n % 5), 1.0, entropy_coef=0.01 * (n % 5), clip_low=0.1, clip_high=0.05 * n)
        x, target = padded(torch.zeros(n, ODD_V, dtype=torch.bfloat16, device=DEVICE)), torch.zeros(2 * n, dtype=torch.long, device=DEVICE)
        fast.policy_rows_(x, target[n:], None, o, 1.0, None, None, True)
    if INTERPRETED:
        row("compilations", "20 lengths, 5 settings", note="interpreted: nothing compiles")
    else:
        count = sum(len(c[0]) for c in policy_kernel.device_caches.values())
        row("compilations", "20 lengths, 5 settings", count=count, ok=count == 1)


def averaging() -> None:
    averaging_check()
    size = 10_000 if SMALL else 20_000_000
    avg = [torch.randn(size, device=DEVICE) for _ in range(30)]
    for dtype in (torch.float32, torch.bfloat16):
        params = [(x + 0.01).to(dtype) for x in avg]
        ms, gb = measure(lambda p=params: average.ema_and_drift_(avg, p, 0.99))
        rate = 30 * size * (8 + dtype.itemsize) / ms / 1e6
        what = f"{average.implementation(avg, params)}, {30 * size:,} parameters, {str(dtype)[6:]}"
        row("averaging", what, ms=ms, gb_per_s=rate, peak_gib=gb)


PARTS = {f.__name__: f for f in (kernels, head_check, head, head_odd, compilations, averaging, grpo, table)}

if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    PARTS[sys.argv[1]]()
