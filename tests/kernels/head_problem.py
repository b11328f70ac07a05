"""One policy-loss problem, its truth by autograd on the whole [N, V] in fp64, and every option of the loss."""

import torch
from fastsched_kernels import reference
from fastsched_kernels.linear import policy_loss
from fastsched_kernels.reference import Objective
from fastsched_kernels.testing import seeded

N, H, V = 37, 24, 101


def problem(dtype=torch.float64, n=N, v=V, seed=0):
    g = seeded(seed)
    rand = lambda *shape: torch.randn(*shape, generator=g, dtype=torch.float64)
    tensors = dict(hidden=rand(n, H), weight=rand(v, H) * 0.5, bias=rand(v), ref_hidden=rand(n, H), ref_weight=rand(v, H) * 0.5)
    tensors = {k: x.to(dtype) for k, x in tensors.items()}
    numbers = dict(advantage=rand(n), token_weight=torch.rand(n, generator=g, dtype=torch.float64) / n)
    logits = tensors["hidden"].double() @ tensors["weight"].double().t()
    target = torch.randint(v, (n,), generator=g)
    base = torch.log_softmax(logits, -1).gather(-1, target[:, None]).squeeze(-1)
    old, ref_logp = base + 0.3 * rand(n), base + 0.3 * rand(n)
    tensors["ref_bias"] = rand(v).to(dtype)
    return tensors, numbers, target, old, ref_logp


def truth(tensors, target, options, dtype=torch.float64, upstream=1.0):
    """(loss, per-row results, gradients) by autograd on the whole [N, V]."""
    leaves = {k: tensors[k].to(dtype).detach().requires_grad_() for k in ("hidden", "weight", "bias") if k in tensors}
    logits = leaves["hidden"] @ leaves["weight"].t() + leaves.get("bias", 0.0)
    ref = None
    if "ref_hidden" in tensors:
        ref = tensors["ref_hidden"].to(dtype) @ tensors["ref_weight"].to(dtype).t() + tensors["ref_bias"].to(dtype)
    o = {k: x for k, x in options.items() if k not in ("level", "compute")}
    temperature, softcap = o.pop("temperature", 1.0), o.pop("softcap", None)
    clip, dual = o.pop("clip", (0.2, 0.2)), o.pop("dual_clip", None)
    low, high = (float("inf"),) * 2 if clip is None else clip
    objective = Objective(clip_low=low, clip_high=high, dual_clip=float("inf") if dual is None else dual, **o)
    out = reference.policy_loss(logits, target, objective, ref_logits=ref, temperature=temperature, softcap=softcap)
    loss = out.loss.sum()
    (loss * upstream).backward()
    return loss.detach(), out, {k: x.grad for k, x in leaves.items()}


def ours(tensors, target, options, upstream=1.0, **more):
    leaves = {k: tensors[k].detach().clone().requires_grad_() for k in ("hidden", "weight", "bias") if k in tensors}
    rest = {k: x for k, x in tensors.items() if k not in leaves}
    out = policy_loss(leaves["hidden"], leaves["weight"], target, bias=leaves.get("bias"), **rest, **options, **more)
    (out.loss * upstream).backward()
    return out.loss.detach(), out, {k: x.grad for k, x in leaves.items()}


per_token = torch.rand(N, generator=seeded(348), dtype=torch.float64)
"""With this seed every ratio stays 3 % away from where an option begins to clip it: no rounding of bf16 decides what is clipped."""
OPTIONS = {
    "plain": {},
    "on_policy": {"old_logp": None},
    "no_clip": {"clip": None},
    "clip_asymmetric": {"clip": (0.05, 0.4)},
    "clip_per_token": {"clip": (per_token * 0.2, per_token * 0.5)},
    "dual_clip": {"dual_clip": 1.1},
    "dual_clip_per_token": {"dual_clip": 1 + per_token * 0.2},
    "cispo": {"surrogate": "cispo"},
    "rollout_weight": {"rollout_weight": per_token},
    "entropy": {"entropy_coef": 0.3},
    "entropy_per_token": {"entropy_coef": per_token},
    "k1": {"kl": "k1", "kl_coef": 0.4},
    "k2": {"kl": "k2", "kl_coef": 0.4},
    "k3": {"kl": "k3", "kl_coef": 0.4},
    "exact": {"kl": "exact", "kl_coef": 0.4},
    "exact_per_token": {"kl": "exact", "kl_coef": per_token},
    "temperature": {"temperature": 0.7},
    "temperature_per_token": {"temperature": 0.5 + per_token},
    "softcap": {"softcap": 2.0},
    "distill": {"distill": 0.5},
    "sequence": {"level": "sequence", "sequence": torch.arange(N) // 8},
    "sequence_exact": {"level": "sequence", "sequence": torch.arange(N) % 5, "kl": "exact", "kl_coef": per_token},
    "recompute": {"compute": "recompute", "kl": "k3", "kl_coef": 0.4, "entropy_coef": per_token},
    "everything": {
        "kl": "exact",
        "kl_coef": per_token,
        "entropy_coef": 0.2,
        "temperature": 0.5 + per_token,
        "softcap": 3.0,
        "clip": (0.1, 0.3),
        "dual_clip": 2.0,
        "rollout_weight": per_token,
        "distill": 0.1,
    },
}
