"""Weights for the mismatch between learner and sampler (algorithms.md 5.1): pure functions of log-probabilities.

rho_t = pi_old / pi_sampler of one token; R trained tokens. Products and means run over a response's tokens of live rows, those
that carry loss. Everything is detached.
"""

from typing import Callable, Iterable, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fastsched.config import RolloutConfig
from fastsched.types import MicroBatch

LOG_LIMIT = 20.0
BOUNDS = {"token_tis": (0.0, 2.0), "sequence_tis": (0.0, 2.0), "token_mis": (0.5, 2.0), "sequence_mis": (0.0, 3.0),
          "icepop": (0.5, 5.0), "geometric": (0.999, 1.001)}
"""Default (floor, cap) by kind."""


class Correction(NamedTuple):
    weight: Tensor  # [R] float32
    ratio: Tensor  # [R] rho, unbounded but for LOG_LIMIT
    capped: Tensor  # [R] bool
    rejected: Tensor  # [R] bool, weight 0


def log_ratio(old_logp: Tensor, sampler_logp: Tensor) -> Tensor:
    """log rho [R] within +-LOG_LIMIT; exactly 0 where either log-probability is missing (NaN or infinite)."""
    difference = old_logp - sampler_logp
    return torch.where(difference.isfinite(), difference, 0.0).clamp(-LOG_LIMIT, LOG_LIMIT)


def correct(cfg: RolloutConfig, old_logp: Tensor, sampler_logp: Tensor, response: Tensor, live: Tensor) -> Correction:
    """token_tis min(rho, C), sequence_tis min(prod rho, C); token_mis and icepop rho where floor <= rho <= C, else 0; sequence_mis
    prod rho where it is at most C, else 0; geometric 1 where (prod rho)^(1/T) lies within the bounds, else 0. Then the veto.

    response [R] int64: the response of each token.
    """
    with torch.no_grad():
        token = log_ratio(old_logp, sampler_logp)
        log = token if cfg.correction in ("token_tis", "token_mis", "icepop") else _of_response(
            token, response, live, mean=cfg.correction == "geometric")
        floor, cap = bounds(cfg)
        ratio = log.exp()
        within = (ratio >= floor) & (ratio <= cap)
        if cfg.correction in ("token_tis", "sequence_tis"):
            weight, capped = ratio.clamp(max=cap), ratio > cap
        else:
            weight, capped = torch.where(within, 1.0 if cfg.correction == "geometric" else ratio, 0.0), torch.zeros_like(within)
        vetoed = _of_response((token.exp() < cfg.correction_veto).to(token.dtype), response, live, mean=False) > 0
        weight = torch.where(vetoed, 0.0, weight)
        return Correction(weight, token.exp(), capped & ~vetoed, weight == 0)


def mean_weight(cfg: RolloutConfig, micro_batches: Iterable[MicroBatch], all_reduce: Callable[[np.ndarray], np.ndarray]) -> float:
    """Mean weight over the trained tokens of the micro-batches of all ranks, all with old log-probabilities; 1 where all are 0."""
    total, count = 0.0, 0.0
    for micro in micro_batches:
        if micro.groups:
            live = torch.from_numpy(micro.token_weights) > 0
            arrays = (torch.from_numpy(a) for a in (micro.old_logp, micro.sampler_logp, micro.responses))
            total += float(correct(cfg, *arrays, live).weight[live].double().sum())
            count += float(live.sum())
    total, count = all_reduce(np.array([total, count]))
    return total / count if total > 0 else 1.0


def bounds(cfg: RolloutConfig) -> tuple[float, float]:
    """(floor, cap) of the configured kind."""
    floor, cap = BOUNDS[cfg.correction]
    return (floor if cfg.correction_floor is None else cfg.correction_floor,
            cap if cfg.correction_cap is None else cfg.correction_cap)


def _of_response(value: Tensor, response: Tensor, live: Tensor, *, mean: bool) -> Tensor:
    """Sum or mean of `value` over the live rows of each row's response, within +-LOG_LIMIT, spread back [R]."""
    size = int(response.max()) + 1 if response.numel() else 0
    zeros = value.new_zeros(size, dtype=torch.float64)
    total = zeros.index_add(0, response, torch.where(live, value, 0.0).double())
    if mean:
        total = total / zeros.index_add(0, response, live.double()).clamp(min=1)
    return total.clamp(-LOG_LIMIT, LOG_LIMIT)[response].to(value.dtype)
