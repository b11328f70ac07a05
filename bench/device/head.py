"""The parts of bench/device/device.sh, each a process of its own that appends rows to $OUT/device.jsonl; `table` prints them all.

SMALL=1 takes small shapes and, without a GPU, Triton's interpreter. Correctness is in checks and peaked, others' heads in rivals, GRPO in
grpo.
"""

import sys
from functools import partial

import torch
from fastsched_kernels import averaging as average
from fastsched_kernels import linear
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import Objective

from bench.device.checks import averaging_check, head_check, kernels
from bench.device.grpo import grpo
from bench.device.peaked import peaked
from bench.device.rivals import FIGURES, RIVALS, rival
from bench.device.rows import DEVICE, MAIN, ODD, OUT, PUBLISHED, SMALL, Case, Head, Shape, inputs, measure, padded, row, table, try_case


def head(shape: Shape = MAIN, part: str = "head") -> None:
    x = inputs(shape)
    for what, case in (floor(x) | ours(x)).items():
        try_case(part, what, case, x)


def head_odd() -> None:
    head(ODD, "head_odd")


def published() -> None:
    """The shapes that others published figures for, and the figures."""
    for shape in PUBLISHED:
        x = inputs(shape)
        for what, case in (floor(x) | {k: v for k, v in ours(x).items() if k in BARE}).items():
            try_case("published", f"{shape}: {what}", case, x)
    for what, ms in FIGURES.items():
        row("published", what, ms=ms, note="as published, not measured here")


def floor(x: Head) -> dict[str, Case]:
    cases = {"three bare GEMMs": Case(lambda: gemms(x, torch.bfloat16), 3)}
    if DEVICE.type == "cuda":  # no product of a CPU writes fp32 from bf16
        cases["three bare GEMMs, fp32 logits"] = Case(lambda: gemms(x, torch.float32), 3)
    return cases


@torch.no_grad()
def gemms(x: Head, logits: torch.dtype) -> None:
    """The floor: what the head multiplies, in buffers laid out as its own."""
    n, weight = len(x.hidden), x.weight
    dz = padded(weight.new_zeros(min(n, 4096), len(weight)))
    z = dz if logits == dz.dtype else padded(dz.to(logits))
    for i in range(0, n, 4096):
        rows = x.hidden[i : i + 4096]
        if z is dz:
            torch.mm(rows, weight.t(), out=z[: len(rows)])
        else:
            torch.mm(rows, weight.t(), out_dtype=logits, out=z[: len(rows)])
        dz[: len(rows)] @ weight
        dz[: len(rows)].t() @ rows


BARE = ("ours", "ours, bf16 logits")


def ours(x: Head) -> dict[str, Case]:
    """With fp32 logits, the default on CUDA, unless they say bf16."""
    n = len(x.hidden)
    order = torch.rand(n, generator=torch.Generator(DEVICE).manual_seed(1), device=DEVICE)
    ref = {"ref_hidden": x.hidden.detach() + 0.01, "ref_weight": x.weight.detach().clone()}

    def case(gemms=3.0, kept=1.0, logits_dtype=torch.float32, **options) -> Case:
        weights = (order < kept).float() / n
        share = float((weights > 0).float().mean())
        loss = lambda: linear.policy_loss(x.hidden, x.weight, x.target, advantage=x.advantage, token_weight=weights,
                                          logits_dtype=logits_dtype, **options).loss.backward()
        return Case(loss, gemms and gemms * share)

    def custom():
        loss = lambda logp, entropy, kl, tokens: -tokens["a"] * (logp - logp.detach()).exp() / n
        linear.linear_token_loss(x.hidden, x.weight, x.target, loss, tokens={"a": x.advantage}, logits_dtype=torch.float32).loss.backward()

    exact = {"kl": "exact", "kl_coef": 0.1, **ref}
    return {
        "ours": case(),
        "ours, bf16 logits": case(logits_dtype=torch.bfloat16),
        "ours, entropy": case(entropy_coef=0.01),
        "ours, custom loss": Case(custom, 3),
        "ours, recompute": case(4.0, compute="recompute"),
        "ours, kept 0.5": case(kept=0.5),
        "ours, kept 0.2": case(kept=0.2),
        "ours, column filter 2^-13": case(None, filter_eps=2.0**-13),
        "ours, exact KL": case(4.0, **exact),
        "ours, exact KL, bf16 logits": case(4.0, logits_dtype=torch.bfloat16, **exact),
    }


def compilations() -> None:
    """Compilations of the policy kernel over 20 lengths and 5 settings of the coefficients, by real launches: one for bf16 logits, one for
    fp32 logits with dlogits in bf16.
    """
    from fastsched_kernels.rows_triton import INTERPRETED, policy_kernel

    fast = choose(DEVICE, torch.bfloat16, "triton")
    for n in range(1, 21):
        o = Objective(0.1 * (n % 5), 1.0, entropy_coef=0.01 * (n % 5), clip_low=0.1, clip_high=0.05 * n)
        x = padded(torch.zeros(n, ODD.vocabulary, dtype=torch.bfloat16, device=DEVICE))
        target = torch.zeros(2 * n, dtype=torch.long, device=DEVICE)[n:]
        fast.policy_rows_(x, target, None, o, 1.0, None, target.float(), True)
        fast.policy_rows_(padded(x.float()), target, None, o, 1.0, None, None, True, None, x)
    if INTERPRETED:
        row("compilations", "20 lengths, 5 settings", note="interpreted: nothing compiles")
    else:
        count = sum(len(c[0]) for c in policy_kernel.device_caches.values())
        row("compilations", "20 lengths, 5 settings", count=count, ok=count == 2)


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


PARTS = {f.__name__: f for f in (kernels, peaked, head_check, head, head_odd, published, compilations, averaging, grpo, table)}
PARTS |= {name: partial(rival, name) for name in RIVALS}

if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    PARTS[sys.argv[1]]()
