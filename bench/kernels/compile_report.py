"""Every Triton kernel compiled for sm_90 on a machine without a GPU: registers, spills, shared memory, width of the
loads.

`python -m bench.kernels.compile_report` prints the table and exits 1 on a spill, or on a load narrower than 16 bytes in the
loop over a row, of bf16 and of fp32 logits. The kernels are compiled from real calls of their wrappers, so the divisibility
that the launcher infers is the one of a real launch; only the launch itself is left out.
"""

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import torch
import triton
from fastsched_kernels import rows_triton
from fastsched_kernels.reference import KL_KINDS, Objective
from fastsched_kernels.table import Coefficients, RowState, State
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver

VOCABULARIES = (151936, 50257, 128257)
LAYOUTS = {"bf16": (torch.bfloat16, None), "fp32": (torch.float32, None), "fp32->bf16": (torch.float32, torch.bfloat16)}
"""Logits and, where it is not in their place, the dtype of dlogits; the targets of bf16 logits are given in fp32."""
TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class Offline:
    """What compiling asks of a driver."""

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0


class Line(NamedTuple):
    kernel: str
    what: str
    registers: int
    spills: int  # spill loads and stores in the SASS
    local_bytes: int
    shared_bytes: int
    loop_load_bytes: int  # narrowest global load in a loop over the row; 0: the kernel has none
    faults: str


def compile_only():
    """From here on a launch compiles and returns."""
    driver.set_active(Offline())
    triton.JITFunction.__getitem__ = lambda self, grid: lambda *args, **kwargs: self.warmup(*args, grid=grid, **kwargs)


def compiled_kernels():
    for function in vars(rows_triton).values():
        if isinstance(function, triton.JITFunction) and function.device_caches:
            yield from ((function.__name__, kernel) for cache in function.device_caches.values() for kernel in cache[0].values())


