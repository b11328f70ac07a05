import json
import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench.learning import samplers
from bench.learning.arms import Comparison
from bench.learning.samplers import (
    ARMS,
    GRID,
    SMOOTHED,
    Budget,
    accuracy_over,
    equal_budgets,
    main,
    notes,
    report,
    responses,
    result,
    target_of,
    until,
)
from fastsched.config import ConfigError
from fastsched.config.arguments import parse_config, preset_path
from fastsched.loop.features import feature_user
from fastsched.report.runs import Run

BUDGET = Budget(1000)


def run_of(rate, rolled_out=10, steps=100, every=5, tokens=3, start=0.2):
    """A run whose accuracy rises by `rate` a response, from `start`; `rolled_out` responses a step."""
    step = np.arange(1.0, steps + 1)
    metrics = pd.DataFrame({"step": step, "responses_total": rolled_out * step, "tokens_total": tokens * rolled_out * step, "t_step": 0.5})
    evals = [{"step": s, "accuracy": {"a": start + rate * rolled_out * s, "b": math.nan}, "n": {"a": 8, "b": 0}}
             for s in range(0, steps + 1, every)]
    return Run("run", Path("run"), metrics, {}, {}, [], evals)


def test_accuracy_is_averaged_backwards_over_a_share_of_the_budget():
    curve = accuracy_over(run_of(4e-4), BUDGET)
    assert len(curve) == GRID and curve[0] == pytest.approx(0.2)
    grid = BUDGET.grid
    width = round(SMOOTHED * GRID)
    assert curve[-1] == pytest.approx(0.2 + 4e-4 * grid[-width:].mean())
    short = accuracy_over(run_of(4e-4, steps=50), BUDGET)
    assert np.isfinite(short[:GRID // 2 - 1]).all() and np.isnan(short[GRID // 2 + 1:]).all()


def test_rollouts_count_and_not_steps():
    """Twice the rollouts a step at the same progress for each rollout: the same curve, whatever the steps."""
    np.testing.assert_allclose(accuracy_over(run_of(4e-4), BUDGET), accuracy_over(run_of(4e-4, 20, 50), BUDGET))


def test_target_is_the_baselines_smoothed_end_and_who_learns_twice_as_fast_needs_half():
    base = [run_of(2e-4), run_of(4e-4)]
    target, start = target_of(base, BUDGET)
    assert target == pytest.approx(0.2 + 3e-4 * BUDGET.grid[-round(SMOOTHED * GRID):].mean())
    assert start == pytest.approx(0.2)
    fast = result(run_of(6e-4, tokens=5), BUDGET, target)
    assert fast.rollouts == pytest.approx((0.5 + SMOOTHED / 4) * 1000, abs=1500 / GRID)  # half, and the average's lag
    assert fast.tokens == pytest.approx(5 * fast.rollouts)
    slow = result(base[0], BUDGET, target)
    assert slow.rollouts is None and slow.tokens is None
    with pytest.raises(ConfigError, match="ended before its budget"):
        target_of([run_of(2e-4, steps=50)], BUDGET)


def test_a_budget_of_tokens_measures_by_tokens():
    """Answers of half the length at the same progress a token: the same curve; the rollouts that it took are counted beside."""
    budget = Budget(3000, "tokens")
    long, short = run_of(4e-4, tokens=3), run_of(2e-4, tokens=1.5, steps=200, every=10)
    np.testing.assert_allclose(accuracy_over(long, budget), accuracy_over(short, budget), atol=1e-9)
    found = result(short, budget, 0.3)
    assert found.tokens == pytest.approx(found.share * 3000) and found.rollouts == pytest.approx(found.tokens / 1.5)
    cfg = parse_config(["--config", str(preset_path("smollm2-cpu"))])
    one = Comparison("x", "smollm2-cpu", ARMS, [0], Path("runs"), equal_budgets("smollm2-cpu", cfg, 40, budget)).config("window", 0)
    assert (one.train.token_budget, one.train.rollout_budget, one.train.steps) == (3000, 0, 80)


def test_a_run_that_never_got_there_makes_the_mean_a_lower_bound():
    assert until([400.0, None], [1000, 1000], ",.0f") == "> 700"
    assert until([400.0, 600.0], [1000, 1000], ",.0f").startswith("500 ± ")


def test_a_baseline_that_did_not_improve_is_said_first():
    assert "says nothing" in notes(0.305, 0.3)[0] and not any("says nothing" in line for line in notes(0.32, 0.3))


def test_report_has_a_row_for_each_sampler(tmp_path):
    runs = {"uniform": [run_of(2e-4), run_of(2.2e-4)], "window": [run_of(8e-4), run_of(6e-4)], "sec": [run_of(1e-4), run_of(4e-4)]}
    text = report(runs, BUDGET, "tiny-cpu", tmp_path / "samplers-tiny-cpu")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    rows = {name: values for name, *values in cells}
    assert list(rows) == ["sampler", "---", "uniform", "window", "sec"]
    assert rows["window"][0] == "2 of 2" and "±" in rows["window"][1] and rows["window"][5] == "50 ± 0"
    assert rows["sec"][0] == "1 of 2" and rows["sec"][1].startswith("> ") and rows["sec"][2].startswith("> ")
    data = json.loads((tmp_path / "samplers-tiny-cpu.json").read_text())
    assert (data["budget"], data["unit"]) == (1000, "responses")
    assert data["arms"]["sec"][0]["rollouts"] is None and len(data["arms"]["window"][1]["accuracy"]) == GRID
    assert (tmp_path / "samplers-tiny-cpu.png").stat().st_size > 10_000


def test_every_arm_has_the_same_budget_and_nothing_that_depends_on_steps():
    for preset in ("tiny-cpu", "smollm2-cpu", "chain-tiny"):
        cfg = parse_config(["--config", str(preset_path(preset))])
        assert responses(cfg, 40) == 40 * cfg.train.prompts_per_step * cfg.rollout.responses
        plan = Comparison("x", preset, ARMS, [0], Path("runs"), equal_budgets(preset, cfg, 40, Budget(responses(cfg, 40))))
        configs = {arm: plan.config(arm, 0) for arm in ARMS}
        for arm in configs.values():
            assert arm.train.rollout_budget == responses(cfg, 40) and arm.train.steps == 80 and arm.train.eval_every == 2
            assert arm.learner.cooldown == 0 and arm.scheduler.temporal.mode == "none" and arm.data.eval_per_bin >= 128
        assert len({(arm.learner.lr, arm.learner.warmup_steps) for arm in configs.values()}) == 1
        assert configs["dynamic"].scheduler.refills == 2 and configs["uniform"].scheduler.refills == 0
        assert configs["fixed"].scheduler.fixed_weights == (0.4, 0.3, 0.2, 0.1) and configs["window"].scheduler.kind == "adaptive"


def test_the_baseline_cannot_be_left_out(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(samplers, "train_all", lambda comparison: pytest.fail("nothing may run"))
    assert main(["--arms", "window", "--runs", str(tmp_path)]) == 2
    assert "--arms: uniform is needed" in capsys.readouterr().err
    assert main(["--arms", "uniform", "windw", "--runs", str(tmp_path)]) == 2
    assert "'windw' is none of uniform, fixed" in capsys.readouterr().err


def test_the_command_trains_the_chosen_arms_and_reports_them(monkeypatch, tmp_path, capsys):
    """Everything but training: which runs are asked for with which options, and the files that come of them."""
    asked = []

    def train_all(comparison):
        asked.append(comparison)

    by_arm = {"uniform": 2e-4, "window": 5e-4}
    monkeypatch.setattr(samplers, "train_all", train_all)
    monkeypatch.setattr(samplers, "load_run", lambda folder: run_of(by_arm[folder.name.split("-")[3]], rolled_out=256))
    arguments = ["--preset", "tiny-cpu", "--arms", "window", "uniform", "--seeds", "2", "--steps", "50", "--runs", str(tmp_path / "runs"),
                 "--out", str(tmp_path / "out"), "--learner.lr", "5e-4"]
    assert main(arguments) == 0
    comparison, = asked
    assert list(comparison.arms) == ["uniform", "window"] and list(comparison.seeds) == [0, 1]
    cfg = comparison.config("window", 1)
    assert (cfg.learner.lr, cfg.train.seed, cfg.train.rollout_budget) == (5e-4, 1, 50 * 256)
    assert comparison.folder("window", 1) == tmp_path / "runs/samplers-tiny-cpu-window-seed-1"
    assert "12,800 responses a run" in capsys.readouterr().out and (tmp_path / "out/samplers-tiny-cpu.md").exists()


def test_prompts_are_clustered_for_the_arms_that_need_it_and_for_no_other():
    for arm, its in ARMS.items():
        cfg = parse_config(["--config", str(preset_path("tiny-cpu")), "--train.prompts_per_step", "16", "--scheduler.ads.size", "1",
                            "--scheduler.ads.clusters", "16", *its.options])
        assert (feature_user(cfg) is not None) == its.cluster, arm
