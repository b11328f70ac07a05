"""KL-regularised policy gradients (RPG, arXiv 2505.17508; algorithms.md 4.1) as the weight of grad log pi.

w = pi / pi_old, v = pi / pi_ref, so that pi_ref / pi_old = w / v. With pi_ref = pi_old the forms are the published table; with a
reference of its own the forward forms carry pi_ref / pi_old, since the tokens were sampled from pi_old.
"""

import torch
from torch import Tensor

LOG_LIMIT = 20.0


def rpg_weight(form: str, advantage: Tensor, log_w: Tensor, log_v: Tensor, beta: Tensor | float, clip: tuple[float, float],
               dual_clip: float | None) -> tuple[Tensor, Tensor]:
    """(weight [R] of grad log pi in the direction of ascent, clipped [R] bool).

    fkl  w A + beta pi_ref / pi_old;  ufkl  w (A - beta) + beta pi_ref / pi_old;  rkl  w (A - beta (log v + 1));
    urkl  w (A - beta log v). The factor of w is an advantage under PPO's clip to [1 - lower, 1 + upper] and, where it is
    negative, the dual clip: a clipped token keeps only the term without w.
    """
    w = log_w.clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    if form in ("rkl", "urkl"):
        regularised, forward = advantage - beta * (log_v + (form == "rkl")), torch.zeros_like(w)
    else:
        regularised = advantage - beta * (form == "ufkl")
        forward = beta * (log_w - log_v).clamp(-LOG_LIMIT, LOG_LIMIT).exp()
    clipped = (regularised > 0) & (w > 1 + clip[1]) | (regularised < 0) & (w < 1 - clip[0])
    if dual_clip is not None:
        clipped = clipped | (regularised < 0) & (w > dual_clip)
    return torch.where(clipped, 0.0, w * regularised) + forward, clipped
