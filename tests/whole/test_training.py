"""Whole runs through the command line: real engines, real faults."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from command_line import ROOT, environment
from fastsched_kernels import implementation
from in_process import in_this_process
from whole_run import graded, rows, small, wait_for_row

from fastsched.config import TrainConfig


def test_kill_9_and_resume_repeat_every_digit(fastsched, tmp_path):
    """F1-F4, F6 on the tiny preset with vLLM: an uninterrupted run against one killed twice, first inside the accumulation of step 5:
    some micro-batches are in the gradients, the others are not."""
    options = ["train", "--preset", "tiny-cpu", "--train.steps", "9", "--train.checkpoint_every", "3", "--data.size", "4000",
               "--data.eval_per_bin", "8", "--train.eval_every", "4", "--log.plots", "false"]
    straight = fastsched(*options, "--run_dir", str(tmp_path / "straight"))
    assert straight.returncode == 0, straight.stdout + straight.stderr
    run_dir, resume = tmp_path / "killed", []
    for step, program in ((5, "bench.faults.injection"), (8, "fastsched.cli")):
        process = subprocess.Popen([sys.executable, "-m", program, *options, "--run_dir", str(run_dir), *resume], cwd=ROOT, text=True,
                                   env=environment() | {"FAULT": f"learn:{step}"}, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        if program == "fastsched.cli":
            wait_for_row(run_dir, step, process)
            process.send_signal(signal.SIGKILL)
        process.communicate(timeout=240)
        assert process.returncode == -signal.SIGKILL and len(rows(run_dir)) >= step - 1
        resume = ["--resume"]
    last = fastsched(*options, "--run_dir", str(run_dir), "--resume")
    assert last.returncode == 0, last.stdout + last.stderr
    assert "resumed step-6: model, optimizer, averaged policy, scheduler" in last.stdout and "next is step 7" in last.stdout
    assert len(rows(run_dir)) == 9 and rows(run_dir) == rows(tmp_path / "straight")
    for name in ("samples.jsonl", "evals.jsonl"):
        assert (run_dir / name).read_text() == (tmp_path / "straight" / name).read_text()


@pytest.mark.skipif(not implementation().startswith("cpp"), reason=f"the compiled head does not run here: {implementation()}")
def test_fused_and_reference_head_train_alike(fastsched, tmp_path, random_model):
    """Four optimizer steps on one batch, the same tokens for both: the C++ head and the PyTorch formulas."""
    runs = []
    for head in ("cpp", "pytorch"):
        options = ("--learner.head", head, "--train.steps", "1", "--learner.updates_per_batch", "4", "--reward.kind", "graded:score")
        done = fastsched(*small(random_model, tmp_path / head, *options), **graded(tmp_path))
        assert done.returncode == 0 and f"head: {head} (asked for)" in done.stdout, done.stdout + done.stderr
        runs += rows(tmp_path / head)
    for name in ("success", "loss", "entropy", "kl", "drift", "grad_norm", "ratio_deviation"):
        fused, reference = (float(row[name]) for row in runs)
        assert fused == pytest.approx(reference, rel=1e-3, abs=1e-6), name
    assert all(float(row["grad_norm"]) > 0 and float(row["drift"]) > 0 and row["flat_groups"] == "0.0" for row in runs)


def test_what_cannot_run_here_is_named(fastsched, tmp_path, random_model, monkeypatch):
    done = fastsched(*small(random_model, tmp_path / "flex", "--model.attention", "flex_attention"))
    assert done.returncode == 2 and "model.attention: flex_attention has no backward" in done.stderr, done.stdout + done.stderr

    def lacks(*_):
        raise NotImplementedError("implementation='cpp': not built")

    monkeypatch.setattr("fastsched.loop.assemble.implementation", lacks)
    done = fastsched(*small(random_model, tmp_path / "run", "--learner.head", "cpp"))
    assert done.returncode == 2 and "learner.head: implementation='cpp': not built" in done.stderr, done.stdout + done.stderr


def test_run_folder_and_console(fastsched, tmp_path, random_model):
    run = tmp_path / "run"
    done = fastsched(*small(random_model, run, "--log.plots", "true", "--train.keep_best", "success"), process=True)
    assert done.returncode == 0, done.stderr
    for name in ("config.yaml", "environment.json", "metrics.csv", "metrics.jsonl", "samples.jsonl", "evals.jsonl", "log.txt",
                 "report.html", "checkpoints/step-2/COMPLETE", "tensorboard", "plots"):
        assert (run / name).exists(), name
    assert done.stdout.strip().splitlines()[-1] == str(run / "report.html")
    assert "1 digit" in done.stdout and "lambda_KL" in done.stdout and "get_accelerator" not in done.stdout
    assert "get_accelerator" in (run / "log.txt").read_text()  # the noise went there
    marker = json.loads((run / "checkpoints/step-2/COMPLETE").read_text())
    assert marker["score"] == float(rows(run)[-1]["success_ema"]) and marker["ranks"] == 1
    again = fastsched(*small(random_model, run))
    assert again.returncode == 2 and "already holds a run" in again.stderr


def test_dynamic_sampling_replaces_groups_without_signal(fastsched, tmp_path, random_model):
    """Half of the problems give one reward to all responses: refills make up for them, a step without refills keeps them."""
    (tmp_path / "rare.py").write_text(
        "import zlib\n"
        "def score(prompt, response, **_):\n"
        "    return 0.0 if zlib.crc32(prompt.encode()) % 2 else zlib.crc32(response.encode()) / 2**32\n")
    shares = {}
    for refills in ("0", "3"):  # drawn without regard to success, so that the seed alone decides which problems come
        done = fastsched(*small(random_model, tmp_path / refills, "--reward.kind", "rare:score", "--scheduler.kind", "uniform",
                                "--scheduler.refills", refills), PYTHONPATH=str(tmp_path))
        assert done.returncode == 0, done.stdout + done.stderr
        last = rows(tmp_path / refills)[-1]
        shares[refills] = (int(last["prompts_total"]), float(last["flat_groups"]))
        assert int(last["responses_total"]) == 4 * int(last["prompts_total"])
    assert shares["0"][0] == 16 < shares["3"][0] <= 64 and shares["3"][1] == 0 < shares["0"][1]


def test_a_budget_ends_the_run(fastsched, tmp_path, random_model):
    """Two of nine steps: 32 responses a step pass the budget of 40 in the second, which is saved and evaluated."""
    run = tmp_path / "run"
    done = fastsched(*small(random_model, run, "--train.steps", "9", "--train.rollout_budget", "40"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["responses_total"] for row in rows(run)] == ["32", "64"] and (run / "checkpoints/step-2/COMPLETE").exists()
    assert json.loads((run / "evals.jsonl").read_text().splitlines()[-1])["step"] == 2


@pytest.mark.parametrize("budget, left, spent", [({}, (1, 1e9, 1e9), (2, 0, 0)), ({"rollout_budget": 40}, (1, 39, 1e9), (1, 40, 0)),
                                                 ({"token_budget": 257}, (1, 1e9, 256), (1, 0, 257))])
def test_a_run_is_complete_by_steps_responses_or_tokens(budget, left, spent):
    cfg = TrainConfig(steps=2, **budget)
    assert not cfg.spent(*left) and cfg.spent(*spent)


def test_rewards_that_fail_cost_only_their_response(fastsched, tmp_path, random_model):
    """The fault: a scorer that raises for a third of the responses, hangs for some and returns NaN and None for others."""
    (tmp_path / "my_reward.py").write_text(
        "import time, zlib\n"
        "def score(prompt, response, answer, meta):\n"
        "    kind = zlib.crc32(response.encode()) % 16\n"
        "    if kind < 6: raise RuntimeError('broken scorer')\n"
        "    if kind == 6: time.sleep(60)\n"
        "    return {7: None, 8: float('nan')}.get(kind, kind / 16)\n")
    options = small(random_model, tmp_path / "run", "--reward.kind", "my_reward:score", "--reward.timeout_s", "0.5")
    done = fastsched(*options, PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "broken scorer" in done.stdout
    failures = [int(float(row["reward_failures"])) for row in rows(tmp_path / "run")]
    assert all(0 < n < 32 for n in failures)
    assert all(row["reward_mean"] and row["success"] and row["loss"] for row in rows(tmp_path / "run"))  # K5: a NaN score spoils no mean


def test_several_rewards_have_a_column_each_and_are_trained_on_together(fastsched, tmp_path, random_model):
    (tmp_path / "brevity.py").write_text("def short(prompt, response, answer, meta, tokens):\n    return -tokens / 8\n")
    extra = "[{kind: 'brevity:short', weight: 0.5, name: length}, {kind: graded_number, weight: 0}]"
    done = fastsched(*small(random_model, tmp_path / "run", "--reward.extra", extra), PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stderr
    for row in rows(tmp_path / "run"):
        right, length = float(row["reward_exact_number"]), float(row["reward_length"])
        assert length == pytest.approx(-float(row["response_len_mean"]) / 8) and float(row["reward_graded_number"]) >= right
        assert float(row["reward_mean"]) == pytest.approx(right + 0.5 * length)


def test_a_reward_that_cannot_be_loaded(fastsched, tmp_path, random_model):
    done = fastsched(*small(random_model, tmp_path / "run", "--reward.kind", "no_such_module:score"))
    assert done.returncode == 2 and "reward.kind" in done.stderr and "no_such_module" in done.stderr


def test_no_signal_stops_with_a_reason(fastsched, tmp_path, random_model):
    (tmp_path / "constant.py").write_text("def score(**_):\n    return 1.0\n")
    done = fastsched(*small(random_model, tmp_path / "run", "--reward.kind", "constant:score", "--train.no_signal_limit", "2",
                            "--train.steps", "9",
                            "--scheduler.kl.start", "0", "--scheduler.kl.floor", "0", "--scheduler.kl.ceiling", "0",
                            "--scheduler.entropy.ceiling", "0"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 3 and "train.no_signal_limit" in done.stdout
    assert len(rows(tmp_path / "run")) == 2 and (tmp_path / "run/checkpoints/step-2/COMPLETE").exists()


def test_divergence_stops_with_exit_code_3(fastsched, tmp_path, random_model):
    done = fastsched(*small(random_model, tmp_path / "run", "--learner.lr", "1e30", "--train.steps", "9", "--learner.nonfinite_limit", "2",
                            "--reward.kind", "graded:score"), **graded(tmp_path))
    assert done.returncode == 3, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_interrupt_checkpoints_and_resumes(fastsched, tmp_path, random_model):
    run = tmp_path / "run"
    process = subprocess.Popen([sys.executable, "-m", "fastsched.cli", *small(random_model, run, "--train.steps", "500")], cwd=ROOT,
                               env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_row(run, 1, process)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert process.returncode == 130 and "interrupted; continue with --resume" in out, out + err
    step = len(rows(run))
    more = fastsched("train", "--run_dir", str(run), "--resume", "--train.steps", str(step + 1))
    assert more.returncode == 0 and f"train.steps was 500 and is now {step + 1}" in more.stdout, more.stdout + more.stderr
    assert len(rows(run)) == step + 1


def best_step(run: Path) -> int:
    """Of two evaluated steps the one with the higher accuracy over all prompts, the later of equals."""
    records = [json.loads(line) for line in (run / "evals.jsonl").read_text().splitlines()]
    accuracy = {r["step"]: sum(r["accuracy"][b] * n for b, n in r["n"].items()) / sum(r["n"].values()) for r in records if r["step"]}
    for folder in (run / "checkpoints").iterdir():
        marker = json.loads((folder / "COMPLETE").read_text())
        assert marker["score"] == pytest.approx(accuracy[marker["step"]])
    return max(accuracy, key=lambda step: (round(accuracy[step], 9), step))


def test_eval_and_export(fastsched, tmp_path, random_model):
    import torch
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM

    run = tmp_path / "run"
    kept = ("--train.keep_best", "accuracy", "--train.eval_every", "1", "--train.checkpoint_every", "1", "--train.keep_checkpoints", "1")
    done = fastsched(*small(random_model, run, "--reward.kind", "graded:score", *kept), **graded(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    best = best_step(run)
    assert {p.name for p in (run / "checkpoints").iterdir()} == {"step-2", f"step-{best}"}
    files = {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    done = fastsched("eval", str(run), **graded(tmp_path))
    assert done.returncode == 0 and "held-out accuracy at step 2: 1 digit" in done.stdout, done.stdout + done.stderr
    assert files == {p: p.stat().st_mtime_ns for p in run.rglob("*") if p.is_file()}
    for flag, name, step in (((), "policy", 2), (("--average",), "average", 2), (("--best",), "policy", best)):
        out = tmp_path / "-".join((name, *flag)) if "--best" in flag else tmp_path / name
        done = fastsched("export", str(run), "--out", str(out), *flag)
        assert done.returncode == 0 and done.stdout.strip() == str(out), done.stderr
        model = AutoModelForCausalLM.from_pretrained(out)
        saved = load_file(run / f"checkpoints/step-{step}/{name}.safetensors")
        assert all(torch.equal(p, saved[n]) for n, p in model.named_parameters())
    assert not torch.equal(load_file(tmp_path / "policy/model.safetensors")["model.norm.weight"],
                           load_file(tmp_path / "average/model.safetensors")["model.norm.weight"])
    assert fastsched("export", str(tmp_path / "nothing")).returncode == 2


DEEPSPEED = str(Path(sys.executable).parent / "deepspeed")
LAUNCHED = {  # one command for each host, ZeRO stage
    "torchrun": ([("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29731", "-m", "fastsched.cli")], 1),
    "deepspeed": ([(DEEPSPEED, "--num_gpus", "2", "--master_port", "29732", "--module", "fastsched.cli")], 3),
    "hostfile": ([(DEEPSPEED, "--hostfile", "HOSTS", "--no_ssh", "--node_rank", node, "--master_addr", "127.0.0.1", "--master_port",
                   "29733", "--module", "fastsched.cli") for node in "10"], 2),
}


@pytest.fixture(scope="module")
def one_rank(command, tmp_path_factory, random_model):
    """A run on one rank in ZeRO-1: (folder of its reward as environment, run folder)."""
    folder = tmp_path_factory.mktemp("ranks")
    reward = graded(folder)
    done = in_this_process(command, small(random_model, folder / "one", "--reward.kind", "graded:score"), folder, reward)
    assert done.returncode == 0, done.stdout + done.stderr
    return reward, folder / "one"


@pytest.mark.parametrize("launcher", ["deepspeed", *(pytest.param(other, marks=pytest.mark.slow) for other in ("torchrun", "hostfile"))])
def test_two_ranks_under_a_launcher(fastsched, tmp_path, random_model, one_rank, launcher):
    """The same metrics as one rank in ZeRO-1, to fp32 tolerance: prompts, seeds and denominators are global. In the second step, with
    weights that differ by rounding, a sampled token may be another one. The hosts of the hostfile are two names of this machine, each
    with one rank."""
    reward, one = one_rank
    two, hosts = tmp_path / "two", tmp_path / "hosts"
    hosts.write_text("one slots=1\ntwo slots=1\n")
    commands, stage = LAUNCHED[launcher]
    options = small(random_model, two, "--learner.zero_stage", str(stage), "--reward.kind", "graded:score")
    *others, first = [tuple(str(hosts) if part == "HOSTS" else part for part in command) for command in commands]
    own = {"OMP_NUM_THREADS": "1", **reward}
    with (tmp_path / "beside.log").open("w") as output:
        beside = [subprocess.Popen([sys.executable, *command, *options], cwd=ROOT, env=environment() | own, stdout=output, stderr=output,
                                   start_new_session=True) for command in others]
        try:
            done = fastsched(*options, launcher=first, **own)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:] + (tmp_path / "beside.log").read_text()[-4000:]
            assert [process.wait(60) for process in beside] == [0] * len(beside)
        finally:
            for process in beside:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
    (a, later), (b, later_too) = rows(one), rows(two)
    assert (a["w_0"], a["tokens_total"]) == (b["w_0"], b["tokens_total"]) and float(a["grad_norm"]) > 0
    for name in ("reward_mean", "entropy", "kl", "grad_norm", "drift", "response_len_mean"):
        assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-3, abs=1e-6), name
    for name in ("reward_mean", "entropy", "response_len_mean"):
        assert float(later[name]) == pytest.approx(float(later_too[name]), rel=0.05), name
    counts = [json.loads((folder / "evals.jsonl").read_text().splitlines()[0])["n"] for folder in (one, two)]
    assert counts[0] == counts[1]


def test_a_disk_that_fills_stops_with_a_reason_and_resumes(tmp_path, random_model):
    """The fault: no file of the run may grow beyond 12 KiB, which metrics.jsonl needs after some steps."""
    options = [sys.executable, "-m", "fastsched.cli", *small(random_model, tmp_path / "run", "--train.steps", "40",
                                                             "--train.eval_at_ends", "false", "--log.tensorboard", "false")]
    full = subprocess.run(["bash", "-c", 'ulimit -f 12; exec "$@"', "bash", *options], cwd=ROOT, env=environment(), capture_output=True,
                          text=True, timeout=240)
    assert full.returncode == 3 and "Traceback" not in full.stderr, full.stdout + full.stderr
    assert "fastsched: a file grew beyond its limit" in full.stderr and "continue with --resume" in full.stderr
