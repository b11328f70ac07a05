"""What each response token counts in the loss: kept or not, its advantage, its share of the KL coefficient.

T tokens of B responses one after another, L tokens of one response, S the temporal schedule (algorithms.md 1).
"""

from typing import NamedTuple, Sequence

import numpy as np
import torch
from fastsched_kernels.trajectory import trajectory_keep

from fastsched.config import SchedulerConfig
from fastsched.types import Knobs

ENTROPY_PROXIES = ("entropy", "advantage")
ALPHA, KAPPA = 0.4, 2.0  # of the entropy bonus, as published


class Credit(NamedTuple):
    keep: np.ndarray  # [T] bool, tokens that carry loss
    advantage: np.ndarray  # [T] float64
    kl_scale: np.ndarray | None  # [T] float32, factor of the KL coefficient; None: 1


def needs_entropy(cfg: SchedulerConfig, knobs: Knobs) -> bool:
    """Whether this step's credit, or the threshold of the next step's gate, rests on the entropy of every token."""
    return cfg.kl_gate.enabled or cfg.temporal.proxy in ENTROPY_PROXIES and knobs.temporal_s > 0


def token_credit(cfg: SchedulerConfig, knobs: Knobs, lengths: np.ndarray, advantages: np.ndarray, *, entropy: np.ndarray | None,
                 tp_score: np.ndarray | None, seeds: Sequence[Sequence[int]]) -> Credit:
    """lengths and advantages [B]; entropy [T] where `needs_entropy`, tp_score [T] for that proxy; a seed for each response."""
    temporal, s = cfg.temporal, knobs.temporal_s
    advantage = np.repeat(np.asarray(advantages, np.float64), lengths)
    if temporal.proxy == "advantage" and s > 0:
        advantage = entropy_weighted(advantage, entropy, s)
    gated = cfg.kl_gate.enabled and knobs.kl_gate is not None
    return Credit(keep_mask(lengths, s, temporal.proxy, entropy=entropy, tp_score=tp_score, seeds=seeds), advantage,
                  kl_gate(entropy, knobs.kl_gate, cfg.kl_gate.width) if gated else None)


def keep_mask(lengths: np.ndarray, s: float, proxy: str, *, entropy: np.ndarray | None = None,
              tp_score: np.ndarray | None = None, seeds: Sequence[Sequence[int]] = ()) -> np.ndarray:
    """Tokens that carry the loss, bool [T]; all of them at S = 0 and for proxy `advantage`.

    tp_score keeps tokens of TP-Score >= S, and of a response without any its last one; random keeps every token with probability 1 - S,
    drawn from the seed of its response; the rest as in `trajectory_keep`.
    """
    if s == 0 or proxy == "advantage":
        return np.ones(int(lengths.sum()), bool)
    if proxy == "tp_score":
        keep, ends = tp_score >= s, np.cumsum(lengths)
        kept = np.diff(np.cumsum(keep)[ends - 1], prepend=0)
        keep[ends[kept == 0] - 1] = True
        return keep
    if proxy == "random":
        drawn = [np.random.default_rng(seed).random(n) for seed, n in zip(seeds, lengths.tolist(), strict=True)]
        return np.concatenate([np.zeros(0), *drawn]) < 1 - s
    entropies = None if entropy is None else torch.from_numpy(entropy)
    return trajectory_keep(torch.from_numpy(lengths), s, proxy=proxy, entropy=entropies).keep.numpy()


def entropy_weighted(advantage: np.ndarray, entropy: np.ndarray, s: float) -> np.ndarray:
    """A + S min(ALPHA H, |A| / KAPPA) for each token: the entropy bonus of arXiv 2506.14758 under the schedule (algorithms.md 1.4)."""
    return advantage + s * np.minimum(ALPHA * entropy, np.abs(advantage) / KAPPA)


def kl_gate(entropy: np.ndarray, h0: float, width: float) -> np.ndarray:
    """sigmoid((h0 - H_t) / width) for each token, float32 [T] (control_plane.md 5)."""
    return (1 / (1 + np.exp(-np.clip((h0 - entropy.astype(np.float64)) / width, -60, 60)))).astype(np.float32)
