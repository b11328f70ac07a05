"""`fastsched train | cluster | eval | report | export | serve-bench | presets`.

Exit codes: 0 done, 2 bad configuration or input, 3 stopped by a guard or a failed part, 130 interrupted
(train: after a checkpoint), 143 ended by SIGTERM (eval, export, serve-bench; train: 130).
"""

import os
import signal
import sys
from contextlib import contextmanager
from importlib import import_module
from typing import Iterator, Sequence

from fastsched.commands.process import start_again_if_better
from fastsched.config import BAD_INPUT, DONE, GUARD, INTERRUPTED, ConfigError
from fastsched.types import EngineError

COMMANDS = {"train": "train", "cluster": "cluster", "eval": "evaluate", "report": "report", "export": "export",
            "serve-bench": "serve_bench", "presets": "presets"}
"""The module of `fastsched.commands` whose `run(arguments)` returns the exit code; imported only when it is asked for."""
LOADS_MODELS = {"train", "cluster", "eval", "export", "serve-bench"}
QUICK = {"-h", "--help", "--dry-run", "--dry_run"}
COPIES_MODELS = ("eval", "export", "serve-bench")  # into temporary folders


def command_line() -> int:
    """`main` in a process of its own, which may start itself again under another environment first (`commands/process.py`)."""
    if LOADS_MODELS & set(sys.argv) and not QUICK & set(sys.argv):
        start_again_if_better()
    return main()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error in configuration or input is one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for library in ("HF_DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")  # the run's own progress is the only one
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]  # the deepspeed launcher puts it first
    if not arguments or arguments[0] not in COMMANDS:
        print(f"usage: fastsched {{{','.join(COMMANDS)}}} ...  (fastsched COMMAND --help)", file=sys.stderr)
        return DONE if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    command, *rest = arguments
    try:
        with _cleaning_up(command in COPIES_MODELS):
            return import_module(f"fastsched.commands.{COMMANDS[command]}").run(rest)
    except KeyboardInterrupt:
        print("fastsched: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"fastsched: {error}", file=sys.stderr)
        return BAD_INPUT
    except EngineError as error:
        print(f"fastsched: {error}", file=sys.stderr)
        return GUARD


@contextmanager
def _cleaning_up(wanted: bool) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, through its context managers, which delete copies of models."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if wanted else None
    try:
        yield
    finally:
        if wanted:
            signal.signal(signal.SIGTERM, former)


if __name__ == "__main__":
    sys.exit(command_line())
