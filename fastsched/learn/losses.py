"""The table of losses: a row a loss, the choices in which they differ side by side (algorithms.md 4.1, 5.2).

B responses of this rank, P prompts, G responses a prompt. A new loss is a row, and its name in the Literal of `learner.loss`.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from fastsched.groups import group_advantages


@dataclass(frozen=True)
class Loss:
    surrogate: Literal["clip", "cispo", "rpg"]
    """clip: min(r A, clip(r) A); cispo: clip(r) A log pi, the weight without gradient; rpg: the form of `learner.rpg`, dual clip on r."""
    level: Literal["token", "sequence"]
    """r of each token, or one of each response: the geometric mean of its tokens' ratios."""
    normaliser: Literal["response", "tokens", "length"]
    """What divides the sum: mean over responses of the mean over kept tokens, mean over all kept tokens, or mean over responses of the
    sum over `rollout.max_new_tokens`."""
    advantage: Literal["std", "mean", "none"]
    """R - mean of the group divided by its standard deviation, R - mean, or none of the reward."""
    distill: float
    """Weight of log pi_teacher - log pi in the advantage, to which `learner.distill` adds."""
    clip: tuple[float, float] | None
    """Lower and upper clip that it was published with; None: no clip, or none that was stated. For `learner.clip`; nothing reads it."""
    arxiv: str

    def __post_init__(self):
        if self.surrogate == "rpg" and (self.level, self.distill) != ("token", 0.0):
            raise ValueError("rpg has ratios of tokens and no distillation term")


LOSSES = {
    #               surrogate level       normaliser  advantage distill clip           arxiv
    "grpo":    Loss("clip",  "token",    "response", "std",    0.0,   (0.2, 0.2),     "2402.03300"),
    "dapo":    Loss("clip",  "token",    "tokens",   "std",    0.0,   (0.2, 0.28),    "2503.14476"),
    "dr_grpo": Loss("clip",  "token",    "length",   "mean",   0.0,   (0.2, 0.2),     "2503.20783"),
    "gspo":    Loss("clip",  "sequence", "response", "std",    0.0,   (3e-4, 4e-4),   "2507.18071"),
    "cispo":   Loss("cispo", "token",    "tokens",   "std",    0.0,   None,           "2506.13585"),
    "opd":     Loss("clip",  "token",    "tokens",   "none",   1.0,   None,           "2306.13649"),
    "rpg":     Loss("rpg",   "token",    "tokens",   "std",    0.0,   (0.2, 0.28),    "2505.17508"),
}  # fmt: skip


def token_weights(loss: Loss, kept: np.ndarray, total_kept: float, total_responses: float, max_new_tokens: int) -> np.ndarray:
    """Weight of each kept token of every response, [B] from kept counts [B], by the loss's normaliser.

    `total_kept` and `total_responses` are sums over the global batch, all ranks.
    """
    kept = np.maximum(kept, 1).astype(np.float64)
    return {
        "response": 1.0 / (kept * max(total_responses, 1)),
        "tokens": np.full_like(kept, 1.0 / max(total_kept, 1)),
        "length": np.full_like(kept, 1.0 / (max(total_responses, 1) * max_new_tokens)),
    }[loss.normaliser]


def reward_advantages(loss: Loss, rewards: np.ndarray) -> np.ndarray:
    """[P * G] float64, finite, of rewards [P, G]."""
    if loss.advantage == "none":
        return np.zeros(rewards.size)
    return group_advantages(rewards, normalise_std=loss.advantage == "std").reshape(-1)
