"""Others' heads, forward and backward, at our shapes and at those that others published figures for.

Each runs in a process of its own: one that is not installed, does not compile or takes the device down with it is named with its reason
and ends nothing else. The losses differ, the products do not: three of bf16 hidden states and weight, four for liger_scaled, which forms
the logits again in backward and gives the entropy as well.
"""

from functools import partial
from typing import Callable

import torch

from bench.device.rows import DEVICE, MAIN, ODD, PUBLISHED, SMALL, Case, Head, inputs, reason, row, try_case

Run = Callable[[Head], object]


def eager() -> Run:
    def run(x: Head):
        logp = torch.log_softmax((x.hidden @ x.weight.t()).float(), -1).gather(-1, x.target[:, None]).squeeze(-1)
        (-(logp - logp.detach()).exp() * x.advantage / len(logp)).sum().backward()

    return run


def compiled() -> Run:
    def loss(hidden, weight, target, advantage):
        logp = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, target[:, None]).squeeze(-1)
        return (-(logp - logp.detach()).exp() * advantage / len(logp)).sum()

    loss = torch.compile(loss, dynamic=False)
    return lambda x: loss(*x).backward()


def liger_grpo() -> Run:
    from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss

    loss, groups = LigerFusedLinearGRPOLoss(beta=0.0, compiled=not SMALL, use_ref_model=False, chunk_size=1), 8

    def run(x: Head):
        y = x.target.view(groups, -1)
        loss(x.hidden.view(*y.shape, -1), x.weight, y, torch.ones_like(y), x.advantage[:groups])[0].backward()

    return run


def liger_ce() -> Run:
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    return lambda x: liger_fused_linear_cross_entropy(x.hidden, x.weight, x.target, reduction="sum").backward()


def liger_scaled() -> Run:
    from liger_kernel.ops import LigerFusedLinearScaledCrossEntropyFunction as loss

    def run(x: Head):
        nll, entropy = loss.apply(x.hidden, x.weight, x.target, return_entropy=True)
        (nll.sum() - 0.01 * entropy.float().sum()).backward()

    return run


def quack() -> Run:
    from quack.linear_cross_entropy import chunked_linear_cross_entropy

    return lambda x: chunked_linear_cross_entropy(x.hidden, x.weight, x.target, reduction="sum").backward()


RIVALS = {"eager": (eager, 3), "compiled": (compiled, 3), "liger_grpo": (liger_grpo, 3), "liger_ce": (liger_ce, 3),
          "liger_scaled": (liger_scaled, 4), "quack": (quack, 3)}

FIGURES = {
    "4096 x 4096 x 128256: QuACK 0.6.1, H200": 17.33,
    "4096 x 4096 x 128256: liger_ce in CuTe DSL, H200": 18.06,
    "4096 x 4096 x 128256: liger_ce in Triton, H200": 141.0,
    "16384 x 4096 x 131072: liger_scaled, H100": 103.65,
}
"""ms, forward and backward, as the libraries themselves state them; read on 2026-08-22."""


def rival(name: str) -> None:
    """Rows of one rival; its name is the part's."""
    make, gemms = RIVALS[name]
    try:
        run = make()
    except ImportError as error:
        row(name, "not run", note=f"{reason(error)}; put its wheels into $WHEELS")
        return
    for shape in (MAIN, *PUBLISHED, ODD):
        head = inputs(shape)
        try_case(name, str(shape), Case(partial(run, head), gemms), head)
        del head
        if DEVICE.type == "cuda":
            torch.cuda.empty_cache()
