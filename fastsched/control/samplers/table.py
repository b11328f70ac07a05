"""Which prompts come next: the class of every `scheduler.kind`, one line each.

A sampler has `weights` (the bins' shares of its last draw), `draw(count, success) -> Selection`, `observe(outcomes, success)`,
`fixed_options()`, `notes()`, `state_dict()` and `load_state_dict(state)`; what it decides depends on its state and on `success` alone.
What the rest of a run must know of it stands in config/samplers.py under the same name.
"""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.adaptive import WindowSampler
from fastsched.control.samplers.adarft import AdaRFTSampler
from fastsched.control.samplers.ads import AdsSampler
from fastsched.control.samplers.bins import BinSampler
from fastsched.control.samplers.dots import PredictingSampler
from fastsched.control.samplers.fixed import FixedSampler
from fastsched.control.samplers.greso import SkippingSampler
from fastsched.control.samplers.learned import ProgressSampler
from fastsched.control.samplers.mopps import PosteriorSampler
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.samplers.replay import ReplaySampler
from fastsched.control.samplers.sec import SecSampler
from fastsched.control.samplers.speed import ScreeningSampler
from fastsched.control.samplers.uniform import UniformSampler
from fastsched.control.samplers.vcrl import VarianceSampler
from fastsched.types import Features

Sampler = BinSampler | PromptSampler | AdsSampler

CLASSES: dict[str, type[Sampler]] = {
    "adaptive": WindowSampler,
    "fixed": FixedSampler,
    "uniform": UniformSampler,
    "sec": SecSampler,
    "adarft": AdaRFTSampler,
    "mopps": PosteriorSampler,
    "greso": SkippingSampler,
    "ads": AdsSampler,
    "vcrl": VarianceSampler,
    "replay": ReplaySampler,
    "speed": ScreeningSampler,
    "dots": PredictingSampler,
    "learned": ProgressSampler,
}


def make_sampler(cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None) -> Sampler:
    """The sampler of `scheduler.kind`. bins: [N] unsigned integers in [0, K); sizes: [K] int64; prompts: the batch size P, at most N.

    `features`: where `scheduler.traits.features` asks for them.
    """
    return CLASSES[cfg.kind](cfg, bins, sizes, prompts, seed, features)
