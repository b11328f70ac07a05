"""Bin weights as they are given, 0 included: the one sampler of bins without a floor."""

import numpy as np

from fastsched.config import require
from fastsched.control.samplers.bins import BinSampler


class FixedSampler(BinSampler):
    def start(self, prompts: int) -> np.ndarray:
        """[K] `scheduler.fixed_weights`, equal over the bins that hold prompts by default. ConfigError where they do not fit the data."""
        if self.cfg.fixed_weights is None:
            return super().start(prompts)
        weights = np.array(self.cfg.fixed_weights, dtype=np.float64)
        key = "scheduler.fixed_weights"
        require(len(weights) == len(self.sizes), f"{key}: {len(weights)} weights for {len(self.sizes)} difficulty bins")
        empty = np.flatnonzero((weights > 0) & ~self.available).tolist()
        require(not empty, f"{key}: bins {empty} have weight but hold no prompt; set their weight to 0")
        held = int(self.sizes[weights > 0].sum())
        require(held >= prompts, f"{key}: the bins with weight hold {held} prompts, a batch needs {prompts} distinct ones; "
                                 "lower train.prompts_per_step")
        return weights / weights.sum()

    def fixed_options(self) -> dict:
        return {"scheduler.fixed_weights": list(self.cfg.fixed_weights or ())}
