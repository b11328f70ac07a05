"""Samplers that keep groups, through the command line: a run killed while groups wait, and two ranks that hold the same groups."""

import signal
import subprocess
import sys

import pytest
from command_line import ROOT, environment
from whole_run import rows, wait_for_row

TWO = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29747", "-m", "fastsched.cli")


def options(model, run_dir, kind=("speed", "--scheduler.speed.screen", "2")):
    return ["train", "--run_dir", str(run_dir), "--preset", "tiny-cpu", "--model.name", str(model), "--rollout.engine", "transformers",
            "--data.size", "400", "--data.eval_per_bin", "4", "--train.eval_at_ends", "false", "--train.prompts_per_step", "8",
            "--rollout.responses", "6", "--train.steps", "5", "--train.checkpoint_every", "2", "--log.plots", "false",
            "--reward.kind", "third:score", "--scheduler.kind", *kind]


@pytest.fixture(scope="module")
def straight(random_model, tmp_path_factory):
    """An uninterrupted run, under a reward that a random model varies in: (folder of the reward, run folder)."""
    folder = tmp_path_factory.mktemp("speed")
    (folder / "third.py").write_text("def score(response, **_):\n    return float(sum(map(ord, response)) % 3 == 0)\n")
    run_command(folder, *options(random_model, folder / "straight"))
    return folder, folder / "straight"


def run_command(folder, *arguments, launcher=("-m", "fastsched.cli"), **extra):
    done = subprocess.run([sys.executable, *launcher, *arguments], cwd=ROOT, env=with_reward(folder) | extra, capture_output=True,
                          text=True, timeout=280)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done


def with_reward(folder):
    own = environment()
    return own | {"PYTHONPATH": f"{own.get('PYTHONPATH', '')}:{folder}".lstrip(":")}


@pytest.mark.slow
def test_killed_with_groups_waiting_it_repeats_every_digit(straight, random_model):
    folder, reference = straight
    run_dir = folder / "killed"
    process = subprocess.Popen([sys.executable, "-m", "fastsched.cli", *options(random_model, run_dir)], cwd=ROOT, env=with_reward(folder),
                               stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    wait_for_row(run_dir, 3, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    done = run_command(folder, "train", "--run_dir", str(run_dir), "--resume")
    assert "resumed step-" in done.stdout
    assert int(rows(reference)[1]["buffered_groups"]) > 0  # what the checkpoint of step 2 had to hold
    assert len(rows(run_dir)) == 5 and rows(run_dir) == rows(reference)
    assert (run_dir / "samples.jsonl").read_text() == (reference / "samples.jsonl").read_text()


def test_every_column_counts_what_was_sampled(straight):
    for before, row in zip([None, *rows(straight[1])], rows(straight[1]), strict=False):
        assert int(row["reward_failures"]) == 0 and float(row["failed_scores"]) == 0 and 0 < int(row["trained_groups"]) <= 8
        assert float(row["flat_groups"]) == 0  # what passed a screen has two different rewards
        assert int(row["prompts_total"]) > (int(before["prompts_total"]) if before else 0)


@pytest.mark.slow
def test_two_ranks_hold_the_same_groups(straight, random_model):
    """The same prompts, rewards and gradients as on one rank, to fp32 tolerance: candidates and continuations are spread over both."""
    folder, reference = straight
    run_command(folder, *options(random_model, folder / "two"), launcher=TWO, OMP_NUM_THREADS="1")
    assert_same(rows(reference), rows(folder / "two"))


@pytest.mark.slow
def test_two_ranks_replay_the_same_groups(straight, random_model):
    """DOTS: candidates by the embeddings of `fastsched cluster`, half of each batch from the replay buffer."""
    folder, dots = straight[0], ("dots", "--features.clusters", "4", "--features.dims", "8")
    run_command(folder, "cluster", *options(random_model, "", dots)[3:])
    run_command(folder, *options(random_model, folder / "dots", dots))
    run_command(folder, *options(random_model, folder / "dots-two", dots), launcher=TWO, OMP_NUM_THREADS="1")
    one = rows(folder / "dots")
    assert_same(one, rows(folder / "dots-two"))
    assert int(one[-1]["trained_groups"]) == 8 and int(one[-1]["prompts_total"]) < 5 * 8 and float(one[-1]["stale"]) > 0


def assert_same(some, others):
    for a, b in zip(some, others, strict=True):
        for name in ("tokens_total", "prompts_total", "trained_groups", "buffered_groups", "w_0"):
            assert a[name] == b[name], (name, a["step"])
        for name in ("reward_mean", "entropy", "kl", "grad_norm", "drift", "response_len_mean"):
            assert float(a[name]) == pytest.approx(float(b[name]), rel=1e-3, abs=1e-6), name
