"""What runs in the reward pool's worker processes: loading the scorers, and the score of one response. Light imports only."""

import math
import signal
import sys
import time
from dataclasses import dataclass
from typing import Any, Mapping, NamedTuple, Sequence

from fastsched.config import RewardPart
from fastsched.data.scorers import LARGEST_REWARD, LoadedScorer, Seen, load_scorer, run_scorer
from fastsched.data.worker_group import lead_group

TOGETHER_S = 0.1
"""How long several responses of one message may take before the rest go alone."""
GOOD = ("ok", "unreadable")


@dataclass(frozen=True)
class RewardItem:
    """One response to score."""

    text: str
    prompt: str
    answer: str
    meta: Mapping[str, Any]
    seen: Seen = Seen()


class Outcome(NamedTuple):
    """Of one response. `kind` is "ok", "unreadable" (wrong, no failure), or one of the kinds of failure, whose reward is NaN."""

    kind: str
    reward: float
    message: str
    parts: tuple[float, ...]  # the reward of each of `reward.parts`, without its weight


class Worker:
    """State of a worker process: its scorers, or why there are none."""

    parts: tuple[RewardPart, ...] = ()
    scorers: tuple[LoadedScorer, ...] = ()
    problem = ""


def start_worker(parts: tuple[RewardPart, ...], task: str, directory: str) -> None:
    """Prepare a worker: it dies at once when told to or when the trainer is gone, and finds the user's modules."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    lead_group()
    sys.path.insert(0, directory)
    try:
        Worker.parts, Worker.scorers = parts, tuple(load_scorer(part.kind, task, part.require) for part in parts)
    except BaseException as error:  # the user's module: whatever it raises becomes the message of a ConfigError
        Worker.problem = f"{type(error).__name__}: {error}"


def loading_problem() -> str:
    return Worker.problem


def score_some(items: Sequence[RewardItem]) -> list[Outcome]:
    """Outcomes of the first items, as many as `TOGETHER_S` seconds give, at least one."""
    end, outcomes = time.monotonic() + TOGETHER_S, [score_one(items[0])]
    for item in items[1:]:
        if time.monotonic() > end:
            break
        outcomes.append(score_one(item))
    return outcomes


def score_one(item: RewardItem) -> Outcome:
    if Worker.problem:
        return Outcome("raised", math.nan, Worker.problem, ())
    given = item.prompt, item.text, item.answer, item.meta, item.seen
    return weigh(Worker.parts, [run_scorer(scorer, *given) for scorer in Worker.scorers])


def weigh(parts: Sequence[RewardPart], outcomes: Sequence[tuple[str, float, str]]) -> Outcome:
    """The weighted sum. One part that failed makes the response's reward unknown, one that is unreadable counts 0."""
    values = tuple(value for _, value, _ in outcomes)
    for part, (kind, _, message) in zip(parts, outcomes, strict=True):
        if kind not in GOOD:
            return Outcome(kind, math.nan, f"{part.label}: {message}" if len(parts) > 1 else message, values)
    total = sum(part.weight * value for part, value in zip(parts, values, strict=True))
    if not abs(total) <= LARGEST_REWARD:
        return Outcome("nonfinite", math.nan, f"the weighted rewards add up to {total}", values)
    unread = [message for kind, _, message in outcomes if kind == "unreadable"]
    return Outcome("unreadable" if unread else "ok", total, "; ".join(unread), values)