def padded_logits(rows: int, v: int, dtype: torch.dtype | None) -> torch.Tensor | None:
    """As the head's buffer on CUDA: the row stride is a multiple of 16."""
    return None if dtype is None else torch.zeros(rows, -(-v // 16) * 16, dtype=dtype)[:, :v]


def objective(n: int, kl: str, on_policy: bool = False, surrogate: str = "clip", value: float = 0.1) -> Objective:
    old = None if on_policy else torch.zeros(n)
    return Objective(value, 1.0, old, torch.zeros(n), kl, value, value, value, value, 2 + value, 1.0, 0.0, surrogate)


def call_policy(v, layout, kl, on_policy=False, surrogate="clip", softcap=None, fine=None, backward=True, n=2, value=0.1, first=0):
    (dtype, out), exact = LAYOUTS[layout], kl == "exact"
    z = torch.zeros(n) if (layout == "bf16" if fine is None else fine) else None
    rows_triton.policy_rows_(
        padded_logits(n, v, dtype),
        torch.zeros(first + n, dtype=torch.long)[first:],
        padded_logits(n, v, dtype) if exact else None,
        objective(n, kl, on_policy, surrogate, value),
        1.0 + value,
        softcap,
        z,
        backward,
        z if exact else None,
        padded_logits(n, v, out),
    )


def call_stats(v, layout, with_ref, softcap=None, n=2, first=0):
    dtype, out = LAYOUTS[layout]
    x, ref = padded_logits(n, v, dtype), padded_logits(n, v, dtype) if with_ref else None
    target, temperature = torch.zeros(first + n, dtype=torch.long)[first:], torch.ones(first + n)[first:]
    z = torch.zeros(n) if layout == "bf16" else None
    fine = z, z if with_ref else None
    rows_triton.row_stats(x, target, ref, temperature, softcap, *fine)
    state, c = RowState(*torch.zeros(len(State), n)), Coefficients(*torch.zeros(3, n))
    rows_triton.row_dlogits_(x, target, ref, state, c, temperature, softcap, *fine, padded_logits(n, v, out))


def cases(every: bool):
    """(description, call): every structure of the row loops; with `every`, every combination of flags too."""
    for v, layout, softcap in itertools.product(VOCABULARIES, LAYOUTS, (None, 30.0)):
        shape = f"V={v} {layout}{' softcap' if softcap else ''}"
        for kl in KL_KINDS if every else ("none", "k3", "exact"):
            yield f"{shape} kl={kl}", lambda v=v, d=layout, k=kl, s=softcap: call_policy(v, d, k, softcap=s)
        for ref in (False, True):
            yield f"{shape} ref={ref}", lambda v=v, d=layout, r=ref, s=softcap: call_stats(v, d, r, s)
    flags = itertools.product((False, True), ("clip", "cispo"), (False, True), (False, True))
    for on_policy, surrogate, fine, backward in flags if every else [(True, "cispo", False, True), (False, "clip", False, False)]:
        yield (
            f"on_policy={on_policy} {surrogate} fine={fine} backward={backward}",
            lambda o=on_policy, s=surrogate, f=fine, b=backward: call_policy(50257, "bf16", "k3", o, s, None, f, b),
        )


def inspect(name: str, what: str, kernel) -> Line:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(kernel.asm["cubin"])
        cubin.flush()
        usage = _tool("cuobjdump", "--dump-resource-usage", cubin.name)
        sass = _tool("nvdisasm", "-c", cubin.name)
    numbers = {key: int(value) for key, value in re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)}
    spills = len(re.findall(r"\b(?:LDL|STL)\b", sass))
    narrowest = min((load_bytes(x) for x in loop_loads(sass)), default=0)
    local = numbers["LOCAL"] + numbers["STACK"]
    faults = []
    if spills or local:
        faults.append(f"{spills} spills, {local} B local")
    if 0 < narrowest < 16 and "combine" not in name:
        faults.append(f"{narrowest}-byte loads in the loop")
    return Line(name, what, numbers["REG"], spills, local, kernel.metadata.shared, narrowest, "; ".join(faults))


def loop_loads(sass: str) -> list[str]:
    """Global loads between a label and a backward branch to it."""
    lines, labels, loads = sass.splitlines(), {}, []
    for i, line in enumerate(lines):
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = i
        branch = re.search(r"\bBRA\S*\s.*`\((\.L_x_\d+)\)", line)
        if branch and branch[1] in labels and not _idle(lines, labels[branch[1]], i):
            loads += re.findall(r"\bLDG\S*", "\n".join(lines[labels[branch[1]] : i]))
    return loads


def _idle(lines: list[str], begin: int, end: int) -> bool:
    """The branch to itself that ends every program."""
    return not any("LDG" in x for x in lines[begin:end])


def load_bytes(instruction: str) -> int:
    width = re.search(r"\.(U8|S8|U16|S16|64|128)\b", instruction)
    return {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}[width[1]] if width else 4


def _tool(name: str, *args: str) -> str:
    return subprocess.run([TOOLS / name, *args], check=True, capture_output=True, text=True).stdout


def report(every: bool, only: str = "") -> list[Line]:
    """`only`: words that the description of a case must have."""
    compile_only()
    seen, lines = set(), []
    for what, call in cases(every):
        if not all(word in what.split() for word in only.split()):
            continue
        call()
        for name, kernel in compiled_kernels():
            if kernel.hash not in seen:
                seen.add(kernel.hash)
                lines.append(inspect(name, what, kernel))
    return lines


def compilations() -> dict[str, int]:
    """Compilations of the policy kernel over 20 lengths, each of a chunk that begins elsewhere, and over 5 settings of the
    coefficients, by the real launch path.
    """
    compile_only()
    kernel = rows_triton.policy_kernel
    counts = {}
    for n in range(1, 21):
        call_policy(50257, "bf16", "k3", n=n, first=n - 1)
    counts["20 lengths"] = sum(len(cache[0]) for cache in kernel.device_caches.values())
    for value in (0.0, 0.1, 0.25, 0.5, 1.0):
        call_policy(50257, "bf16", "k3", n=7, value=value)
    counts["and 5 settings of every coefficient"] = sum(len(cache[0]) for cache in kernel.device_caches.values())
    for n in range(1, 21):
        call_stats(50257, "bf16", True, n=n, first=n - 1)
    for name in ("target_kernel", "partial_kernel", "combine_kernel", "gradient_kernel"):
        counts[f"20 lengths, {name}"] = sum(len(cache[0]) for cache in vars(rows_triton)[name].device_caches.values())
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--every", action="store_true", help="every combination of flags, some minutes")
    parser.add_argument("--only", default="", metavar="WORDS", help='the cases whose description has these words: "fp32 ref=True"')
    parser.add_argument("--compilations", action="store_true", help="count compilations instead, as JSON")
    args = parser.parse_args()
    if args.compilations:
        print(json.dumps(compilations()))
        return 0
    lines = report(args.every, args.only)
    if not lines:
        parser.error(f"no case has the words {args.only!r}")
    print(f"{'kernel':18} {'compiled for':44} {'regs':>4} {'spills':>6} {'local':>5} {'shared':>6} {'load':>4}  faults")
    for x in lines:
        numbers = f"{x.registers:4} {x.spills:6} {x.local_bytes:5} {x.shared_bytes:6} {x.loop_load_bytes:4}"
        print(f"{x.kernel:18} {x.what:44} {numbers}  {x.faults}")
    return 1 if any(x.faults for x in lines) else 0


if __name__ == "__main__":
    sys.exit(main())
