"""An exact fingerprint of every tensor, equal on both sides of a weight sync whatever layout the sampler keeps it in.

A tensor [..., K] is a set of rows of K elements (of a vector each element is a row). The bits of a row, taken as 64-bit words w_k, give
the sum of c_k w_k with fixed odd c_k; the sums are scrambled and added, all modulo 2^64. One changed element of a row always changes its
sum; several that all lie in the top quarter of their words (bf16) cancel with a chance of 2^-15, and must in every changed row. The order
of rows does not matter and a row of zeros adds nothing, so that fused matrices are sums over their slices, shards of rows add up, and a
padded vocabulary needs no care; shards of columns add up before they are scrambled.
"""

from functools import cache
from typing import Iterable, Mapping, Sequence

import torch
from fastsched_kernels.sums import weighted_row_sums

NamedTensors = Iterable[tuple[str, torch.Tensor]]
WORD = 8  # bytes
UNSIGNED = {1: (torch.uint8, 0xFF), 2: (torch.int16, 0xFFFF), 4: (torch.int32, 0xFFFFFFFF)}
TIED_HEAD = "lm_head.weight"


def scrambled(values: torch.Tensor) -> torch.Tensor:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014), int64 -> int64; 0 stays 0."""
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1)):
        values = values ^ ((values >> shift) & ((1 << (64 - shift)) - 1))
        values = values * (factor - 2**64 if factor >= 2**63 else factor)
    return values


@cache
def multipliers(start: int, count: int, device: torch.device) -> torch.Tensor:
    """[count] int64: the odd c_k of words start..start + count - 1."""
    return scrambled(torch.arange(start + 1, start + count + 1, device=device)) | 1


@torch.no_grad()
def row_sums(tensor: torch.Tensor, start: int = 0) -> torch.Tensor:
    """[rows] int64, modulo 2^64; `start` is the place of the first column in the whole tensor."""
    rows = tensor.detach().reshape(-1, tensor.shape[-1] if tensor.ndim > 1 else 1).contiguous()
    each = WORD // rows.element_size()
    if rows.shape[1] % each == start % each == 0 and rows.data_ptr() % WORD == 0:
        return weighted_row_sums(rows.view(torch.int64), multipliers(start // each, rows.shape[1] // each, rows.device))
    kind, mask = UNSIGNED[rows.element_size()]
    places = torch.arange(start, start + rows.shape[1], device=rows.device)
    shifts = (places % each) * (8 * rows.element_size())
    return weighted_row_sums(rows.view(kind).long() & mask, multipliers(0, start + rows.shape[1], rows.device)[places // each] << shifts)


def totals(sums: Sequence[torch.Tensor]) -> torch.Tensor:
    """[n] int64: the fingerprints of n tensors, of which these are the `row_sums`, in a few operations for all of them."""
    if not sums:
        return torch.zeros(0, dtype=torch.int64)
    ends = torch.tensor([0, *(len(rows) for rows in sums)], device=sums[0].device).cumsum(0)
    before = torch.cat([ends.new_zeros(1), scrambled(torch.cat(list(sums))).cumsum(0)])[ends]  # wraps, and so do the differences
    return before[1:] - before[:-1]


def fingerprints(named: NamedTensors, dtype: torch.dtype) -> dict[str, int]:
    """By Hugging Face name, of the values in `dtype`."""
    sums = {name: row_sums(tensor.detach().to(dtype)) for name, tensor in named}
    return dict(zip(sums, totals(list(sums.values())).tolist(), strict=True))


def differences(sent: Mapping[str, int], held: Mapping[str, int | None]) -> list[str]:
    """Names of tensors that the sampler holds and that are not those that were sent, in the order of sending.

    A head that was not sent is tied: it must be one of the tensors that were.
    """
    wrong = [name for name, value in sent.items() if name in held and held[name] != value]
    tied = TIED_HEAD in held and TIED_HEAD not in sent and held[TIED_HEAD] not in sent.values()
    return wrong + [TIED_HEAD] * tied
