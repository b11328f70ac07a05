"""When a hard-copied reference becomes the policy again (RPG, arXiv 2505.17508; algorithms.md 4.1)."""

from dataclasses import dataclass, replace

from fastsched.config import SchedulerConfig
from fastsched.control.smoothing import smooth
from fastsched.types import Stats


@dataclass(frozen=True)
class Reference:
    age: int = 0  # updates since the reference was the policy
    kl: float | None = None  # moving average of the KL to it since then, nats


def copy_due(state: Reference, cfg: SchedulerConfig) -> bool:
    """Whether the reference is renewed before the next update: every `copy_every` updates, or once the KL is above `copy_kl`."""
    old = cfg.copy_every > 0 and state.age >= cfg.copy_every
    far = cfg.copy_kl is not None and state.kl is not None and state.kl > cfg.copy_kl
    return old or far


def observe_reference(state: Reference, stats: Stats, cfg: SchedulerConfig) -> Reference:
    """After a step: a renewal that was due has happened before its update; a KL that is not finite changes no average."""
    if copy_due(state, cfg):
        state = Reference()
    return replace(state, age=state.age + 1, kl=smooth(state.kl, stats.kl, cfg.statistics_beta))
