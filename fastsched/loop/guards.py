"""What ends a run before its last step: interrupts, guards, ranks that disagree, ranks that are gone."""

import os
import re
import signal
from dataclasses import asdict
from typing import Callable

import numpy as np

from fastsched.config import DONE, GUARD, INTERRUPTED, Config
from fastsched.engines.ranks import shortened
from fastsched.learn.learner import NonFiniteLimit
from fastsched.record.checkpoint import CheckpointError
from fastsched.types import Disagreement, EngineError, Knobs, Outcomes, Ranks

LOST = re.compile("closed by peer|reset by peer|Broken pipe|Timed out|timed out|Socket Timeout|remote process exited|NCCL", re.IGNORECASE)

RESUME = "the checkpoints are untouched: continue with --resume"
UNSCORED_STEPS = 3
"""Steps in a row without a single score after which a run stops: a reward that is broken, not one that fails now and then."""


def why_stopped(error: RuntimeError) -> str:
    """The message of an error that ends a run with exit code 3; any other error is raised again."""
    named = isinstance(error, (NonFiniteLimit, EngineError, CheckpointError, Disagreement))
    source = error.__cause__ if isinstance(error.__cause__, RuntimeError) else None if named else error
    if source and int(os.environ.get("WORLD_SIZE", 1)) > 1 and LOST.search(str(source)):
        reason = re.sub(r"^\[\S+\] ", "", str(source).splitlines()[0])  # without the line of the library's source
        return (f"another rank ended or cannot be reached any more ({shortened(reason, 160)}); its own log-rankN.txt (log.txt: rank 0) "
                f"says why; {RESUME}")
    if named:
        return f"{error}; {RESUME}" if type(error) is EngineError else str(error)
    raise error


def require_agreement(ranks: Ranks, knobs: Knobs, outcomes: Outcomes, step: int) -> None:
    """Every rank has decided the same knobs, rows and bins for the step; Disagreement on every rank where one has not."""
    ranks.agree({"rows": outcomes.rows.tolist(), "bins": outcomes.bins.tolist(), **asdict(knobs)}, f"step {step}")


class Stop:
    """Interrupts and guards, agreed by all ranks at the end of a step.

    A context manager: outside of it Ctrl-C and SIGTERM do what they did before. One that came after the last `check` is delivered then.
    """

    def __init__(self, cfg: Config, ranks: Ranks):
        self.code, self.reason, self._signal = DONE, "", 0
        self._cfg, self._ranks = cfg, ranks

    def __enter__(self) -> "Stop":
        self._former = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind, *_) -> None:
        for number, handler in self._former.items():
            signal.signal(number, handler)
        if self._signal and not self.reason and kind is None:
            signal.raise_signal(self._signal)

    def _interrupt(self, number: int, frame) -> None:
        self._signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait for the step to end

    def failed(self, error: RuntimeError, warn: Callable[[str], None]) -> int:
        """Say at once why the run ends, and return the exit code. Where a rank is gone the launcher sends SIGTERM to the others, which
        must not arrive before: it would, while the engines are closed.
        """
        self.code, self.reason = GUARD, why_stopped(error)
        warn(self.reason)
        return self.code

    def check(self, steps_without_signal: int, steps_without_reward: int, failure: str) -> None:
        """Both counts are of steps in a row, the same on every rank; `failure` is what the scorer failed with last."""
        if self._ranks.all_reduce(np.array([float(self._signal)]), op="max")[0]:
            self.code, self.reason = INTERRUPTED, "interrupted"
        elif steps_without_reward >= UNSCORED_STEPS:
            self.code, self.reason = GUARD, (f"no reward: in {steps_without_reward} steps in a row not one response could be scored, so "
                                             f"nothing was trained (reward.kind {self._cfg.reward.kind}; {failure})")
        elif steps_without_signal >= self._cfg.train.no_signal_limit:
            self.code, self.reason = GUARD, (f"no signal: in {steps_without_signal} steps in a row every group had equal rewards "
                                             "(train.no_signal_limit); the task is too easy, too hard, or the reward is constant")
