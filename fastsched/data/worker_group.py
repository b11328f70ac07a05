"""What a reward function starts does not outlive its worker: a guard ends it, however the worker ended."""

import contextlib
import multiprocessing
import os
import select
import signal
import uuid
from typing import NoReturn

import psutil

MARK = "FASTSCHED_REWARD_WORKER"
"""In the environment of whatever a worker starts."""
ROUNDS = 10  # of looking for what started something else meanwhile


def lead_group() -> None:
    """Make this process the leader of a group that is killed once the process ends, however it ends, or the trainer does.

    A guard waits for either. It is of the group, so that the group's number cannot have become somebody else's, and no child of this
    process, which may wait for its own. What left the group for a session of its own is found by its environment. Needs Linux.
    """
    os.setpgid(0, 0)
    os.environ[MARK] = uuid.uuid4().hex
    worker, trainer = os.pidfd_open(os.getpid()), os.pidfd_open(multiprocessing.parent_process().pid)
    between = os.fork()
    if not between:
        if os.fork():
            os._exit(0)
        _guard(worker, trainer)
    os.waitpid(between, 0)
    os.close(worker)
    os.close(trainer)


def _guard(worker: int, trainer: int) -> NoReturn:
    """`worker` and `trainer` are descriptors of processes."""
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        waiting = select.poll()
        waiting.register(worker, select.POLLIN)
        waiting.register(trainer, select.POLLIN)
        waiting.poll()
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(worker, signal.SIGKILL)
        for _ in range(ROUNDS):
            if not _kill_marked(os.environ[MARK]):
                break
    finally:
        os.killpg(0, signal.SIGKILL)


def _kill_marked(mark: str) -> int:
    """How many processes were killed."""
    killed = 0
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):  # gone meanwhile, or another user's
            if process.environ().get(MARK) == mark:
                process.kill()
                killed += 1
    return killed
