import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from command_line import ROOT, environment
from in_process import in_this_process

# What a background shell starts ignores Ctrl-C, and so would every process that is interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton defines its own helpers for the interpreter or for the compiler when it is first imported, whoever does that first.
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        import triton.language  # noqa: F401


@pytest.fixture(scope="session")
def command():
    """`fastsched.cli.main`, with everything imported that a run imports: a logger must not keep the console of the first test."""
    import fastsched.train  # noqa: F401
    from fastsched.cli import main

    return main


@pytest.fixture
def fastsched(command, tmp_path):
    """Run the command line; returns exit code and console.

    In this process, from the test's folder and on one thread: in another, the imports alone take ten seconds. With a `launcher`, or
    with `process=True` where the process itself is part of what is tested, in one of its own from the repository root. `extra` goes
    into the environment; the first folder of PYTHONPATH holds the test's reward.
    """

    def run(*arguments: str, timeout: float = 240, process: bool = False, launcher: tuple[str, ...] = (), **extra: str):
        if not process and not launcher:
            return in_this_process(command, arguments, Path(extra.get("PYTHONPATH", str(tmp_path)).partition(os.pathsep)[0]), extra)
        return subprocess.run([sys.executable, *(launcher or ("-m", "fastsched.cli")), *arguments], cwd=ROOT, text=True,
                              env={**environment(), **extra}, capture_output=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A tiny random model folder, for runs that need no skill."""
    from fastsched.engines.models.tiny import random_tiny

    return random_tiny(tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=0)


os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
