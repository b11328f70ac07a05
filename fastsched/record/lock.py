"""One process writes a run folder; whoever only reads it needs no lock."""

import fcntl
import os
import socket
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator

from fastsched.config import ConfigError

NAME = ".lock"


@contextmanager
def writing(run_dir: Path) -> Iterator[None]:
    """Hold the folder's lock, which the operating system takes back however the process ends. ConfigError where another one holds it."""
    with (run_dir / NAME).open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            holder = file.read().strip() or "another process"
            raise ConfigError(f"--run_dir: {run_dir} is being written by {holder}; wait for it or give another folder") from error
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}")
        file.flush()
        yield
