"""VCRL (arXiv 2509.19803, algorithms.md 3): prompts whose groups vary most, kept in a memory bank and drawn from it again.

Group variance p = sigma^2 / sigma^2_max with sigma^2 = k (G - k) / (G (G - 1)), k of G scored responses successes. The threshold
kappa and the rules of the bank are not published; ours are those of config.VcrlConfig. State: the bank, nothing a prompt.
"""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.window import Success
from fastsched.groups import successes_by_row
from fastsched.types import Features, Outcomes, Selection


def group_variance(good: np.ndarray, scored: np.ndarray) -> np.ndarray:
    """[P] p in [0, 1]; NaN for fewer than two scored responses. sigma^2_max is G / (4 (G - 1)) for even G, (G + 1) / (4 G) for odd."""
    largest = (scored // 2) * ((scored + 1) // 2)
    return np.where(scored > 1, good * (scored - good) / np.maximum(largest, 1), np.nan)


class VarianceSampler(PromptSampler):
    """`bank_share` of a batch from the bank, highest variance first; the rest in deck order. A visit scores a prompt anew."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        self.bank: dict[int, tuple[float, int]] = {}  # row -> (variance, step of the last visit)

    def draw(self, count: int, success: Success) -> Selection:
        free = self.bank.keys() - set(self.avoided(count, np.zeros(0, np.int64)).tolist())
        ranked = sorted(free, key=lambda row: (-self.bank[row][0], self.bank[row][1], row))
        banked = np.array(ranked[:self.dithered(self.cfg.vcrl.bank_share * count)], np.int64)
        return self.selection(np.concatenate([banked, self.in_order(count - len(banked), banked)]))

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Prompts with p >= kappa enter the bank or stay, others leave it; a group with fewer than two scores changes nothing."""
        rows, good, scored = successes_by_row(outcomes.rows, outcomes.rewards, success.r_threshold)
        for row, variance in zip(rows.tolist(), group_variance(good, scored).tolist(), strict=True):
            if variance >= self.cfg.vcrl.kappa:
                self.bank[row] = (variance, success.steps)
            elif variance < self.cfg.vcrl.kappa:
                self.bank.pop(row, None)
        over = len(self.bank) - self.cfg.vcrl.bank
        if over > 0:
            for row in sorted(self.bank, key=lambda row: (*self.bank[row], row))[:over]:
                del self.bank[row]

    def own_state(self) -> dict:
        return {"bank": [[row, *entry] for row, entry in self.bank.items()]}

    def load_own_state(self, state: dict) -> None:
        self.bank = {row: (variance, visit) for row, variance, visit in state["bank"]}
