"""Where a token lies in its response, which tokens are kept, and sums by decile; nothing here waits for the device.

T packed response tokens (responses one after another), B responses, L tokens of one response, S the share that is cut.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from fastsched_kernels.table import on_device

Proxy = Literal["suffix", "prefix", "entropy"]
_SLACK = 1e-6  # floor(100 * 0.29) is 28 in binary floating point


class Trajectory(NamedTuple):
    keep: Tensor  # [T] bool
    decile: Tensor  # [T] int64, 0..9: tenth of the response in which the token lies
    sequence: Tensor  # [T] int64, response of each token


class DecileSums(NamedTuple):
    entropy: Tensor  # [10] fp64
    kl: Tensor  # [10] fp64
    count: Tensor  # [10] int64


def trajectory_keep(
    lengths: Tensor,
    s: float | Tensor,
    *,
    proxy: Proxy = "suffix",
    entropy: Tensor | None = None,
    total: int | None = None,
) -> Trajectory:
    """Keep mask of the trajectory-percentile schedule (TP-Schedule, arXiv 2605.25381) and its rival proxies.

    lengths: [B] integer tokens of each response, 0 allowed. s in [0, 1], a float or a scalar tensor. `total` is
    sum(lengths); without it a CUDA tensor costs one host round trip.
    suffix: keep t >= min(floor(L s), L - 1), so that at least the last token stays. prefix: the first max(1, ceil((1 -
    s) L)) tokens. entropy: the max(1, ceil((1 - s) L)) tokens of highest `entropy` [T] of each response, the earlier
    one at a tie.
    """
    lengths = lengths.long()
    total = int(lengths.sum()) if total is None else total
    sequence = torch.repeat_interleave(torch.arange(lengths.numel(), device=lengths.device), lengths, output_size=total)
    starts = lengths.cumsum(0) - lengths
    position = torch.arange(total, device=lengths.device) - starts.index_select(0, sequence)
    length = lengths.index_select(0, sequence)
    s = on_device(s, lengths.device, torch.float64)
    if proxy == "suffix":
        keep = position >= torch.minimum((length * s + _SLACK).floor().long(), length - 1)
    else:
        rank = position if proxy == "prefix" else _entropy_rank(entropy, sequence, starts)
        keep = rank < ((1.0 - s) * length - _SLACK).ceil().clamp(min=1).long()
    return Trajectory(keep, position * 10 // length.clamp(min=1), sequence)


def _entropy_rank(entropy: Tensor | None, sequence: Tensor, starts: Tensor) -> Tensor:
    if entropy is None or entropy.shape != sequence.shape:
        raise ValueError(f"proxy='entropy' needs the entropy of every response token, [{sequence.numel()}]")
    by_entropy = torch.argsort(entropy, descending=True, stable=True)
    order = by_entropy[torch.argsort(sequence[by_entropy], stable=True)]
    rank = torch.empty_like(order)
    rank[order] = torch.arange(order.numel(), device=order.device) - starts[sequence[order]]
    return rank


def decile_sums(decile: Tensor, entropy: Tensor, kl: Tensor, keep: Tensor) -> DecileSums:
    """Sums of entropy and KL [T] and token counts over the kept tokens of each tenth of the responses."""
    slot = torch.where(keep, decile, 10)
    zeros = torch.zeros(11, dtype=torch.float64, device=decile.device)
    sums = [zeros.index_add(0, slot, x.double())[:10] for x in (entropy, kl)]
    return DecileSums(*sums, zeros.long().index_add(0, slot, torch.ones_like(slot))[:10])
