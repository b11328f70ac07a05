"""What a reward function starts does not outlive its worker, however the worker ends."""

import os
import signal
import subprocess
import sys

import pytest
from processes import alive, wait_until

from fastsched.config import RewardConfig
from fastsched.data.rewards import RewardItem, RewardPool

STARTS = '''
import os, re, signal, subprocess, sys

def start(folder, name, **how):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"], **how)
    open(os.path.join(folder, name + ".new"), "w").write(str(child.pid))
    os.rename(os.path.join(folder, name + ".new"), os.path.join(folder, name))

def score(prompt, response, answer, meta):
    if response == "wait":  # for every child of this process
        try:
            os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return 1.0
        return 0.0
    start(answer, "child")
    start(answer, "other", start_new_session=True)
    if response == "exit":
        os._exit(3)
    if response == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if response == "quick":
        return 0.5
    re.match("(a+)+$", "a" * 60 + "b")  # never returns, and gives no other thread its turn
'''
MAIN = '''
import sys
from fastsched.config import RewardConfig
from fastsched.data.rewards import RewardItem, RewardPool
if __name__ == "__main__":
    with RewardPool(RewardConfig(kind="starts:score", workers=1, timeout_s=600), "arithmetic") as pool:
        pool.score([RewardItem("hang", "", sys.argv[1], {})])
'''


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    (tmp_path / "starts.py").write_text(STARTS)
    monkeypatch.chdir(tmp_path)
    return lambda timeout_s=60.0: RewardPool(RewardConfig(kind="starts:score", workers=1, timeout_s=timeout_s), "arithmetic")


def pid_in(folder, name="child"):
    return int((folder / name).read_text())


def ended(folder):
    """What was started in the worker's group, and in a session of its own."""
    pids = [pid_in(folder, name) for name in ("child", "other")]
    wait_until(lambda: not any(map(alive, pids)))
    return True


def score(pool, response, folder):
    return pool.score([RewardItem(response, "", str(folder), {})])


def test_at_the_time_limit_what_was_started_ends_too(pool_of, tmp_path):
    with pool_of(timeout_s=3.0) as pool:
        assert score(pool, "hang", tmp_path).errors == {"timeout": 1} and ended(tmp_path)


@pytest.mark.parametrize("how", ["exit", "kill"])
def test_a_worker_that_ends_takes_along_what_it_started(pool_of, tmp_path, how):
    with pool_of() as pool:
        assert score(pool, how, tmp_path).errors == {"died": 1} and ended(tmp_path)


def test_what_a_score_left_running_ends_with_the_run(pool_of, tmp_path):
    with pool_of() as pool:
        assert score(pool, "quick", tmp_path).rewards.tolist() == [0.5]
        assert alive(pid_in(tmp_path))
    assert ended(tmp_path)


def test_nothing_outlives_a_killed_trainer(pool_of, tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    trainer = subprocess.Popen([sys.executable, "main.py", str(tmp_path)], cwd=tmp_path)
    wait_until(lambda: trainer.poll() is not None or (tmp_path / "other").exists())
    os.kill(trainer.pid, signal.SIGKILL)
    trainer.wait()
    assert ended(tmp_path)


def test_a_reward_function_has_no_children_but_its_own(pool_of, tmp_path):
    with pool_of() as pool:
        assert score(pool, "wait", tmp_path).rewards.tolist() == [1.0]
