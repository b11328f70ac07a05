"""Whole runs of the objective's options through the command line, on transformers `generate` with a random model."""

import json
import shutil

import pytest
import whole_run
from whole_run import rows, small

from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.models.tiny import random_tiny


@pytest.fixture
def graded(tmp_path):
    return whole_run.graded(tmp_path)


def lines(run_dir, name):
    return [json.loads(line) for line in (run_dir / name).read_text().splitlines()]


@pytest.mark.slow
def test_resume_repeats_counts_gate_reference_and_deciles(fastsched, tmp_path, random_model, graded):
    """TP-Score credit, KL gate and hard copies go on from a checkpoint digit for digit."""
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    options = ["--reward.kind", "graded:score", "--train.steps", "5", "--train.checkpoint_every", "2", "--train.keep_checkpoints", "9",
               "--train.eval_at_ends", "false", "--scheduler.temporal.mode", "linear", "--scheduler.temporal.end", "1.0",
               "--scheduler.temporal.proxy", "tp_score", "--scheduler.kl_gate.enabled", "true", "--learner.reference", "copy",
               "--scheduler.copy_every", "3", "--log.snr_bins", "true"]
    done = fastsched(*small(random_model, straight, *options), **graded)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.copytree(straight, resumed)
    for step in (4, 5):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step}")
    done = fastsched(*small(random_model, resumed, *options, "--resume"), **graded)
    assert done.returncode == 0 and "next is step 3" in done.stdout, done.stdout + done.stderr
    assert rows(straight) == rows(resumed) and len(rows(resumed)) == 5
    assert lines(straight, "deciles.jsonl") == lines(resumed, "deciles.jsonl") and len(lines(resumed, "deciles.jsonl")) == 5
    state = [json.loads((run / "checkpoints" / "step-5" / "state.json").read_text()) for run in (straight, resumed)]
    assert state[0]["learner"] == state[1]["learner"] and state[0]["scheduler"] == state[1]["scheduler"]
    found = rows(resumed)
    assert [r["reference_copied"] for r in found] == ["0", "0", "0", "1", "0"] and float(found[3]["kl"]) < 1e-6 < float(found[2]["kl"])
    assert found[0]["kl_gate"] == "" and float(found[1]["kl_gate"]) > 0 and 0 < float(found[0]["kept_fraction"]) < 1
    assert float(found[-1]["temporal_s"]) == 0 and float(found[-1]["kept_fraction"]) == 1 and {"snr_0", "snr_3"} <= set(found[0])


@pytest.mark.slow
def test_two_ranks_agree_with_one(fastsched, tmp_path, random_model, graded):
    """Token counts, the entropy quantile behind the gate and the deciles are of all ranks, whatever their number."""
    options = ["--reward.kind", "graded:score", "--train.eval_at_ends", "false", "--scheduler.temporal.mode", "linear",
               "--scheduler.temporal.proxy", "tp_score", "--scheduler.temporal.end", "1.0", "--scheduler.kl_gate.enabled", "true",
               "--rollout.correction", "sequence_tis", "--rollout.correction_divide", "true", "--train.steps", "3"]
    launcher = ("-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port", "29741", "-m", "fastsched.cli")
    one, two = tmp_path / "one", tmp_path / "two"
    for run, how in ((one, ()), (two, launcher)):
        done = fastsched(*small(random_model, run, *options), launcher=how, OMP_NUM_THREADS="1", **graded)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    for a, b in zip(rows(one), rows(two), strict=True):
        for name in ("kept_fraction", "kl_gate", "entropy", "kl", "grad_norm", "correction_mean", "correction_max", "stale"):
            assert a[name] == b[name] or float(a[name]) == pytest.approx(float(b[name]), rel=1e-3, abs=1e-6), name
    for a, b in zip(lines(one, "deciles.jsonl"), lines(two, "deciles.jsonl"), strict=True):
        for name in ("kept", "entropy", "surprisal"):
            assert [x is None for x in a[name]] == [x is None for x in b[name]]
            assert [x or 0 for x in a[name]] == pytest.approx([x or 0 for x in b[name]], rel=1e-4)
    state = [json.loads((run / "checkpoints" / "step-3" / "state.json").read_text())["learner"] for run in (one, two)]
    assert state[0] == state[1]


