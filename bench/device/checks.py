"""Is what runs on the device right? Row kernels, the whole head and the averaging against fp64 truth, no worse than PyTorch."""

import torch
from fastsched_kernels import averaging, linear, reference
from fastsched_kernels.implementations import choose
from fastsched_kernels.reference import KL_KINDS, Objective
from fastsched_kernels.table import Coefficients
from fastsched_kernels.testing import relative_error

from bench.device.rows import DEVICE, SMALL, padded, padded_empty, row

SLACK = {torch.bfloat16: 1e-2, torch.float32: 1e-5}


def report(part: str, what: str, dtype: torch.dtype, mine, truth, eager, slack: float = 0.0) -> None:
    error, allowed = relative_error(mine, truth), relative_error(eager, truth)
    row(part, f"{what} {str(dtype)[6:]}", error=error, eager_error=allowed, ok=error <= allowed + SLACK[dtype] + slack)


def kernels() -> None:
    """Every Triton kernel: gradients of the row kernels, all loss options; in place in rows that begin at multiples of 16, and in bf16
    beside fp32 logits.
    """
    fast, n = choose(DEVICE, torch.float32, "triton"), 4 if SMALL else 64
    for v, kinds in ((1009, KL_KINDS),) if SMALL else ((50257, KL_KINDS), (151936, ("k3", "exact")), (17, ("k3", "exact"))):
        for logits, out in ((torch.bfloat16, torch.bfloat16), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)):
            for kl in kinds if logits == out else kinds[-2:]:
                check_policy(fast, n, v, logits, out, kl)
            check_stats(fast, n, v, logits, out)


