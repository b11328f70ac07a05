import os
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest
from command_line import environment

from fastsched.config import ConfigError
from fastsched.engines.rollout.limits import LimitedRollout
from fastsched.engines.rollout.weights import SyncError
from fastsched.types import EngineError, Sampling

HANGS = """
import threading
from types import SimpleNamespace
from fastsched.engines.rollout.limits import LimitedRollout
def say(text):
    print(text, flush=True)
    raise OSError("the disk is full")
engine = SimpleNamespace(score=lambda *_: threading.Event().wait())
LimitedRollout(engine, 0.2, say).score([1, 2])
"""


def failing(error):
    def fail(*_):
        raise error

    return SimpleNamespace(generate=fail, score=fail, load_weights=fail, fingerprints=fail, sleep=fail)


ARGUMENTS = {"generate": ([], Sampling(1, 1), []), "score": ([1, 2, 3],), "load_weights": ([], 4)}


def call(engine, name):
    return getattr(LimitedRollout(engine, 600.0, print), name)(*ARGUMENTS.get(name, ()))


@pytest.mark.parametrize("name, words", [("generate", "generate .0 prompts."), ("score", "score .3 tokens."),
                                         ("fingerprints", "fingerprints"), ("sleep", "sleep")])
@pytest.mark.parametrize("error", [RuntimeError("CUDA out of memory"), ValueError("bad shape"), AssertionError("cache"), KeyError("seq")])
def test_h4_what_the_sampler_raises_names_the_call(name, words, error):
    with pytest.raises(EngineError, match=rf"^sampler: {words} failed \({type(error).__name__}: "):
        call(failing(error), name)


@pytest.mark.parametrize("error", [ConfigError("row 3: too long"), SyncError("half way"), KeyboardInterrupt()])
def test_what_already_says_so_passes(error):
    with pytest.raises(type(error)) as raised:
        call(failing(error), "generate")
    assert raised.value is error


def test_what_a_sync_raises_is_left_to_the_caller_who_knows_the_weight():
    with pytest.raises(ValueError, match="^bad shape$"):
        call(failing(ValueError("bad shape")), "load_weights")


@pytest.mark.parametrize("name, words", [("generate", "generate (0 prompts)"), ("load_weights", "load_weights (version 4)"),
                                         ("score", "score (3 tokens)")])
def test_a_call_that_lasts_too_long_ends_the_process_with_its_name(monkeypatch, name, words):
    said, ended = [], threading.Event()
    monkeypatch.setattr(os, "_exit", lambda code: ended.set() if code == 3 else None)
    lasts = SimpleNamespace(**{name: lambda *_: ended.wait(60)})  # comes back once it has been given up
    getattr(LimitedRollout(lasts, 0.2, said.append), name)(*ARGUMENTS[name])
    assert ended.is_set() and said == [f"sampler: {words} took longer than 0.2 s (rollout.timeout_s)"]


def test_a_call_that_hangs_ends_even_a_process_that_cannot_say_so():
    done = subprocess.run([sys.executable, "-c", HANGS], env=environment(), text=True, capture_output=True, timeout=240)
    assert done.returncode == 3 and "sampler: score (2 tokens) took longer than 0.2 s" in done.stdout, done.stderr[-2000:]


def test_a_call_that_came_back_is_forgotten(monkeypatch):
    """Also one that failed: its timer was stopped."""
    timers = []

    class Timer(threading.Timer):
        def __init__(self, *arguments):
            super().__init__(*arguments)
            timers.append(self)

    monkeypatch.setattr(threading, "Timer", Timer)
    limited = LimitedRollout(SimpleNamespace(score=len, sleep=failing(RuntimeError()).sleep), 600.0, print)
    limited.score([1, 2])
    with pytest.raises(EngineError):
        limited.sleep()
    assert len(timers) == 2 and all(timer.finished.is_set() for timer in timers)


def test_it_is_the_engine_for_everyone_else():
    limited = LimitedRollout(SimpleNamespace(weight_version=3, missing_logprobs=0, max_model_len=9, dtype="d"), 1.0, print)
    assert (limited.weight_version, limited.missing_logprobs, limited.max_model_len, limited.dtype) == (3, 0, 9, "d")


def test_a_run_whose_sampler_is_too_slow_stops_with_code_3_and_goes_on_later(fastsched, tmp_path, random_model):
    options = ["train", "--preset", "tiny-cpu", "--run_dir", str(tmp_path / "run"), "--model.name", str(random_model), "--rollout.engine",
               "transformers", "--data.size", "200", "--train.prompts_per_step", "4", "--train.eval_at_ends", "false", "--train.steps", "2",
               "--train.checkpoint_every", "1", "--log.plots", "false"]
    assert fastsched(*options, "--train.no_signal_limit", "9").returncode == 0
    slow = fastsched(*options, "--train.steps", "3", "--rollout.timeout_s", "0.001", "--resume", process=True)  # it ends its process
    assert slow.returncode == 3, slow.stdout[-2000:] + slow.stderr[-2000:]
    assert "WARNING: sampler: " in slow.stdout and "took longer than 0.001 s (rollout.timeout_s); the checkpoints are" in slow.stdout
    done = fastsched(*options, "--train.steps", "3", "--train.no_signal_limit", "9", "--resume")
    assert done.returncode == 0 and "next is step 3" in done.stdout, done.stdout[-2000:] + done.stderr[-2000:]
