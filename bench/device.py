"""The parts of bench/device.sh, each a process of its own that appends rows to $OUT/device.jsonl; `table` prints them all.

SMALL=1 takes small shapes and, without a GPU, Triton's interpreter.
"""

import json
import os
import random
import subprocess
import sys
import time
from pathlib import Path

import torch
from fastsched_kernels import linear, reference, rows
from fastsched_kernels.averaging import ema_and_drift_
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import KL_KINDS, Objective
from fastsched_kernels.testing import relative_error

SMALL = os.environ.get("SMALL") == "1"
OUT = Path(os.environ.get("OUT", "/tmp/fastsched-device"))
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
N, H, V, ODD_V = (48, 64, 1024, 1009) if SMALL else (16384, 4096, 151936, 50257)


def row(part: str, what: str, **numbers) -> None:
    with open(OUT / "device.jsonl", "a") as file:
        file.write(json.dumps({"part": part, "what": what, **numbers}) + "\n")


def measure(function, repeats: int = 3) -> tuple[float, float]:
    """(best milliseconds, peak GiB beyond what was allocated before)."""
    cuda = DEVICE.type == "cuda"
    function()
    if cuda:
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    best = float("inf")
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        if cuda:
            torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return best * 1e3, (torch.cuda.max_memory_allocated() - before) / 2**30 if cuda else 0.0


def kernels() -> None:
    """Every Triton kernel against fp64 truth and PyTorch in the same dtype: gradients of the row kernels, all loss
    options.
    """
    n, fast = (4, choose(DEVICE, torch.float32, "triton")) if SMALL else (64, choose(DEVICE, torch.float32, "triton"))
    for v in (1009,) if SMALL else (151936, 50257, 128257, 17):
        for dtype in (torch.bfloat16, torch.float32):
            for kl in KL_KINDS:
                check_policy(fast, n, v, dtype, kl)
            check_stats(fast, n, v, dtype)


