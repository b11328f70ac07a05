"""What the loop itself remembers between steps."""

from dataclasses import dataclass

import numpy as np

from fastsched.config import Config
from fastsched.types import Outcomes


@dataclass
class Progress:
    """Part of every checkpoint."""

    step: int = 0
    tokens_total: int = 0
    prompts_total: int = 0
    responses_total: int = 0
    flat_in_row: int = 0
    unscored_in_row: int = 0
    accuracy: float | None = None  # held out, when this step was evaluated

    def complete(self, cfg: Config) -> bool:
        return cfg.train.spent(self.step, self.responses_total, self.tokens_total)

    def count(self, outcomes: Outcomes, *, signal_free: bool) -> None:
        """One more step, and what was rolled out in it."""
        self.step += 1
        self.tokens_total += int(outcomes.lengths.sum())
        self.prompts_total += outcomes.new_prompts
        self.responses_total += int(outcomes.sampled.sum())
        self.flat_in_row = self.flat_in_row + 1 if signal_free else 0
        self.unscored_in_row = 0 if np.isfinite(outcomes.rewards).any() else self.unscored_in_row + 1
