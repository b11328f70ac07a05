"""The command line with one fault planted in it; run by bench.faults in processes of its own.

    FAULT=KIND:STEP[:RANK] python -m bench.faults.injection train ...

Kinds: `rollout`, `learn`, `sync`, `save`, `log` kill this process with SIGKILL in that part of step STEP, on rank RANK or on any; `raise`
is an engine that raises in the middle of that step's weight sync; `nan` a gradient that is not a number.
"""

import os
import signal
import sys
from itertools import count
from typing import Callable

import torch

from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.rollout.hf_engine import TransformersRollout
from fastsched.learn.learner import Learner
from fastsched.record.log import RunLog


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def before(owner: type, name: str, act: Callable[..., None]) -> None:
    """Call `act` with the arguments of `owner.name` ahead of it."""
    original = getattr(owner, name)

    def wrapped(self, *args, **options):
        act(self, *args, **options)
        return original(self, *args, **options)

    setattr(owner, name, wrapped)


def plant(kind: str, step: int, rank: int | None) -> None:
    """Arrange for the fault; steps are told apart by the learner, which counts them."""
    if rank is not None and int(os.environ.get("RANK", 0)) != rank:
        return
    now = {"step": 0, "micro": 0, "layers": 0}
    here = lambda: now["step"] == step
    before(Learner, "update", lambda self, responses, rewards, knobs, at: now.update(step=at, micro=0))
    if kind == "rollout":  # between the last learner step and the next
        ready = lambda sampling: now["step"] == step - 1 and step > 1 and sampling.temperature > 0  # greedy is the evaluation
        before(TransformersRollout, "_sample", lambda self, rows, sampling, seeds: die() if ready(sampling) else None)
    elif kind == "learn":  # inside the accumulation window: one micro-batch is in the gradients, the next is not
        before(DeepSpeedLearner, "backward", lambda *_, **__: die() if here() and now["micro"] == 1 else now.update(micro=now["micro"] + 1))
    elif kind in ("sync", "raise"):
        plant_in_sync(here, die if kind == "sync" else broken_engine)
    elif kind == "save":  # rank 0 has written shards and policy, and neither the marker nor the rest
        before(DeepSpeedLearner, "average_weights", lambda self: die() if here() and called_by("save") else None)
    elif kind == "log":  # the row is in metrics.csv, its samples are not
        before(RunLog, "samples", lambda self, at, rows: die() if at == step else None)
    elif kind == "nan":
        plant_nan(here)
    else:
        raise SystemExit(f"FAULT: {kind!r} is unknown")


def called_by(name: str) -> bool:
    frame, depth = sys._getframe(3), count()
    while frame and next(depth) < 3:
        if frame.f_code.co_name == name:
            return True
        frame = frame.f_back
    return False


def broken_engine() -> None:
    raise RuntimeError("planted: the engine failed while it took over a tensor")


def plant_in_sync(here: Callable[[], bool], act: Callable[[], None]) -> None:
    """After the fifth tensor."""
    original = DeepSpeedLearner.named_weights

    def named_weights(self):
        for number, pair in enumerate(original(self)):
            if here() and number == 5 and called_by("load_weights"):
                act()
            yield pair

    DeepSpeedLearner.named_weights = named_weights


def plant_nan(here: Callable[[], bool]) -> None:
    original = DeepSpeedLearner.__init__

    def init(self, *args, **options):
        original(self, *args, **options)
        first = next(self.policy.parameters())
        first.register_hook(lambda grad: torch.full_like(grad, float("nan")) if here() else grad)

    DeepSpeedLearner.__init__ = init


if __name__ == "__main__":
    kind, step, *rank = os.environ.pop("FAULT").split(":")
    plant(kind, int(step), int(rank[0]) if rank else None)
    from fastsched.cli import main

    sys.exit(main())
