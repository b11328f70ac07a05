import os
import signal
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from command_line import ROOT, environment

# What a background shell starts ignores Ctrl-C, and so would every process that is interrupted here.
signal.signal(signal.SIGINT, signal.default_int_handler)

if not torch.cuda.is_available():
    # Triton defines its own helpers for the interpreter or for the compiler when it is first imported, whoever does that first.
    with patch.dict(os.environ, TRITON_INTERPRET="1"):
        import triton.language  # noqa: F401


@pytest.fixture
def fastsched(tmp_path):
    """Run the command line in a process of its own, from the repository root; returns the finished process."""

    def run(*arguments: str, timeout: float = 240, cwd: Path = ROOT, launcher: tuple[str, ...] = (), **extra: str):
        command = [sys.executable, *(launcher or ("-m", "fastsched.cli")), *arguments]
        return subprocess.run(command, cwd=cwd, env={**environment(), **extra}, capture_output=True, text=True, timeout=timeout)

    return run


@pytest.fixture(scope="session")
def random_model(tmp_path_factory):
    """A tiny random model folder, for runs that need no skill."""
    from fastsched.engines.models.tiny import random_tiny

    return random_tiny(tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=0)


os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
