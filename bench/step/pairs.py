"""Interleaved rounds into medians: every round holds one process of each side, and only what ran side by side is compared."""

from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

PHASES = ("sampling", "scoring", "learning", "sync", "other", "total")
WARMUP = 1
"""Steps at the start of a process that are not counted: caches fill and memory is first touched."""

Step = Mapping[str, float]


class Spread(NamedTuple):
    """Median of the rounds, with the smallest and the largest."""

    median: float
    low: float
    high: float


class Row(NamedTuple):
    """One quantity on both sides, and the peer's over ours, round by round."""

    ours: float
    peer: float
    ratio: Spread | None  # None where ours is 0


def spread(values: Sequence[float]) -> Spread:
    return Spread(median(values), min(values), max(values))


def typical(steps: Sequence[Step], name: str) -> float:
    """Median over the counted steps of one process."""
    return median(step[name] for step in steps[WARMUP:])


def peak(steps: Sequence[Step]) -> float:
    """VmHWM of one process after its last step, GB."""
    return steps[-1]["memory_gb"]


def pair(ours: Sequence[float], peer: Sequence[float]) -> Row:
    """ours, peer: one figure a round, in the same order."""
    ratio = spread([b / a for a, b in zip(ours, peer, strict=True)]) if all(ours) else None
    return Row(median(ours), median(peer), ratio)


def compare(rounds: Sequence[tuple[Sequence[Step], Sequence[Step]]]) -> dict[str, Row]:
    """Seconds by phase, peak memory and response length of (ours, the peer's) rounds."""
    rows = {name: pair(*([typical(steps, name) for steps in side] for side in zip(*rounds, strict=True))) for name in PHASES}
    rows["memory_gb"] = pair(*([peak(steps) for steps in side] for side in zip(*rounds, strict=True)))
    rows["length"] = pair(*([typical(steps, "length") for steps in side] for side in zip(*rounds, strict=True)))
    return rows


def fastest(trials: Mapping[str, dict], candidates: Mapping[str, dict]) -> str | None:
    """The tried configuration with our optimizer whose counted steps took least; None where none worked."""
    worked = {name: trial["seconds"] for name, trial in trials.items() if "seconds" in trial and not candidates[name].get("other")}
    return min(worked, key=worked.get) if worked else None
