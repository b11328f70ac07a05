"""What runs on this machine, for tests of processes that must end."""

import os
import time
from pathlib import Path


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "State:\tZ" not in status.read_text()


def members(session: int) -> list[int]:
    """Live processes of a session; a server leads its own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(fields[3]) == session and fields[0] != "Z":
            found.append(int(entry.name))
    return found


def children(word: str) -> list[int]:
    """Processes whose command line holds `word`, other than this one."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if word in (entry / "cmdline").read_text() and int(entry.name) != os.getpid():
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError):
            pass
    return found


def wait_until(condition, limit: float = 60.0) -> None:
    end = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < end, "never happened"
        time.sleep(0.05)
