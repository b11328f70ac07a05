"""Rewards of responses, scored in worker processes with a time limit for each response.

What goes wrong with one response costs that response only: its reward is NaN, its kind of failure is counted. A scorer
that hangs is killed with its process, and the pool replaces the process. Every rank has its own pool; there are no
collectives here. The workers are clean processes that start from this module, so it must not import torch or vllm.
"""

import contextlib
import math
import multiprocessing
import multiprocessing.context
import os
import signal
import sys
import threading
import time
from concurrent.futures import BrokenExecutor, wait
from dataclasses import dataclass
from importlib.machinery import ModuleSpec
from typing import Any, Mapping, Sequence

import numpy as np
from pebble import ProcessExpired, ProcessPool

from fastsched.config import ConfigError, RewardConfig, require
from fastsched.data.scorers import load_scorer, run_scorer

START_LIMIT_S = 60.0  # for starting a worker and importing a user's module
KILL_SLACK_S = 10.0  # for noticing a hang, killing the process and starting another
ROUNDS = 3  # times a response is scheduled alone when the whole pool breaks under it
TOGETHER, TOGETHER_S = 16, 0.1  # responses that go to a worker in one message, and how long it may take for them before the rest go alone
PRELOAD = {"math_verify": ["math_verify"], "task": ["reasoning_gym"]}  # imported once, before the workers fork


@dataclass(frozen=True)
class RewardItem:
    """One response to score."""

    text: str
    prompt: str
    answer: str
    meta: Mapping[str, Any]


@dataclass(frozen=True)
class RewardResult:
    """What scoring N responses gave. Kinds of failure: raised, timeout, none, nonfinite, died.

    A response that our own scorers cannot read, or not within the time limit, is unreadable: wrong, and no failure.
    """

    rewards: np.ndarray  # [N] float64, NaN where scoring failed
    errors: dict[str, int]  # failures by kind; kinds that did not occur are absent
    messages: dict[str, str]  # the first failure of each kind in words, and the first unreadable response
    unreadable: np.ndarray  # [N] bool


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
    """Scores responses by `cfg.kind` in `cfg.workers` processes, `cfg.timeout_s` seconds at most for each response.

    `task` is `data.task`, needed by the kind `task`. A user's `module:function` is imported in the workers, from the
    working directory or the Python path, and called as function(prompt=, response=, answer=, meta=) -> float. Raises
    ConfigError when the scorer cannot be loaded. A context manager; `close` ends the workers.
    """

    def __init__(self, cfg: RewardConfig, task: str):
        require(cfg.kind != "task" or task.startswith("reasoning-gym:"),
                f"reward.kind: `task` needs a task with its own verifier (reasoning-gym:NAME); data.task is {task!r}")
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
            raise ConfigError(f"reward.kind: {cfg.kind!r} cannot be loaded: {problem}")

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
        context.set_forkserver_preload(["fastsched.data.rewards", *PRELOAD.get(self._cfg.kind, ())])
        return ProcessPool(self._cfg.workers, initializer=start_worker, context=context,
                           initargs=(self._cfg.kind, self._task, self._cfg.require, os.getcwd()))

    def score(self, items: Sequence[RewardItem]) -> RewardResult:
        """Rewards of N responses, in order; never raises for what a scorer does. RuntimeError after `close`."""
        if self._closed:
            raise RuntimeError("the reward pool is closed")
        found: dict[int, tuple[str, float, str]] = {}
        for together in (TOGETHER, *[1] * ROUNDS):
            missing = [i for i in range(len(items)) if i not in found]
            if not missing:
                break
            if not self._pool.active:
                self._pool.join()
                self._pool = self._start()
            found.update(self._round({i: items[i] for i in missing}, min(together, math.ceil(len(missing) / self._cfg.workers))))
        lost = ("died", math.nan, "the scoring processes died")
        result = collect([found.get(i, lost) for i in range(len(items))])
        self.failure = next((f"{kind}: {result.messages[kind]}" for kind in result.errors), self.failure)
        return result

    def _round(self, items: Mapping[int, RewardItem], together: int) -> dict[int, tuple[str, float, str]]:
        """Outcomes of the items, `together` in one message; those are left out that have none yet: their worker ran out of time or ended
        while it had several, or a broken pool took them down."""
        futures = {}
        with contextlib.suppress(RuntimeError):  # the pool broke before everything was scheduled
            for part in (list(items)[k:k + together] for k in range(0, len(items), together)):
                args = [(items[i].prompt, items[i].text, items[i].answer, dict(items[i].meta)) for i in part]
                futures[self._pool.schedule(score_some, args=(args,), timeout=self._cfg.timeout_s)] = part
        limit = START_LIMIT_S + math.ceil(len(items) / self._cfg.workers) * (self._cfg.timeout_s + KILL_SLACK_S)
        end = time.monotonic() + limit
        stuck = set(futures)
        while stuck and self._pool.active and time.monotonic() < end:
            stuck = wait(stuck, timeout=1.0).not_done
        if stuck:
            self._pool.stop()
        return {i: outcome for future, part in futures.items() if future not in stuck for i, outcome in self._outcomes(future, part)}

    def _outcomes(self, future, part: Sequence[int]) -> list[tuple[int, tuple[str, float, str]]]:
        error = future.exception()
        if error is None:
            return list(zip(part, future.result(), strict=False))
        if not isinstance(error, (TimeoutError, ProcessExpired, BrokenExecutor)):
            raise error
        if len(part) > 1 or isinstance(error, BrokenExecutor):
            return []
        kind, message = ("timeout", f"no score within {self._cfg.timeout_s:g} s; the process was killed")
        if isinstance(error, ProcessExpired):
            kind, message = "died", f"the scoring process ended with exit code {error.exitcode}"
        own = ":" not in self._cfg.kind  # not the user's code: nothing but the response can be the reason
        return [(part[0], ("unreadable", 0.0, message) if own else (kind, math.nan, message))]


