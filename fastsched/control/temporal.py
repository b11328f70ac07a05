"""The schedules S(tau) of algorithms.md 1.1."""

import math

from fastsched.config import TemporalConfig, require


def schedule_ends(total_steps: int, cfg: TemporalConfig) -> tuple[int, int]:
    """Steps between which S falls; ConfigError when the run is too short for the two to differ."""
    first, last = math.floor(total_steps * cfg.start), math.floor(total_steps * cfg.end)
    require(last > first, f"scheduler.temporal: start {cfg.start} and end {cfg.end} of {total_steps} steps are both "
                          f"step {first}; use more steps or a wider range")
    return first, last


def temporal_s(step: int, total_steps: int, cfg: TemporalConfig) -> float:
    """Share S of each response left out of the loss at 1-based `step`; 0 trains every token. In [0, magnitude].

    With p = clip((step - s0) / (s1 - s0), 0, 1) and m the magnitude: linear m (1 - p); gamma (m (1 - p))^gamma; sigmoid
    m (f(p) - f(1)) / (f(0) - f(1)), f(x) = 1 / (1 + exp(8 (x - 0.5))).
    """
    if cfg.mode == "none":
        return 0.0
    first, last = schedule_ends(total_steps, cfg)
    progress = min(max((step - first) / (last - first), 0.0), 1.0)
    if cfg.mode == "sigmoid":
        return cfg.magnitude * (_falling(progress) - _falling(1.0)) / (_falling(0.0) - _falling(1.0))
    linear = cfg.magnitude * (1 - progress)
    return linear**cfg.gamma if cfg.mode == "gamma" else linear


def _falling(x: float) -> float:
    return 1 / (1 + math.exp(8 * (x - 0.5)))
