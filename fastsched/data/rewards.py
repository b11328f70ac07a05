"""Rewards of responses, scored in worker processes with a time limit for each response.

What goes wrong with one response costs that response only: its reward is NaN, its kind of failure is counted. A scorer
that hangs is killed with its process and all that it has started, and the pool replaces the process. Every rank has its own pool; there
are no collectives here. The workers are clean processes that start from this module, so it must not import torch or vllm.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.context
import os
import sys
import time
from concurrent.futures import BrokenExecutor, wait
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec
from typing import Mapping, Sequence

import numpy as np
from pebble import ProcessExpired, ProcessPool

from fastsched.config import ConfigError, RewardConfig
from fastsched.data.reward_worker import Outcome, RewardItem, loading_problem, score_some, start_worker

START_LIMIT_S = 60.0  # for starting a worker and importing a user's module
KILL_SLACK_S = 10.0  # for noticing a hang, killing the process and starting another
ROUNDS = 3  # times a response is scheduled alone when the whole pool breaks under it
TOGETHER = 16  # responses that go to a worker in one message, as long as they are quick
PRELOAD = {"math_verify": ["math_verify"], "task": ["reasoning_gym"]}  # imported once, before the workers fork


@dataclass(frozen=True)
class RewardResult:
    """What scoring N responses gave. Kinds of failure: raised, timeout, none, nonfinite, died.

    A response that our own scorers cannot read, or not within the time limit, is unreadable: wrong, and no failure.
    """

    rewards: np.ndarray  # [N] float64, NaN where scoring failed
    errors: dict[str, int]  # failures by kind; kinds that did not occur are absent
    messages: dict[str, str]  # the first failure of each kind in words, and the first unreadable response
    unreadable: np.ndarray  # [N] bool
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # [N] float64 by name where there are several; NaN where one failed


class CleanProcess(multiprocessing.context.ForkServerProcess):
    """A worker forked from the fork server that does not import the trainer's main module again (it would load torch).

    multiprocessing skips main modules called `__main__` of a package, so the main module goes by such a name meanwhile.
    """

    def start(self):
        main = sys.modules["__main__"]
        spec = getattr(main, "__spec__", None)
        main.__spec__ = ModuleSpec("fastsched.__main__", None)
        try:
            super().start()
        finally:
            main.__spec__ = spec


class CleanContext(multiprocessing.context.ForkServerContext):
    Process = CleanProcess


class RewardPool:
    """Scores responses by `cfg.parts` in `cfg.workers` processes, `cfg.timeout_s` seconds at most for each response.

    `task` is `data.task`, needed by the kind `task`. A user's `module:function` is imported in the workers, from the
    working directory or the Python path, and called as function(prompt=, response=, answer=, meta=) -> float, with what else of
    `scorers.Seen` its arguments name. Raises ConfigError when a scorer cannot be loaded. A context manager; `close` ends the workers.
    """

    def __init__(self, cfg: RewardConfig, task: str):
        self._cfg, self._task, self._closed = cfg, task, False
        self.failure = ""  # the first of the last call of `score` that had any
        self._pool = self._start()
        try:
            problem = self._pool.schedule(loading_problem).result(timeout=START_LIMIT_S)
        except TimeoutError:
            problem = f"not loaded within {START_LIMIT_S:.0f} s, or its process died"
        except (ProcessExpired, BrokenExecutor) as error:
            problem = f"the process died while loading it ({error})"
        if problem:
            self.close()
            kinds = " or ".join(repr(part.kind) for part in cfg.parts)
            raise ConfigError(f"reward.{'extra' if cfg.extra else 'kind'}: {kinds} cannot be loaded: {problem}")

    def __enter__(self) -> "RewardPool":
        return self

    def __exit__(self, *exception) -> None:
        self.close()

    def close(self) -> None:
        self._closed = True
        self._pool.stop()
        self._pool.join()

    def _start(self) -> ProcessPool:
        context = CleanContext()
        context.set_forkserver_preload(["fastsched.data.rewards", *(m for part in self._cfg.parts for m in PRELOAD.get(part.kind, ()))])
        return ProcessPool(self._cfg.workers, initializer=start_worker, context=context,
                           initargs=(self._cfg.parts, self._task, os.getcwd()))

    def score(self, items: Sequence[RewardItem]) -> RewardResult:
        """Rewards of N responses, in order; never raises for what a scorer does. RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        found: dict[int, Outcome] = {}
        for together in (TOGETHER, *[1] * ROUNDS):
            missing = [i for i in range(len(items)) if i not in found]
            if not missing:
                break
            if not self._pool.active:
                self._pool.join()
                self._pool = self._start()
            found.update(self._round({i: items[i] for i in missing}, min(together, math.ceil(len(missing) / self._cfg.workers))))
        lost = Outcome("died", math.nan, "the scoring processes died", ())
        result = collect([found.get(i, lost) for i in range(len(items))], [part.label for part in self._cfg.parts])
        self.failure = next((f"{kind}: {result.messages[kind]}" for kind in result.errors), self.failure)
        return result

    def _round(self, items: Mapping[int, RewardItem], together: int) -> dict[int, Outcome]:
        """Outcomes of the items, `together` in one message; those are left out that have none yet: their worker ran out of time or ended
        while it had several, or a broken pool took them down."""
        futures = {}
        with contextlib.suppress(RuntimeError):  # the pool broke before everything was scheduled
            for part in (list(items)[k:k + together] for k in range(0, len(items), together)):
                futures[self._pool.schedule(score_some, args=([items[i] for i in part],), timeout=self._cfg.timeout_s)] = part
        limit = START_LIMIT_S + math.ceil(len(items) / self._cfg.workers) * (self._cfg.timeout_s + KILL_SLACK_S)
        end = time.monotonic() + limit
        stuck = set(futures)
        while stuck and self._pool.active and time.monotonic() < end:
            stuck = wait(stuck, timeout=1.0).not_done
        if stuck:
            self._pool.stop()
        return {i: outcome for future, part in futures.items() if future not in stuck for i, outcome in self._outcomes(future, part)}

    def _outcomes(self, future, part: Sequence[int]) -> list[tuple[int, Outcome]]:
        error = future.exception()
        if error is None:
            return list(zip(part, future.result(), strict=False))
        if not isinstance(error, (TimeoutError, ProcessExpired, BrokenExecutor)):
            raise error
        if len(part) > 1 or isinstance(error, BrokenExecutor):
            return []
        kind, message = "timeout", f"no score within {self._cfg.timeout_s:g} s; the process was killed"
        if isinstance(error, ProcessExpired):
            kind, message = "died", f"the scoring process ended with exit code {error.exitcode}"
        if all(p.own for p in self._cfg.parts):  # not the user's code: nothing but the response can be the reason
            return [(part[0], Outcome("unreadable", 0.0, message, (0.0,) * len(self._cfg.parts)))]
        return [(part[0], Outcome(kind, math.nan, message, ()))]


def collect(outcomes: Sequence[Outcome], names: Sequence[str]) -> RewardResult:
    errors: dict[str, int] = {}
    messages: dict[str, str] = {}
    for i, outcome in enumerate(outcomes):
        if outcome.kind != "ok":
            messages.setdefault(outcome.kind, f"response {i} of {len(outcomes)}: {outcome.message}")
        if outcome.kind not in ("ok", "unreadable"):
            errors[outcome.kind] = errors.get(outcome.kind, 0) + 1
    rewards, unreadable = [outcome.reward for outcome in outcomes], [outcome.kind == "unreadable" for outcome in outcomes]
    value = lambda outcome, k: outcome.parts[k] if outcome.parts else math.nan
    parts = {name: np.array([value(outcome, k) for outcome in outcomes], np.float64) for k, name in enumerate(names)}
    parts = parts if len(names) > 1 else {}
    return RewardResult(np.array(rewards, np.float64), errors, messages, np.array(unreadable, bool), parts)