def test_the_tiny_twin_runs_the_schedule(fastsched, tmp_path, random_model, graded):
    """Late tokens first, everything from 0.8 of the steps on; the objective's settings are those of the published preset."""
    run = tmp_path / "run"
    options = ["train", "--preset", "tp-schedule-tiny", "--run_dir", str(run), "--model.name", str(random_model), "--rollout.engine",
               "transformers", "--data.size", "400", "--data.eval_per_bin", "4", "--train.prompts_per_step", "8", "--train.steps", "5",
               "--log.plots", "false", "--train.eval_at_ends", "false", "--reward.kind", "graded:score",
               "--learner.skip_flat_groups", "false"]
    done = fastsched(*options, **graded)
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(run)
    assert [float(r["temporal_s"]) for r in found] == pytest.approx([0.99 * (1 - step / 4) for step in (1, 2, 3, 4)] + [0.0], abs=1e-9)
    kept = [float(r["kept_fraction"]) for r in found]
    assert kept[0] < kept[1] < kept[2] < kept[3] == kept[4] == 1 and all(r["kl"] == "" for r in found)
    first, last = lines(run, "deciles.jsonl")[0], lines(run, "deciles.jsonl")[-1]
    assert first["kept"][0] == 0 and first["entropy"][0] is None and first["surprisal"][0] > 0 and last["kept"][0] == 1


def test_both_presets_hold_the_published_settings():
    """algorithms.md 1.6."""
    full, tiny = (parse_config(["--config", str(preset_path(f"tp-schedule-{name}"))]) for name in ("qwen3-4b", "tiny"))
    for cfg in (full, tiny):
        t, learner, s = cfg.scheduler.temporal, cfg.learner, cfg.scheduler
        assert (t.mode, t.proxy, t.magnitude, t.start, t.end) == ("linear", "suffix", 0.99, 0.0, 0.8)
        assert (learner.loss, learner.clip, learner.dual_clip, learner.kl, learner.grad_clip) == ("dapo", (0.2, 0.28), 3.0, "none", 1.0)
        assert learner.updates_per_batch == 1 and learner.cooldown == 0 and learner.warmup_steps == 0 and cfg.rollout.temperature == 1.2
        assert (s.kind, s.coefficients, s.entropy.ceiling, s.kl.ceiling) == ("uniform", "constant", 0.0, 0.0)
        assert cfg.train.steps == 117 and cfg.rollout.responses == 8
    assert (full.learner.lr, full.learner.weight_decay, full.train.prompts_per_step) == (1e-6, 0.1, 256)
    assert (full.data.max_prompt_tokens, full.rollout.max_new_tokens, full.rollout.top_p, full.rollout.top_k) == (1024, 39936, 1.0, -1)


def test_a_teacher_teaches_where_no_reward_does(fastsched, tmp_path, random_model):
    """Rewards that never differ: the guard against missing signal stays quiet, and the gap to the teacher is what is measured."""
    (tmp_path / "flat.py").write_text("def score(response, **_):\n    return 0.0\n")
    teacher, run = random_tiny(tmp_path / "teacher", tied=True, seed=7), tmp_path / "run"
    done = fastsched(*small(random_model, run, "--reward.kind", "flat:score", "--learner.loss", "opd", "--learner.teacher", str(teacher),
                            "--learner.kl", "none", "--scheduler.kl.start", "0", "--scheduler.kl.floor", "0", "--scheduler.kl.ceiling", "0",
                            "--train.steps", "3", "--train.no_signal_limit", "2", "--train.eval_at_ends", "false"),
                     PYTHONPATH=str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(run)
    assert len(found) == 3 and {r["kl_kind"] for r in found} == {"k1 to teacher"}
    assert all(float(r["flat_groups"]) == 1 and float(r["kl"]) != 0 and float(r["grad_norm"]) > 0 for r in found)
