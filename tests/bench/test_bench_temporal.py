import json
from pathlib import Path

import pytest
from synthetic_run import write_run

from bench.learning import temporal
from bench.learning.arms import Comparison
from bench.learning.temporal import ARMS, fixed_options, main, measures, report
from fastsched.report.runs import load_run


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("temporal")
    return {arm: [load_run(write_run(folder / f"{arm}-seed-{seed}", steps, seed=seed + 9 * place, total=40, every=10)) for seed in (0, 1)]
            for place, (arm, steps) in enumerate((("grpo", 40), ("tp-0.8", 40), ("random", 13)))}


@pytest.mark.parametrize("preset", ["chain-tiny", "tiny-cpu"])
def test_arms_differ_in_the_schedule_alone(preset):
    plan = Comparison("x", preset, ARMS, [0], Path("runs"), fixed_options(preset, 50))
    configs = {arm: plan.config(arm, 0) for arm in ARMS}
    found = {arm: (cfg.scheduler.temporal.mode, cfg.scheduler.temporal.proxy, cfg.scheduler.temporal.end) for arm, cfg in configs.items()}
    assert found["grpo"][0] == "none" and all(mode == "linear" for arm, (mode, _, _) in found.items() if arm != "grpo")
    assert [found[f"tp-{end}"][1:] for end in ("0.4", "0.6", "0.8", "1.0")] == [("suffix", end) for end in (0.4, 0.6, 0.8, 1.0)]
    assert [found[proxy][1:] for proxy in ("entropy", "random", "prefix")] == [(proxy, 0.8) for proxy in ("entropy", "random", "prefix")]
    for cfg in configs.values():
        assert cfg.data == configs["grpo"].data and cfg.model == configs["grpo"].model and cfg.train == configs["grpo"].train
        assert cfg.data.task == "chain" and not cfg.data.negative and cfg.rollout.max_new_tokens == 80 and cfg.train.steps == 50
        assert cfg.learner.kl == "none" and cfg.scheduler.entropy.ceiling == cfg.scheduler.kl.ceiling == 0
        assert cfg.scheduler.kind == "uniform" and cfg.scheduler.coefficients == "constant"


def test_both_presets_train_the_same_model_on_the_same_prompts():
    data = [Comparison("x", preset, ARMS, [0], Path("runs"), fixed_options(preset, 50)).config("grpo", 0)
            for preset in ("chain-tiny", "tiny-cpu")]
    assert data[0].data == data[1].data and data[0].model == data[1].model and data[0].rollout == data[1].rollout
    assert data[0].learner == data[1].learner


def test_measures_of_a_run(runs):
    run, base = runs["tp-0.8"][0], runs["grpo"][0]
    found = measures(run, base)
    last = run.metrics[run.steps > 36]
    assert found["entropy kept"] == pytest.approx(last["entropy"].mean() / base.metrics["entropy"][:3].mean())
    assert found["entropy of baseline"] == pytest.approx(last["entropy"].mean() / base.metrics[base.steps > 36]["entropy"].mean())
    assert found["norm max"] == run.metrics["grad_norm"].max() > found["norm mean"] == pytest.approx(run.metrics["grad_norm"].mean())
    assert found["learner seconds"] == pytest.approx(run.metrics["t_learn"].sum())
    assert found["kept tokens"] == pytest.approx(run.metrics["kept_fraction"].mean())
    assert found["gain"] == pytest.approx(found["accuracy"] - 0.05)  # before training: 0.17, 0.03, 0 and 0 in four bins of equal size
    assert measures(base, base)["entropy of baseline"] == 1


def test_report_has_a_row_for_each_arm_and_shows_runs_that_were_stopped(runs, tmp_path):
    text = report(runs, "chain-tiny", tmp_path / "temporal")
    cells = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    rows = {name: values for name, *values in cells}
    assert list(rows) == ["arm", "---", "grpo", "tp-0.8", "random"]
    assert rows["grpo"][4] == "1.00 ± 0.00" and rows["grpo"][-1] == "40 ± 0" and rows["random"][-1] == "13 ± 0"
    data = json.loads((tmp_path / "temporal.json").read_text())
    assert len(data["arms"]["tp-0.8"]) == 2 and data["preset"] == "chain-tiny"
    assert (tmp_path / "temporal.png").stat().st_size > 10_000


def test_the_command_trains_every_arm_and_needs_the_baseline(monkeypatch, tmp_path, runs, capsys):
    asked = []
    monkeypatch.setattr(temporal, "train_all", asked.append)
    monkeypatch.setattr(temporal, "load_run", lambda folder: runs["grpo" if "grpo" in folder.name else "tp-0.8"][int(folder.name[-1])])
    options = ["--seeds", "2", "--steps", "30", "--runs", str(tmp_path), "--out", str(tmp_path / "out")]
    assert main([*options, "--learner.lr", "1e-4"]) == 0
    assert list(asked[0].arms) == list(ARMS) and asked[0].config("prefix", 1).learner.lr == 1e-4
    assert asked[0].config("grpo", 0).train.steps == 30
    assert (tmp_path / "out/temporal.md").exists() and "tp-0.4" in capsys.readouterr().out
    assert main([*options, "--arms", "random"]) == 2 and "grpo is needed" in capsys.readouterr().err
