"""What the compiled kernels read and write, by name: one layout for Python, Triton and C++ (csrc/table.h).

Every number of a token is a runtime value in an fp32 table, so none ever compiles anything; only flags and the kind of KL are
structure. `layout` is compared with the C++ list when the compiled ops are loaded. R rows.
"""

from enum import IntEnum, IntFlag
from typing import NamedTuple

import torch
from torch import Tensor

from fastsched_kernels.reference import KL_KINDS, Number, Objective


class RowState(NamedTuple):
    """Statistics [R] (fp32; fp64 for fp64 logits) and what the gradient needs of them; z and r are scaled logits, p = softmax(z)."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor  # KL(p || q), NaN without reference logits
    top: Tensor  # max z; 0 for a row of nothing but -inf
    log_sum: Tensor  # log sum exp(z - top); -inf for such a row
    mean: Tensor  # E_p[z - top]
    gap: Tensor  # E_p[(z - top) - (r - ref_top)]
    ref_top: Tensor


class Coefficients(NamedTuple):
    """dloss/dlogp, dloss/dentropy, dloss/dkl of each row [R]."""

    logp: Tensor
    entropy: Tensor
    kl: Tensor


class PolicyRows(NamedTuple):
    """What one launch says about each row, fp32 (fp64 for fp64 logits)."""

    loss: Tensor  # [R] token_weight included
    logp: Tensor  # [R]
    entropy: Tensor  # [R]
    kl: Tensor  # [R] the KL that the loss used; NaN for kl="none"
    ratio: Tensor  # [R]
    clipped: Tensor  # [R] bool
    size: Tensor  # [R] |dloss/dlogp| + |dloss/dentropy| + |dloss/dkl|


class Column(IntEnum):
    """Columns of the table of numbers [R, len(Column)]; all but the last three are fields of Objective."""

    ADVANTAGE = 0
    TOKEN_WEIGHT = 1
    OLD_LOGP = 2
    REF_LOGP = 3
    KL_COEF = 4
    ENTROPY_COEF = 5
    CLIP_LOW = 6
    CLIP_HIGH = 7
    DUAL_CLIP = 8
    ROLLOUT_WEIGHT = 9
    DISTILL = 10
    TEMPERATURE = 11
    TARGET_LOGIT = 12
    REF_TARGET_LOGIT = 13


class Flag(IntFlag):
    """Bits of a launch's flags."""

    ON_POLICY = 1
    CISPO = 2
    HAS_TARGET_LOGIT = 4
    BACKWARD = 8
    HAS_REF_TARGET_LOGIT = 16


def _in_order(name: str, words: tuple[str, ...]) -> type[IntEnum]:
    return IntEnum(name, [word.upper() for word in words], start=0)


KLIndex = _in_order("KLIndex", KL_KINDS)
State = _in_order("State", RowState._fields)
Coefficient = _in_order("Coefficient", Coefficients._fields)
Result = _in_order("Result", PolicyRows._fields)


def layout() -> dict[str, int]:
    """{"column.advantage": 0, ...}: every name and its offset, bit or index."""
    groups = {"column": Column, "flag": Flag, "kl": KLIndex, "state": State, "coefficient": Coefficient, "result": Result}
    return {f"{group}.{member.name.lower()}": member.value for group, members in groups.items() for member in members}


def objective_table(o: Objective, n: int, temperature: Number, target_logit: Tensor | None, ref_target_logit: Tensor | None,
                    device: torch.device) -> Tensor:
    """[n, len(Column)] fp32; an absent number is 0, which no kernel reads."""
    numbers = {"temperature": temperature, "target_logit": target_logit, "ref_target_logit": ref_target_logit}
    values = (numbers[c.name.lower()] if c.name.lower() in numbers else getattr(o, c.name.lower()) for c in Column)
    return torch.stack([on_device(0.0 if x is None else x, device).expand(n) for x in values], dim=1)


def objective_flags(o: Objective, target_logit: Tensor | None, ref_target_logit: Tensor | None, backward: bool) -> int:
    return int(
        Flag.ON_POLICY * (o.old_logp is None)
        | Flag.CISPO * (o.surrogate == "cispo")
        | Flag.HAS_TARGET_LOGIT * (target_logit is not None)
        | Flag.HAS_REF_TARGET_LOGIT * (ref_target_logit is not None)
        | Flag.BACKWARD * backward
    )


def kl_index(o: Objective) -> int:
    return KLIndex[o.kl.upper()].value


def policy_rows(result: Tensor) -> PolicyRows:
    """[len(Result), R] as the kernels return it."""
    rows = PolicyRows(*result.unbind(0))
    return rows._replace(clipped=rows.clipped != 0)


def derivatives(loss: Tensor, leaves: list[Tensor]) -> Coefficients:
    """Of a loss [R] whose rows depend on their own logp, entropy and kl only."""
    if not loss.requires_grad:
        return Coefficients(*(torch.zeros_like(v) for v in leaves))
    grads = torch.autograd.grad(loss.sum(), leaves, allow_unused=True)
    return Coefficients(*(torch.zeros_like(v) if g is None else g for g, v in zip(grads, leaves, strict=True)))


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
