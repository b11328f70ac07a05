import json
import math
import os
import signal
import subprocess
import sys

import pytest
from processes import alive, wait_until

from fastsched.config import ConfigError, RewardConfig
from fastsched.data.rewards import RewardItem, RewardPool
from fastsched.data.tasks import reasoning_gym_rows

SCORERS = '''
import os, re, signal, sys, time

class Unpicklable(Exception):
    def __init__(self, first, second):
        super().__init__("odd")

def score(prompt, response, answer, meta):
    if response == "echo": return float(prompt == "p" and answer == "a" and meta == {"m": [1]})
    if response.startswith("meet"):  # comes back once as many workers are here as asked for
        _, folder, count = response.split(" ")
        open(os.path.join(folder, str(os.getpid())), "w").close()
        while len(os.listdir(folder)) < int(count): time.sleep(0.01)
        return os.getpid()
    if response == "sleep": time.sleep(1)
    if response.startswith("hang"):
        open(response.split(" ", 1)[1], "w").write(str(os.getpid()))
        while True: pass
    if response == "stubborn": re.match("(a+)+$", "a" * 60 + "b")
    if response == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if response == "exit": os._exit(3)
    if response == "interrupt": os.kill(os.getpid(), signal.SIGINT)
    if response == "raise": raise ValueError("bad value")
    if response == "odd": raise Unpicklable(1, 2)
    if response == "quit": sys.exit()
    if response == "none": return None
    if response == "infinite": return float("inf")
    return 0.5
'''


@pytest.fixture
def pool_of(tmp_path, monkeypatch):
    """Opens a pool on the scorers above, in a working directory that holds them as module `mine`."""
    (tmp_path / "mine.py").write_text(SCORERS)
    monkeypatch.chdir(tmp_path)

    def make(workers=2, timeout_s=10.0, kind="mine:score"):
        return RewardPool(RewardConfig(kind=kind, workers=workers, timeout_s=timeout_s), "arithmetic")

    return make


def items(*texts):
    return [RewardItem(text=text, prompt="p", answer="a", meta={"m": [1]}) for text in texts]


@pytest.fixture
def workers_of(tmp_path_factory):
    """The process ids of `count` workers of a pool, each of which has a response in hand while it waits for the others."""

    def meet(pool, count):
        folder = tmp_path_factory.mktemp("meet")
        return {int(pid) for pid in pool.score(items(*[f"meet {folder} {count}"] * 2 * count)).rewards}

    return meet


def dead(pid):
    wait_until(lambda: not alive(pid))
    return True


