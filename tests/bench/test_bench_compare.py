import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic_run import write_run

from bench.learning import compare, temporal
from fastsched.config.arguments import parse_config, preset_path
from fastsched.data.tasks import arithmetic_held_out
from fastsched.engines.models.loading import load_policy, load_tokenizer
from fastsched.engines.models.tiny import encode, expected_accuracy
from fastsched.loop.prepare import prepare_model
from fastsched.report.axes import COLOURS
from fastsched.report.plots import PLOTS
from fastsched.report.runs import arms_of, load_run


def test_two_windows_are_trained_and_laid_over_one_another(monkeypatch, tmp_path, capsys):
    """Everything but training; the gradient figure of the report holds the signal-to-noise ratio of both over time."""
    asked = []

    def train_all(comparison):
        asked.append(comparison)
        for arm in comparison.arms:
            for seed in comparison.seeds:
                write_run(comparison.folder(arm, seed), 30, seed=seed)

    monkeypatch.setattr(compare, "train_all", train_all)
    assert compare.main(["--window", "0.35", "0.65", "--window", "0.40", "0.60", "--seeds", "0", "1", "--runs", str(tmp_path),
                         "--train.steps", "30"]) == 0
    comparison, = asked
    assert [comparison.config(arm, 0).scheduler.window for arm in comparison.arms] == [(0.35, 0.65), (0.4, 0.6)]
    assert comparison.config("window-0.35-0.65", 1).train.steps == 30
    out = capsys.readouterr().out
    assert "compare-window-0.35-0.65-seed-1" in out and out.strip().endswith("compare-windows.html")
    page = (tmp_path / "compare-windows.html").read_text()
    assert "compare-window-0.35-0.65, all seeds" in page and "compare-window-0.40-0.60, all seeds" in page

    arms = arms_of([load_run(folder) for folders in comparison.folders().values() for folder in folders], COLOURS)
    figure = Figure()
    next(plot for plot in PLOTS if plot.file == "gradient.png").draw(figure, arms)
    ratio = next(axes for axes in figure.axes if axes.get_ylabel() == "signal to noise")
    drawn = {line.get_label(): np.asarray(line.get_ydata(), dtype=float) for line in ratio.lines if not line.get_label().startswith("_")}
    assert set(drawn) == {"compare-window-0.35-0.65", "compare-window-0.40-0.60"}
    assert all(len(values) == 30 and np.isfinite(values).all() for values in drawn.values())


def test_without_windows_the_arms_are_adaptive_and_fixed(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(compare, "train_all", lambda c: asked.append(c) or [write_run(f, 25) for fs in c.folders().values() for f in fs])
    assert compare.main(["--seeds", "2", "--runs", str(tmp_path)]) == 0
    names = [folder.name for folders in asked[0].folders().values() for folder in folders]
    assert names == ["compare-adaptive-seed-2", "compare-fixed-seed-2"]
    fixed = asked[0].config("fixed", 2).scheduler
    assert (fixed.kind, fixed.coefficients, asked[0].config("adaptive", 2).scheduler.kind) == ("fixed", "constant", "adaptive")


@pytest.mark.parametrize("bench", [compare, temporal])
def test_a_run_that_ended_before_its_first_step_is_one_line(monkeypatch, tmp_path, capsys, bench):
    """A guard may stop a run before it has a row."""
    monkeypatch.setattr(bench, "train_all", lambda comparison: None)
    assert bench.main(["--runs", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith(f"{bench.__name__}: {tmp_path}")


def test_fixed_weights_start_inside_the_window_and_leave_it_as_the_policy_learns():
    """By the shipped policy's own probabilities on held-out problems, no sampling: what `make compare` shows on any machine."""
    cfg = parse_config(["--config", str(preset_path("tiny-cpu"))])
    path = prepare_model(cfg)
    model, tokenizer = load_policy(path, cfg.model).eval(), load_tokenizer(path, cfg.model)
    table = arithmetic_held_out(64)
    rows = np.array(list(zip(table.prompt, table.answer, table.bin.tolist(), strict=True)), dtype=object)
    start = np.array([expected_accuracy(model, encode(tokenizer, rows[table.bin == b].tolist())) for b in range(4)])
    weights, (low, high) = np.array(compare.FIXED, dtype=float), cfg.scheduler.window
    assert low < weights @ start < high < weights @ np.maximum(start, [0.93, 0.70, 0.30, 0.0])
    assert start[3] < low  # some weights reach the window at every step, however well the rest is learnt