def collect(outcomes: Sequence[tuple[str, float, str]]) -> RewardResult:
    errors: dict[str, int] = {}
    messages: dict[str, str] = {}
    for i, (kind, _, message) in enumerate(outcomes):
        if kind != "ok":
            messages.setdefault(kind, f"response {i} of {len(outcomes)}: {message}")
        if kind not in ("ok", "unreadable"):
            errors[kind] = errors.get(kind, 0) + 1
    rewards, unreadable = [reward for _, reward, _ in outcomes], [kind == "unreadable" for kind, _, _ in outcomes]
    return RewardResult(np.array(rewards, np.float64), errors, messages, np.array(unreadable, bool))


class Worker:
    """State of a worker process: its scorer, or why there is none."""

    scorer = None
    problem = ""


def start_worker(kind: str, task: str, form: str, directory: str) -> None:
    """Prepare a worker: it dies at once when told to or when the trainer is gone, and finds the user's modules."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=end_with_trainer, daemon=True).start()
    sys.path.insert(0, directory)
    try:
        Worker.scorer = load_scorer(kind, task, form)
    except BaseException as error:  # the user's module: whatever it raises becomes the message of a ConfigError
        Worker.problem = f"{type(error).__name__}: {error}"


def end_with_trainer() -> None:
    multiprocessing.parent_process().join()
    os._exit(1)


def loading_problem() -> str:
    return Worker.problem


def score_some(items: Sequence[tuple[str, str, str, dict]]) -> list[tuple[str, float, str]]:
    """Outcomes of the first items, as many as `TOGETHER_S` seconds give, at least one."""
    end, outcomes = time.monotonic() + TOGETHER_S, [score_one(*items[0])]
    for item in items[1:]:
        if time.monotonic() > end:
            break
        outcomes.append(score_one(*item))
    return outcomes


def score_one(prompt: str, response: str, answer: str, meta: dict) -> tuple[str, float, str]:
    if Worker.problem:
        return "raised", math.nan, Worker.problem
    return run_scorer(Worker.scorer, prompt, response, answer, meta)