def test_rewards_come_in_the_order_of_the_responses():
    with RewardPool(RewardConfig(), "arithmetic") as pool:
        result = pool.score([RewardItem(f"it is {i}.", "", str(i // 2 * 2), {}) for i in range(100)])
    assert result.rewards.dtype == "float64"
    assert result.rewards.tolist() == [1.0, 0.0] * 50
    assert (result.errors, result.messages) == ({}, {})


def test_a_users_function_gets_prompt_response_answer_and_meta(pool_of):
    with pool_of() as pool:
        assert pool.score(items("echo", "other")).rewards.tolist() == [1.0, 0.5]


def test_failures_cost_their_own_response_and_are_counted(pool_of):
    with pool_of() as pool:
        texts = ["x", "raise", "none", "infinite", "odd", "quit", "kill", "exit", "raise", "x"]
        result = pool.score(items(*texts))
        assert [math.isnan(r) for r in result.rewards] == [text != "x" for text in texts]
        assert result.errors == {"raised": 4, "none": 1, "nonfinite": 1, "died": 2}
        assert result.messages["raised"] == "response 1 of 10: ValueError: bad value"
        assert "exit code -9" in result.messages["died"]
        assert pool.score(items(*"xxxx")).rewards.tolist() == [0.5] * 4


def test_hanging_scorers_are_killed_and_the_pool_keeps_its_strength(pool_of, tmp_path, workers_of):
    with pool_of(timeout_s=2.0) as pool:
        files = [tmp_path / f"pid{i}" for i in range(3)]
        result = pool.score(items("x", *(f"hang {file}" for file in files), "stubborn", "x"))
        assert result.errors == {"timeout": 4}
        assert result.rewards[[0, 5]].tolist() == [0.5, 0.5]
        assert all(dead(int(file.read_text())) for file in files)
        assert len(workers_of(pool, 2)) == 2


def test_the_limit_is_the_configured_one(pool_of):
    with pool_of(timeout_s=0.3) as short, pool_of(timeout_s=10) as long:
        assert short.score(items("sleep")).errors == {"timeout": 1}
        assert long.score(items("sleep")).rewards.tolist() == [0.5]


def test_the_limit_holds_for_each_response_not_for_the_batch(pool_of):
    with pool_of(workers=1, timeout_s=3.5) as pool:
        assert pool.score(items(*["sleep"] * 4)).errors == {}


def test_quick_responses_share_a_message_and_slow_ones_do_not(pool_of):
    messages = []
    with pool_of(workers=1) as pool:
        schedule = pool._pool.schedule
        pool._pool.schedule = lambda *given, **named: messages.append(1) or schedule(*given, **named)
        assert pool.score(items(*["x"] * 40)).rewards.tolist() == [0.5] * 40 and len(messages) == 3
        messages.clear()
        assert pool.score(items(*["sleep"] * 3)).rewards.tolist() == [0.5] * 3 and len(messages) == 3


def test_the_number_of_workers_is_the_configured_one(pool_of, workers_of):
    with pool_of(workers=3) as pool:
        assert len(workers_of(pool, 3)) == 3


def test_a_batch_in_which_everything_fails_is_all_nan(pool_of):
    with pool_of() as pool:
        result = pool.score(items(*["kill"] * 3, *["none"] * 3))
    assert all(math.isnan(r) for r in result.rewards)
    assert sum(result.errors.values()) == 6


def test_what_our_own_scorers_cannot_finish_is_wrong_and_counted():
    """The response's fault alone: the answer was read before."""
    item = lambda text: RewardItem(text, "", "7", {})
    with RewardPool(RewardConfig(kind="math_verify", timeout_s=30.0), "dataset") as patient:
        result = patient.score([item("\\boxed{7}"), item("\\boxed{8}")])
    assert result.rewards.tolist() == [1.0, 0.0] and result.errors == {} and not result.unreadable.any()
    with RewardPool(RewardConfig(kind="math_verify", timeout_s=2.0), "dataset") as pool:
        result = pool.score([item("\\boxed{9^{9^{9^{9}}}}")])
    assert result.rewards.tolist() == [0.0] and result.errors == {}


def test_an_empty_batch():
    with RewardPool(RewardConfig(), "arithmetic") as pool:
        assert pool.score([]).rewards.shape == (0,)


def test_workers_that_died_between_batches_are_replaced(pool_of, workers_of):
    with pool_of() as pool:
        for pid in workers_of(pool, 2):
            os.kill(pid, signal.SIGKILL)
            assert dead(pid)
        assert pool.score(items(*"xxxx")).rewards.tolist() == [0.5] * 4


def test_workers_ignore_an_interrupt(pool_of):
    with pool_of() as pool:
        assert pool.score(items("interrupt")).rewards.tolist() == [0.5]


def test_closing_ends_the_workers(pool_of, workers_of):
    with pool_of() as pool:
        pids = workers_of(pool, 2)
    assert all(dead(pid) for pid in pids)
    with pytest.raises(RuntimeError, match="closed"):
        pool.score(items("x"))


def test_math_verify_in_the_pool():
    with RewardPool(RewardConfig(kind="math_verify"), "dataset") as pool:
        result = pool.score([RewardItem(text, "", "1/2", {}) for text in ("$\\frac12$", "0.25")])
    assert result.rewards.tolist() == [1.0, 0.0]
    assert result.errors == {}


def test_reasoning_gym_in_the_pool():
    rows = reasoning_gym_rows("arc_agi", 1, seed=0)
    with RewardPool(RewardConfig(kind="task"), "reasoning-gym:arc_agi") as pool:
        said = (rows.answer[0], "1 2")
        result = pool.score([RewardItem(text, "", rows.answer[0], json.loads(rows.meta[0])) for text in said])
    assert result.rewards[0] == 1.0 > result.rewards[1]


@pytest.mark.parametrize("kind, cause", [
    ("nowhere_to_be_found:f", "ModuleNotFoundError"), ("mine:missing", "no attribute 'missing'"),
    ("mine:SCORERS", "no attribute"), ("json:__doc__", "not callable"), ("broken:f", "ZeroDivisionError"),
    ("deadly:f", "died"),
])
def test_a_scorer_that_cannot_be_loaded_is_a_configuration_error(pool_of, tmp_path, kind, cause):
    (tmp_path / "broken.py").write_text("1 / 0")
    (tmp_path / "deadly.py").write_text("import os; os._exit(1)")
    with pytest.raises(ConfigError, match=f"reward.kind: '{kind}' cannot be loaded.*{cause}"):
        pool_of(kind=kind)


def run_python(*args, folder):
    return subprocess.run([sys.executable, *args], cwd=folder, capture_output=True, text=True, timeout=60)


def test_the_module_that_workers_start_from_is_light(tmp_path):
    code = "import sys, fastsched.data.rewards; print({'torch', 'vllm', 'transformers', 'datasets'} & set(sys.modules))"
    assert run_python("-c", code, folder=tmp_path).stdout == "set()\n"


MAIN = '''
import sys
open("imports.txt", "a").write("once")
from fastsched.config import RewardConfig
from fastsched.data.rewards import RewardItem, RewardPool
if __name__ == "__main__":
    with RewardPool(RewardConfig(kind="mine:score", timeout_s=60), "arithmetic") as pool:
        print(pool.score([RewardItem(sys.argv[1], "", "", {})]).rewards[0], flush=True)
'''


def test_workers_do_not_import_the_main_module_again(pool_of, tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    assert run_python("main.py", "x", folder=tmp_path).stdout == "0.5\n"
    assert (tmp_path / "imports.txt").read_text() == "once"


def test_workers_do_not_outlive_a_killed_trainer(pool_of, tmp_path):
    (tmp_path / "main.py").write_text(MAIN)
    file = tmp_path / "pid"
    trainer = subprocess.Popen([sys.executable, "main.py", f"hang {file}"], cwd=tmp_path)
    wait_until(lambda: trainer.poll() is not None or file.exists() and file.read_text())
    trainer.kill()
    trainer.wait()
    assert dead(int(file.read_text()))