def draw(n: int, v: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    stride = -(-v // 16) * 16
    return (torch.randn(n, stride, generator=g, device=DEVICE) * 2).to(dtype)[:, :v]


def check_policy(fast, n: int, v: int, dtype: torch.dtype, kl: str) -> None:
    x, ref, target = draw(n, v, dtype, 0), draw(n, v, dtype, 1), torch.randint(v, (n,), device=DEVICE)
    a = torch.linspace(-1, 1, n, device=DEVICE)
    o = Objective(a, 1.0 / n, torch.full((n,), -8.0, device=DEVICE), torch.full((n,), -8.0, device=DEVICE), kl, 0.3, 0.1, 0.2, 0.3)
    by_autograd = []
    for wide in (torch.float64, dtype):
        leaf = x.to(wide).requires_grad_()
        reference.policy_loss(leaf, target, o, ref_logits=ref.to(wide), temperature=0.8).loss.sum().backward()
        by_autograd.append(leaf.grad)
    mine = x.clone()
    fast.policy_rows_(mine, target, ref if kl == "exact" else None, o, 0.8, None, None, True)
    report_error("policy_rows_", v, dtype, f"kl={kl}", mine, *by_autograd)


def check_stats(fast, n: int, v: int, dtype: torch.dtype) -> None:
    x, ref, target = draw(n, v, dtype, 0), draw(n, v, dtype, 1), torch.randint(v, (n,), device=DEVICE)
    c = rows.Coefficients(*torch.randn(3, n, device=DEVICE))
    by_autograd = []
    for wide in (torch.float64, dtype):
        leaf = x.to(wide).requires_grad_()
        s = reference.token_stats(leaf, target, ref_logits=ref.to(wide), softcap=20.0)
        (c.logp * s.logp + c.entropy * s.entropy + c.kl * s.kl).sum().backward()
        by_autograd.append(leaf.grad)
    state = fast.row_stats(x, target, ref, 1.0, 20.0)
    mine = fast.row_dlogits_(x.clone(), target, ref, state, c, 1.0, 20.0)
    report_error("row_stats, row_dlogits_", v, dtype, "softcap", mine, *by_autograd)


def report_error(what, v, dtype, note, mine, truth, eager) -> None:
    error, allowed = relative_error(mine, truth), relative_error(eager, truth)
    ok = error <= allowed + (1e-2 if dtype == torch.bfloat16 else 1e-5)
    row("kernels", f"{what} V={v} {str(dtype)[6:]} {note}", error=error, eager_error=allowed, ok=ok)


def head(v: int = V, part: str = "head") -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    dtype = torch.bfloat16
    hidden = torch.randn(N, H, generator=g, device=DEVICE).to(dtype).requires_grad_()
    weight = (torch.randn(v, H, generator=g, device=DEVICE) * 0.03).to(dtype).requires_grad_()
    ref_hidden, ref_weight = hidden.detach() + 0.01, weight.detach().clone()
    target, a = torch.randint(v, (N,), generator=g, device=DEVICE), torch.randn(N, generator=g, device=DEVICE)
    order = torch.rand(N, generator=g, device=DEVICE)

    def ours(kept=1.0, **options):
        weights = (order < kept).float() / N
        return lambda: linear.policy_loss(hidden, weight, target, advantage=a, token_weight=weights, **options).loss.backward()

    def custom():
        loss = lambda logp, entropy, kl, tokens: -tokens["a"] * (logp - logp.detach()).exp() / N
        linear.linear_token_loss(hidden, weight, target, loss, tokens={"a": a}).loss.backward()

    def gemms():
        with torch.no_grad():
            z = torch.empty(min(N, 4096), v, dtype=dtype, device=DEVICE)
            for i in range(0, N, 4096):
                x = hidden[i : i + 4096]
                torch.mm(x, weight.t(), out=z[: len(x)])
                z[: len(x)] @ weight
                z[: len(x)].t() @ x

    cases = {
        "three bare GEMMs": gemms,
        "ours": ours(),
        "ours, entropy": ours(entropy_coef=0.01),
        "ours, custom loss": custom,
        "ours, recompute": ours(compute="recompute"),
        "ours, kept 0.5": ours(0.5),
        "ours, kept 0.2": ours(0.2),
        "ours, column filter 2^-13": ours(filter_eps=2.0**-13),
        "ours, exact KL": ours(kl="exact", kl_coef=0.1, ref_hidden=ref_hidden, ref_weight=ref_weight),
    }
    cases |= rivals(hidden, weight, target, a)
    for what, function in cases.items():
        try_case(part, what, function, 6e-12 * N * H * v, hidden, weight)


def rivals(hidden, weight, target, a) -> dict:
    def eager():
        logp = torch.log_softmax((hidden @ weight.t()).float(), -1).gather(-1, target[:, None]).squeeze(-1)
        (-(logp - logp.detach()).exp() * a / N).sum().backward()

    cases = {"eager": eager, "torch.compile": torch.compile(eager)}
    try:
        from liger_kernel.chunked_loss.grpo_loss import LigerFusedLinearGRPOLoss
    except ImportError:
        return cases
    loss, batch = LigerFusedLinearGRPOLoss(beta=0.0, compiled=not SMALL, use_ref_model=False, chunk_size=1), 8
    shape = (batch, N // batch)
    y = target.view(shape)
    return cases | {"liger": lambda: loss(hidden.view(*shape, H), weight, y, torch.ones_like(y), a[:batch])[0].backward()}


def try_case(part: str, what: str, function, teraflop: float, *leaves) -> None:
    """One row; running out of memory or a rival's failure to compile is a result, not the end of the part."""

    def fresh():
        for leaf in leaves:
            leaf.grad = None
        function()

    try:
        ms, gb = measure(fresh)
        row(part, what, ms=ms, tflops=teraflop / ms * 1e3, peak_gib=gb)
    except (RuntimeError, NotImplementedError) as error:
        row(part, what, note=f"{type(error).__name__}: {str(error).splitlines()[0][:80]}")
    if DEVICE.type == "cuda":
        torch.cuda.empty_cache()


def head_odd() -> None:
    head(ODD_V, "head_odd")


def compilations() -> None:
    """Compilations of the policy kernel over 20 lengths and 5 settings of the coefficients, by real launches."""
    from fastsched_kernels.policy_loss import INTERPRETED, policy_kernel

    fast = choose(DEVICE, torch.bfloat16, "triton")
    for n in range(1, 21):
        o = Objective(0.1 * (n % 5), 1.0, entropy_coef=0.01 * (n % 5), clip_low=0.1, clip_high=0.05 * n)
        fast.policy_rows_(
            draw(n, ODD_V, torch.bfloat16, n),
            torch.zeros(n, dtype=torch.long, device=DEVICE),
            None,
            o,
            1.0,
            None,
            None,
            True,
        )
    if INTERPRETED:
        row("compilations", "20 lengths, 5 settings", note="interpreted: nothing compiles")
    else:
        row("compilations", "20 lengths, 5 settings", count=sum(len(c[0]) for c in policy_kernel.device_caches.values()))


def averaging() -> None:
    size = 10_000 if SMALL else 20_000_000
    avg = [torch.randn(size, device=DEVICE) for _ in range(30)]
    for dtype in (torch.float32, torch.bfloat16):
        params = [(x + 0.01).to(dtype) for x in avg]
        ms, gb = measure(lambda p=params: ema_and_drift_(avg, p, 0.99))
        row(
            "averaging",
            f"{30 * size:,} parameters, {str(dtype)[6:]}",
            ms=ms,
            gb_per_s=30 * size * (8 + dtype.itemsize) / ms / 1e6,
            peak_gib=gb,
        )


def coin(prompt, response, answer, meta) -> float:
    """A reward that no model can learn, so that every group carries a gradient."""
    return float(random.random() < 0.5)


def grpo() -> None:
    """GRPO with transformers generate and DeepSpeed ZeRO-2 on a random Qwen3, of 0.6 B parameters unless SMALL."""
    folder, run = OUT / "model", OUT / "run"
    make_model(folder)
    steps = 2 if SMALL else 30
    options = {
        "model.name": folder,
        "model.dtype": "float32" if SMALL else "bfloat16",
        "rollout.engine": "transformers",
        "rollout.max_new_tokens": 8 if SMALL else 128,
        "learner.zero_stage": 2,
        "train.steps": steps,
        "reward.kind": "bench.device:coin",
        "train.prompts_per_step": 4 if SMALL else 32,
        "data.size": 2000,
        "train.eval_at_ends": "false",
        "log.plots": "false",
        "log.tensorboard": "false",
        "run_dir": run,
    }
    arguments = [x for key, value in options.items() for x in (f"--{key}", str(value))]
    subprocess.run(["rm", "-rf", str(run)], check=True)
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "fastsched.cli", "train", "--preset", "tiny-cpu", *arguments], check=True)
    seconds = time.perf_counter() - start
    steps_done = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    last = steps_done[-1]
    row(
        "grpo",
        f"{len(steps_done)} updates, {seconds:.0f} s in all",
        ms=1e3 * last["t_step"],
        learn_ms=1e3 * last["t_learn"],
        tokens_per_s=last["tokens_per_s"],
        peak_gib=last["peak_mem_gb"],
    )


def make_model(folder: Path) -> None:
    from fastsched.engines.tiny import random_tiny, tiny_tokenizer

    if SMALL:
        random_tiny(folder)
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def failed(part: str, code: str) -> None:
    row(part, "the part as a whole", note=f"ended with code {code}" + (", out of time" if code in ("124", "137") else ""))


def table() -> None:
    lines = [json.loads(line) for line in (OUT / "device.jsonl").read_text().splitlines()]
    name = torch.cuda.get_device_name() if DEVICE.type == "cuda" else "CPU, no measurement"
    print(f"\n{name}, torch {torch.__version__}, N={N} H={H} V={V}")
    for line in lines:
        numbers = {k: v for k, v in line.items() if k not in ("part", "what")}
        shown = "  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in numbers.items())
        print(f"{line['part']:13} {line['what']:46} {shown}")


PARTS = {f.__name__: f for f in (kernels, head, head_odd, compilations, averaging, grpo, failed, table)}

if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    PARTS[sys.argv[1]](*sys.argv[2:])
