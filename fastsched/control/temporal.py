"""The trajectory-percentile schedule S(tau) of algorithms.md 1.1."""

import math

from fastsched.config import TemporalConfig, require


def schedule_ends(total_steps: int, cfg: TemporalConfig) -> tuple[int, int]:
    """Steps between which S falls; ConfigError when the run is too short for the two to differ."""
    first, last = math.floor(total_steps * cfg.start), math.floor(total_steps * cfg.end)
    require(last > first, f"scheduler.temporal: start {cfg.start} and end {cfg.end} of {total_steps} steps are both "
                          f"step {first}; use more steps or a wider range")
    return first, last


def temporal_s(step: int, total_steps: int, cfg: TemporalConfig) -> float:
    """Share S of each response cut from its front at 1-based `step`; 0 trains every token.

    linear: S = magnitude * (1 - p), p = clip((step - s0) / (s1 - s0), 0, 1).
    """
    if cfg.mode == "none":
        return 0.0
    first, last = schedule_ends(total_steps, cfg)
    progress = min(max((step - first) / (last - first), 0.0), 1.0)
    return cfg.magnitude * (1 - progress)
