"""Presets: those for a GPU pass --dry-run without a hub and fit their card, the tiny ones train."""

import math
import re

import pytest
import yaml
from whole_run import graded, rows

from fastsched.cli import main
from fastsched.config.arguments import parse_config, preset_names, preset_path
from fastsched.report.runs import in_window_share, load_run

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


def test_the_recipes_say_what_was_asked_for():
    base, student = config("scheduler-qwen1.5-0.5b"), config("scheduler-student")
    assert (base.data.task, base.data.digits, base.data.size) == ("arithmetic", (1, 2, 3, 4), 300_000)
    assert (base.train.prompts_per_step, base.train.steps, base.scheduler.update_every) == (32, 200_000, 500)
    assert (student.data.size, student.train.prompts_per_step, student.train.steps) == (50_000, 16, 80_000)
    assert student.learner.kl == "none" and student.scheduler.kl.ceiling == 0 < base.scheduler.kl.ceiling
    assert sum(config("scheduler-engineer").scheduler.window) / 2 == pytest.approx(0.6)
    assert config("scheduler-researcher").scheduler.window == (0.35, 0.65) and base.scheduler.window == (0.40, 0.60)


def test_frontier_gates_the_kl_term_and_the_others_do_not():
    gated = {name for name in preset_names() if config(name).scheduler.kl_gate.enabled}
    assert gated == {"scheduler-frontier", "scheduler-frontier-tiny"}


def test_ads_has_its_published_settings():
    """algorithms.md 2.2 to 2.5."""
    cfg = config("ads-qwen3-4b-base")
    assert cfg.model.name == "Qwen/Qwen3-4B-Base" and (cfg.train.ranks, cfg.train.prompts_per_step, cfg.train.seed) == (4, 128, 42)
    ads, features = cfg.scheduler.ads, cfg.features
    assert (ads.clusters, ads.size, ads.alpha, ads.band, ads.reset) == (4, 32, 0.3, (0.33, 0.67), True)
    assert (features.clusters, features.dims, features.max_tokens, features.seed) == (64, 128, 4096, 42)
    assert (cfg.rollout.responses, cfg.rollout.max_new_tokens, cfg.rollout.temperature) == (8, 8192, 1.0)
    assert (cfg.learner.lr, cfg.learner.updates_per_batch, cfg.learner.drop_unsolved) == (1e-6, 16, True)
    assert cfg.data.max_prompt_tokens == 2048 and cfg.scheduler.kl.start == 0.001 and cfg.scheduler.entropy.ceiling == 0
    assert cfg.train.steps == min(800, 10 * ((9000 - cfg.data.eval_per_bin) // 128))  # ten epochs of whole batches


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
