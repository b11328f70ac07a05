"""Every prompt equally often: the baseline."""

import numpy as np

from fastsched.control.samplers.bins import BinSampler


class UniformSampler(BinSampler):
    """A bin comes as often as it holds prompts."""

    def start(self, prompts: int) -> np.ndarray:
        return self.sizes / self.sizes.sum()
