"""Presets: those for a GPU pass --dry-run without a hub and fit their card, the tiny ones train."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import yaml
from whole_run import graded, rows

from fastsched.cli import main
from fastsched.config.arguments import parse_config, preset_names, preset_path
from fastsched.control.scheduler import Scheduler
from fastsched.report.runs import in_window_share, load_run
from fastsched.types import Features, Outcomes, Stats

CARD_GB = {"scheduler-qwen1.5-0.5b": 40, "scheduler-student": 16, "scheduler-engineer": 40, "scheduler-researcher": 40,
           "scheduler-frontier": 40}
TINY = [name for name in preset_names() if name.endswith("-tiny") and name not in ("ads-tiny", "tp-schedule-tiny")]
# those two: tests/test_features.py, tests/test_objective_runs.py
# They differ from the recipe in single numbers.
VARIANTS = [f"scheduler-{who}-tiny" for who in ("student", "engineer", "researcher", "frontier")]
GIB = 2**30


def config(name, *options):
    return parse_config(["--config", str(preset_path(name)), *options])


@pytest.fixture
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.mark.parametrize("name", [name for name in preset_names() if not config(name).model.name.startswith("builtin:")])
def test_presets_of_hub_models_dry_run_without_a_hub(capsys, offline, name):
    assert main(["train", "--preset", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert yaml.safe_load(out[: out.index("\nrun folder")])["model"]["name"].startswith("Qwen/")
    assert "responses a step" in out and "memory on each of" in out and "together" in out and "not checked" in out


@pytest.mark.parametrize("name", CARD_GB)
def test_the_recipes_fit_their_card(capsys, offline, name):
    """Learner as estimated, sampler with its share of the whole card, a tenth left over for what no estimate counts."""
    assert main(["train", "--preset", name, "--dry-run"]) == 0
    out = capsys.readouterr().out
    sizes = {part: float(size) for part, size in re.findall(r"^  (.+?) +([\d.]+) GiB", out, re.MULTILINE)}
    card = CARD_GB[name] * 1e9 / GIB
    sampler = config(name).rollout.gpu_memory_utilization * card
    assert sizes["together"] - sizes["sampler weights"] + sampler <= 0.9 * card
    assert sampler - sizes["sampler weights"] >= sizes["beside it, sampler cache"]
    assert f"{CARD_GB[name]} GB card" in preset_path(name).read_text().splitlines()[0]


@pytest.mark.parametrize("name", preset_names())
def test_the_scheduler_of_a_preset_schedules_its_run(name):
    """Whole batches of distinct prompts from the first step to the last, and coefficients that stay where the preset bounds them; a
    temporal schedule has run out at the end, and a gate opens."""
    cfg = config(name)
    scheduler, prompts, steps = cfg.scheduler, cfg.train.prompts_per_step, cfg.train.steps
    rng, rows = np.random.default_rng(0), 4 * prompts + 1
    features = Features((np.arange(rows) % 8).astype(np.int32), rng.random(rows, np.float32), np.eye(rows, 16, dtype=np.float16) + 0.1)
    one = Scheduler(scheduler, np.arange(rows) % 4, prompts, steps, cfg.train.seed, features)
    stats = Stats(loss=0.0, entropy=0.5, kl=0.02, kl_kind=cfg.learner.kl, drift=1.0, grad_norm=1.0, grad_snr=1.0, clip_fraction=0.0,
                  ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=cfg.learner.lr, entropy_quantile=0.1)
    for step in (1, 2, 3, steps):
        one.success = replace(one.success, steps=step - 1)
        selection, knobs = one.next_prompts(), one.knobs()
        assert len(set(selection.rows.tolist())) == len(selection.rows) == prompts and sum(knobs.weights) == pytest.approx(1)
        for value, bounds in ((knobs.kl_coef, scheduler.kl), (knobs.entropy_coef, scheduler.entropy)):
            assert bounds.floor <= value <= bounds.ceiling
        assert (knobs.temporal_s > 0) == (scheduler.temporal.mode != "none" and step < steps)
        assert (knobs.kl_gate is not None) == (scheduler.kl_gate.enabled and step > 1)
        rewards = (rng.random((prompts, 4)) < 0.5).astype(float)
        one.observe(Outcomes(selection.rows, selection.bins, rewards, np.ones((prompts, 4), int), np.zeros((prompts, 4), bool)), stats)


@pytest.mark.parametrize("name", CARD_GB)
def test_a_recipe_has_a_twin_of_the_same_kind(name):
    big, twin = config(name), config(f"{name}-tiny")
    for cfg in (big, twin):
        assert "the scheduler recipe" in preset_path(name).read_text()
        assert cfg.scheduler.kind == "adaptive" and cfg.data.digits == (1, 2, 3, 4)
    assert twin.scheduler.window == big.scheduler.window and twin.learner.kl == big.learner.kl
    assert (twin.scheduler.kl.ceiling == 0) == (big.scheduler.kl.ceiling == 0)
    assert twin.train.steps // twin.scheduler.update_every >= 20 and big.train.steps // big.scheduler.update_every >= 100
    assert twin.model == config("tiny-cpu").model  # one warm start serves them all


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in VARIANTS)) for name in TINY])
def test_tiny_presets_train(fastsched, tmp_path, random_model, name):
    """Three steps of each with a random model, few prompts, short answers and a reward under which no group is flat."""
    done = fastsched("train", "--preset", name, "--run_dir", str(tmp_path / "run"), "--model.name", str(random_model),
                     "--rollout.engine", "transformers", "--rollout.max_new_tokens", "8", "--reward.kind", "graded:score",
                     "--train.steps", "3", "--data.size", "400", "--train.prompts_per_step", "4", "--train.eval_at_ends", "false",
                     "--log.plots", "false", "--log.tensorboard", "false", **graded(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    found = rows(tmp_path / "run")
    assert [row["step"] for row in found] == ["1", "2", "3"]
    for row in found:
        assert math.isfinite(float(row["entropy"])) and float(row["flat_groups"]) == 0 and float(row["grad_norm"]) > 0
        assert float(row["drift"]) > 0 and sum(float(row[f"w_{b}"]) for b in range(4)) == pytest.approx(1)
        assert float(row["responses_total"]) == 32 * float(row["step"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tiny-cpu", "ads-tiny", "tp-schedule-tiny", *TINY])
def test_tiny_presets_as_shipped(fastsched, tmp_path, name):
    """Every step, on vLLM, from the shipped policy, within the test's five minutes. What they learn is for `bench.learning` to say."""
    if name == "ads-tiny":
        assert fastsched("cluster", "--preset", name, process=True).returncode == 0
    done = fastsched("train", "--preset", name, "--run_dir", str(tmp_path / "run"), "--log.plots", "false", process=True, timeout=290)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run, cfg = load_run(tmp_path / "run"), config(name)
    assert len(run.steps) == cfg.train.steps and [record["step"] for record in run.evals] == [0, cfg.train.steps]
    assert run.column("entropy").notna().all() and run.column("skipped_nonfinite").max() == 0 and run.column("reward_failures").max() == 0
    if cfg.scheduler.kind == "adaptive":
        assert in_window_share(run)[1] > 0
