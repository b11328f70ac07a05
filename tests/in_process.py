"""The command line in the process of the tests, as if it had just been started."""

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
from command_line import ROOT, environment


def in_this_process(main: Callable[[list[str]], int], arguments: Sequence[str], folder: Path, extra: dict[str, str]) -> SimpleNamespace:
    """`main(arguments)` from `folder` with `extra` in the environment: returncode, stdout and stderr."""
    with tempfile.TemporaryDirectory() as said:
        with console(Path(said)), as_started(arguments, folder, extra):
            code = main(list(arguments))
        out, err = ((Path(said) / name).read_text(errors="replace") for name in ("stdout", "stderr"))
    return SimpleNamespace(returncode=code, stdout=out, stderr=err)


@contextlib.contextmanager
def console(folder: Path) -> Iterator[None]:
    """Descriptors 1 and 2 go to two files for the while, whatever pytest does with them."""
    with contextlib.ExitStack() as restored:
        for number, stream in enumerate(("stdout", "stderr"), 1):
            getattr(sys, stream).flush()
            saved, target = os.dup(number), os.open(folder / stream, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
            os.dup2(target, number)
            os.close(target)
            restored.callback(os.close, saved)
            restored.callback(os.dup2, saved, number)
            own = restored.enter_context(open(number, "w", buffering=1, closefd=False))
            restored.enter_context(patch.object(sys, stream, own))
        yield


@contextlib.contextmanager
def as_started(arguments: Sequence[str], folder: Path, extra: dict[str, str]) -> Iterator[None]:
    """Environment, working directory and threads of a new process of one thread; given back as they were."""
    threads, here = torch.get_num_threads(), Path.cwd()
    own = {"FASTSCHED_CACHE": str(ROOT / ".cache/fastsched"), **environment(), **extra}
    with patch.dict(os.environ, own, clear=True), patch.object(sys, "argv", ["fastsched", *arguments]):
        torch.set_num_threads(1)
        os.chdir(folder)
        try:
            yield
        finally:
            os.chdir(here)
            torch.set_num_threads(threads)
