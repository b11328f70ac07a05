"""Rollouts one step ahead: asynchronous, exactly one version old, exact on resume; and training on servers of its own."""

import shutil
import signal
import subprocess
import sys
import threading

import numpy as np
import pytest
from command_line import ROOT, environment
from processes import children, members, wait_until
from whole_run import graded, rows, wait_for_row

from fastsched.engines.rollout.weights import SyncError
from fastsched.loop.ahead import LookAhead, response_from_json, response_to_json
from fastsched.loop.rollouts import Drawn, Share
from fastsched.types import Prompt, Response, Sampling, Selection


def on_servers(model, run_dir, *more):
    """The loop on vLLM servers with a random model."""
    return ["train", "--preset", "tiny-cpu", "--run_dir", str(run_dir), "--model.name", str(model), "--rollout.engine", "vllm_server",
            "--rollout.kv_cache_gb", "0.125", "--data.size", "400", "--data.eval_per_bin", "4", "--train.prompts_per_step", "8",
            "--rollout.responses", "4", "--train.eval_at_ends", "false", "--log.plots", "false", *more]


def drawn(step: int) -> Drawn:
    """One prompt, of row `step`."""
    rows = np.array([step])
    return Drawn(Selection(rows, rows), (1.0,), Share([Prompt(step, (5, 6), "", "", 0)], [step], Sampling(1, 4)))


def test_the_next_batch_is_sampled_while_this_one_is_trained():
    started, released = [], threading.Event()

    def generate(prompts, sampling, seeds):
        started.append(prompts[0].row)
        assert prompts[0].row == 1 or released.wait(20)
        return [f"response to {prompts[0].row}"]

    ahead = LookAhead(generate)
    first, responses = ahead.take(drawn, 1)
    assert (first.selection.rows, responses) == ([1], ["response to 1"])  # the second batch cannot finish before it is released below
    wait_until(lambda: started == [1, 2])
    released.set()
    ahead.wait()
    assert ahead.pending()[2] == ["response to 2"] and ahead.take(drawn, 2)[0].selection.rows == [2]
    with pytest.raises(RuntimeError, match="step 5: the batch sampled ahead is that of step 3"):
        ahead.take(drawn, 5)
    ahead.close()


def test_what_the_sampling_raised_is_raised_before_the_weights_change():
    def generate(prompts, sampling, seeds):
        if prompts[0].row == 2:
            raise SyncError("server gone")
        return prompts

    ahead = LookAhead(generate)
    ahead.take(drawn, 1)
    with pytest.raises(SyncError, match="server gone"):
        ahead.wait()


def test_a_response_survives_json_bit_for_bit():
    prompt = Prompt(3, (5, 6), "", "", 0)
    response = Response(3, (5, 6), (7, 8, 9), np.array([-0.1, np.nan, -1e-30], np.float32), "stop", 4)
    back = response_from_json(prompt, response_to_json(response))
    np.testing.assert_array_equal(back.logp, response.logp)
    assert back.logp.dtype == np.float32 and (back.token_ids, back.finish_reason, back.weight_version) == ((7, 8, 9), "stop", 4)


@pytest.mark.slow
def test_ahead_on_a_server_and_resume_repeat_every_digit(fastsched, tmp_path, random_model):
    """Straight against resumed from the middle: the batch in flight at the checkpoint is part of it."""
    options = ["--rollout.ahead", "1", "--train.steps", "4", "--train.checkpoint_every", "2", "--reward.kind", "graded:score"]
    extra = {"PYTHONPATH": f"{graded(tmp_path)['PYTHONPATH']}:{environment().get('PYTHONPATH', '')}", "OMP_NUM_THREADS": "1"}
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    done = fastsched(*on_servers(random_model, straight, *options), timeout=290, process=True, **extra)
    assert done.returncode == 0, done.stdout + done.stderr
    table = rows(straight)
    assert [float(row["staleness"]) for row in table] == [0, 1, 1, 1]
    deviations = [float(row["ratio_deviation"]) for row in table]
    assert deviations[0] < 1e-4 < min(deviations[1:])  # stale responses carry the log-probabilities of the weights that sampled them
    shutil.copytree(straight, resumed)
    shutil.rmtree(resumed / "checkpoints/step-4")
    again = fastsched(*on_servers(random_model, resumed, *options), "--resume", timeout=290, process=True, **extra)
    assert again.returncode == 0 and "next is step 3" in again.stdout, again.stdout + again.stderr
    assert rows(resumed) == table
    assert (resumed / "samples.jsonl").read_text() == (straight / "samples.jsonl").read_text()


@pytest.mark.slow
def test_a_replica_that_dies_ends_the_run_with_its_name(tmp_path, random_model):
    """Two replicas train for three steps; then the fault: one is killed."""
    run = tmp_path / "run"
    command = [sys.executable, "-m", "fastsched.cli", *on_servers(random_model, run, "--rollout.replicas", "2", "--train.steps", "9999")]
    process = subprocess.Popen(command, cwd=ROOT, env=environment() | {"OMP_NUM_THREADS": "1"}, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    wait_for_row(run, 3, process)
    servers = children(f"--parent\0{process.pid}\0")
    leaders = [pid for pid in servers if members(pid)]
    assert len(leaders) == 2 and (run / "server-0.log").exists() and "/fastsched/generate" in (run / "server-1.log").read_text()
    subprocess.run(["kill", f"-{signal.SIGKILL.value}", str(leaders[0])], check=True)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 3 and "rollout server http://127.0.0.1:" in out and "ended with code -9" in out, out + err
    wait_until(lambda: not any(members(pid) for pid in leaders))