def draw(n: int, v: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    g = torch.Generator(DEVICE).manual_seed(seed)
    return padded((torch.randn(n, v, generator=g, device=DEVICE) * 2).to(dtype))


def place(x: torch.Tensor, out: torch.dtype) -> torch.Tensor | None:
    return None if x.dtype == out else padded_empty(x, out)


def of(x: torch.Tensor, out: torch.dtype) -> str:
    return "" if x.dtype == out else f" of {str(x.dtype)[6:]} logits"


def check_policy(fast, n: int, v: int, dtype: torch.dtype, out: torch.dtype, kl: str) -> None:
    x, ref, target = draw(n, v, dtype, 0), draw(n, v, dtype, 1), torch.randint(v, (n,), device=DEVICE)
    a, old = torch.linspace(-1, 1, n, device=DEVICE), torch.full((n,), -8.0, device=DEVICE)
    o = Objective(a, 1.0 / n, old, old, kl, 0.3, 0.1, 0.2, 0.3)
    by_autograd = []
    for wide in (torch.float64, dtype):
        leaf = x.to(wide).requires_grad_()
        reference.policy_loss(leaf, target, o, ref_logits=ref.to(wide), temperature=0.8).loss.sum().backward()
        by_autograd.append(leaf.grad)
    dx = place(x, out)
    fast.policy_rows_(x, target, ref if kl == "exact" else None, o, 0.8, None, None, True, None, dx)
    report("kernels", f"policy_rows_ V={v} kl={kl}{of(x, out)}", out, x if dx is None else dx, *by_autograd)


def check_stats(fast, n: int, v: int, dtype: torch.dtype, out: torch.dtype) -> None:
    x, ref, target = draw(n, v, dtype, 0), draw(n, v, dtype, 1), torch.randint(v, (n,), device=DEVICE)
    c = Coefficients(*torch.randn(3, n, device=DEVICE))
    by_autograd = []
    for wide in (torch.float64, dtype):
        leaf = x.to(wide).requires_grad_()
        s = reference.token_stats(leaf, target, ref_logits=ref.to(wide), softcap=20.0)
        (c.logp * s.logp + c.entropy * s.entropy + c.kl * s.kl).sum().backward()
        by_autograd.append(leaf.grad)
    state = fast.row_stats(x, target, ref, 1.0, 20.0)
    mine = fast.row_dlogits_(x, target, ref, state, c, 1.0, 20.0, None, None, place(x, out))
    report("kernels", f"row_stats, row_dlogits_ V={v}{of(x, out)}", out, mine, *by_autograd)


def head_check() -> None:
    """The whole head in every way it can be computed: loss and the gradients of hidden states, weight and bias; of bf16 hidden states
    with rounded logits and with fp32 ones.
    """
    n, h, chunk = (40, 32, 16) if SMALL else (300, 256, 128)
    for v, dtypes in ((129, SLACK),) if SMALL else ((1009, SLACK), (50257, (torch.bfloat16,))):
        for dtype in dtypes:
            for logits in dict.fromkeys((dtype, torch.float32)):
                for case in CASES:
                    check_head(case, Problem(n, h, v, dtype), chunk, logits)


class Problem:
    """A third of the rows has no weight, and NaN where the head must not look."""

    def __init__(self, n: int, h: int, v: int, dtype: torch.dtype):
        g = torch.Generator(DEVICE).manual_seed(0)
        rand = lambda *shape: torch.randn(*shape, generator=g, device=DEVICE)
        self.what, self.dtype, self.weighted = f"V={v}", dtype, torch.arange(n, device=DEVICE) % 3 != 0
        self.leaves = {"hidden": rand(n, h), "weight": rand(v, h) / h**0.5, "bias": rand(v) * 0.1}
        self.ref = {"ref_hidden": self.leaves["hidden"] + 0.3 * rand(n, h), "ref_weight": self.leaves["weight"], "ref_bias": rand(v) * 0.1}
        self.leaves, self.ref = ({k: x.to(dtype) for k, x in tensors.items()} for tensors in (self.leaves, self.ref))
        self.target = torch.randint(v, (n,), generator=g, device=DEVICE)
        with torch.no_grad():
            logp = reference.token_stats(self.logits(self.leaves), self.target).logp.float()
        far = torch.tensor([-0.5, -0.1, 0.1, 0.5], device=DEVICE)  # from the clip bounds, so that no rounding decides what is clipped
        self.numbers = {"advantage": rand(n), "token_weight": self.weighted / n, "entropy_coef": 0.05,
                        "old_logp": logp + far[torch.randint(4, (n,), generator=g, device=DEVICE)], "ref_logp": logp + 0.2 * rand(n)}

    @staticmethod
    def logits(leaves, wide: torch.dtype = torch.float64, prefix: str = "") -> torch.Tensor:
        hidden, weight, bias = (leaves[prefix + k].to(wide) for k in ("hidden", "weight", "bias"))
        return hidden @ weight.t() + bias


def check_head(case: str, p: Problem, chunk: int, logits: torch.dtype) -> None:
    loss, kl = CASES[case]
    by_autograd = []
    for wide in (torch.float64, p.dtype):
        leaves = {k: x.to(wide, copy=True).requires_grad_() for k, x in p.leaves.items()}
        o = Objective(**p.numbers, kl=kl, kl_coef=0.3, clip_low=0.2, clip_high=0.2)
        ref = p.logits(p.ref, wide, "ref_") if kl == "exact" else None
        total = reference.policy_loss(p.logits(leaves, wide), p.target, o, ref_logits=ref).loss.sum()
        total.backward()
        by_autograd.append([total.detach(), *(x.grad for x in leaves.values())])
    leaves = {k: x.clone() for k, x in p.leaves.items()}
    leaves["hidden"][~p.weighted] = torch.nan
    leaves = {k: x.requires_grad_() for k, x in leaves.items()}
    total, dropped = loss(p, leaves, kl, chunk, logits)
    total.backward()
    case = case if logits == p.dtype else f"{case}, {str(logits)[6:]} logits"
    for what, mine, *others in zip(("loss", *leaves), [total.detach(), *(x.grad for x in leaves.values())], *by_autograd, strict=True):
        report("head_check", f"{case} {p.what} {what}", p.dtype, mine, *others, slack=dropped)


def built_in(p: Problem, leaves, kl: str, chunk: int, logits: torch.dtype, **options) -> tuple[torch.Tensor, float]:
    """(loss, share that the column filter left out)."""
    out = linear.policy_loss(leaves["hidden"], leaves["weight"], p.target, bias=leaves["bias"], **p.numbers, kl=kl, kl_coef=0.3,
                             chunk_rows=chunk, logits_dtype=logits, implementation="triton", **(p.ref if kl == "exact" else {}), **options)
    return out.loss, float(out.dropped)


def custom(p: Problem, leaves, kl: str, chunk: int, logits: torch.dtype) -> tuple[torch.Tensor, float]:
    def loss(logp, entropy, kl_exact, tokens):
        return reference.token_loss(logp, entropy, kl_exact, Objective(**tokens, kl=kl, kl_coef=0.3, entropy_coef=0.05, clip_low=0.2,
                                                                       clip_high=0.2)).loss

    tokens = {k: x for k, x in p.numbers.items() if k != "entropy_coef"}
    out = linear.linear_token_loss(leaves["hidden"], leaves["weight"], p.target, loss, tokens=tokens, keep=p.weighted,
                                   bias=leaves["bias"], chunk_rows=chunk, logits_dtype=logits, implementation="triton",
                                   **(p.ref if kl == "exact" else {}))
    return out.loss, 0.0


CASES = {
    "one pass, k3": (built_in, "k3"),
    "one pass, exact KL": (built_in, "exact"),
    "recompute, k3": (lambda *a: built_in(*a, compute="recompute"), "k3"),
    "recompute, exact KL": (lambda *a: built_in(*a, compute="recompute"), "exact"),
    "custom loss, exact KL": (custom, "exact"),
    "column filter 2^-13": (lambda *a: built_in(*a, filter_eps=2.0**-13), "k3"),
}


def averaging_check() -> None:
    """fp32 and bf16; sizes below, at and beyond a vector, a block and a piece; pointers that no vector load takes."""
    sizes = (0, 1, 3, 4, 1023, 4096, 65_536, 65_536 + 7, 3 * 65_536 + 1)
    for dtype in (torch.float32, torch.bfloat16):
        for offset in (0, 1, 2):
            check_average(sizes, dtype, offset)


def check_average(sizes: tuple[int, ...], dtype: torch.dtype, offset: int) -> None:
    g = torch.Generator(DEVICE).manual_seed(0)
    avg = [torch.randn(n + offset, generator=g, device=DEVICE)[offset:] for n in sizes]
    params = [torch.zeros(n + offset, dtype=dtype, device=DEVICE)[offset:].copy_(a + 0.1) for n, a in zip(sizes, avg, strict=True)]
    new, drift, norm = reference.ema_and_drift(avg, params, 0.9)
    label = averaging.implementation(avg, params)
    out = averaging.ema_and_drift_(avg, params, 0.9)
    error = relative_error(torch.cat(avg), torch.cat(new))
    sums = max(relative_error(out.squared_drift, drift), relative_error(out.squared_norm, norm))
    ok = error <= 1e-6 and sums <= 1e-5 and label == "compiled"
    row("averaging", f"{label}, {str(dtype)[6:]}, offset {offset}", error=error, sums_error=sums, ok=ok)
