"""The numbers of each token as one fp32 table for the compiled kernels: all of them runtime values, so none ever
compiles anything.
"""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from fastsched_kernels.reference import KL_KINDS, Number, Objective

COLUMNS = (
    "advantage",
    "token_weight",
    "old_logp",
    "ref_logp",
    "kl_coef",
    "entropy_coef",
    "clip_low",
    "clip_high",
    "dual_clip",
    "rollout_weight",
    "distill",
    "temperature",
    "target_logit",
)
ON_POLICY, CISPO, HAS_TARGET_LOGIT, BACKWARD = 1, 2, 4, 8


class PolicyRows(NamedTuple):
    """What one launch says about each row, fp32 (fp64 for fp64 logits)."""

    loss: Tensor  # [R] token_weight included
    logp: Tensor  # [R]
    entropy: Tensor  # [R]
    kl: Tensor  # [R] the KL that the loss used; NaN for kl="none"
    ratio: Tensor  # [R]
    clipped: Tensor  # [R] bool
    size: Tensor  # [R] |dloss/dlogp| + |dloss/dentropy| + |dloss/dkl|


def objective_table(o: Objective, n: int, temperature: Number, target_logit: Optional[Tensor], device: torch.device) -> Tensor:
    """[n, len(COLUMNS)] fp32; an absent number is 0, which no kernel reads."""
    numbers = [*(getattr(o, name) for name in COLUMNS[:-2]), temperature, target_logit]
    return torch.stack([on_device(0.0 if x is None else x, device).expand(n) for x in numbers], dim=1)


def objective_flags(o: Objective, target_logit: Optional[Tensor], backward: bool) -> int:
    return (
        ON_POLICY * (o.old_logp is None)
        | CISPO * (o.surrogate == "cispo")
        | HAS_TARGET_LOGIT * (target_logit is not None)
        | BACKWARD * backward
    )


def kl_index(o: Objective) -> int:
    return KL_KINDS.index(o.kl)


def policy_rows(result: Tensor) -> PolicyRows:
    """[7, R] as the kernels return it."""
    loss, logp, entropy, kl, ratio, clipped, size = result.unbind(0)
    return PolicyRows(loss, logp, entropy, kl, ratio, clipped != 0, size)


def number_vector(value: Number, n: int, device: torch.device) -> Tensor:
    """A scalar as [1], a per-token number as [n], fp32 contiguous."""
    vector = on_device(value, device).reshape(-1).contiguous()
    if vector.numel() not in (1, n):
        raise ValueError(f"a per-token number has {vector.numel()} entries for {n} tokens")
    return vector


def on_device(value: Number, device: torch.device, dtype: torch.dtype = torch.float32) -> Tensor:
    """A number of the host is filled in, not copied: a copy would wait for the device."""
    if isinstance(value, Tensor):
        return value.to(device, dtype)
    return torch.full((), value, dtype=dtype, device=device)
