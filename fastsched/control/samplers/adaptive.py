"""The success window (control_plane.md 3): bin weights that hold mean success inside `scheduler.window`."""

import numpy as np

from fastsched.control.samplers.bins import BinSampler
from fastsched.control.window import Success, window_weights


class WindowSampler(BinSampler):
    def weigh(self, success: Success) -> np.ndarray:
        return window_weights(success, self.available, self.cfg)
