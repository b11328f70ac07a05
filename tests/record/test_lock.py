"""Two processes on one run folder."""

import os
import signal
import subprocess
import sys

import pytest
from processes import wait_until

from fastsched.config import ConfigError
from fastsched.record.lock import writing

HOLDER = """
import sys, time
from pathlib import Path
from fastsched.record.lock import writing
with writing(Path(sys.argv[1])):
    print("held", flush=True)
    time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait()


def test_a_folder_that_another_process_writes_is_refused_with_its_number(tmp_path, holder):
    with pytest.raises(ConfigError, match=f"is being written by process {holder.pid} on "), writing(tmp_path):
        pass


def test_the_command_line_refuses_it_and_touches_nothing(command, tmp_path, holder, capsys):
    assert command(["train", "--preset", "tiny-cpu", "--run_dir", str(tmp_path)]) == 2
    assert f"being written by process {holder.pid}" in capsys.readouterr().err
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock"]


def test_kill_9_gives_it_back(tmp_path, holder):
    os.kill(holder.pid, signal.SIGKILL)
    holder.wait()

    def free():
        try:
            with writing(tmp_path):
                return True
        except ConfigError:
            return False

    wait_until(free)


def test_a_folder_can_be_written_again_once_it_was_let_go(tmp_path):
    for _ in range(2):
        with writing(tmp_path):
            assert f"process {os.getpid()} on " in (tmp_path / ".lock").read_text()
