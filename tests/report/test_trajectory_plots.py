import json
import math

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure
from synthetic_run import write_run

from fastsched.report.page import write_report
from fastsched.report.runs import Arm, TokenScores, load_run, schedule_progress
from fastsched.report.trajectory_plots import TRAJECTORY_PLOTS, kl_at, snr_points


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return load_run(write_run(tmp_path_factory.mktemp("trajectory") / "run", steps=50, total=50))


def drawn(run, file):
    figure = Figure()
    next(plot for plot in TRAJECTORY_PLOTS if plot.file == file).draw(figure, [Arm("one", [run], "red")])
    return figure.axes


def test_progress_is_that_of_the_schedule_or_of_all_steps(run):
    steps = np.array([1, 20, 40, 50])
    np.testing.assert_allclose(schedule_progress(run, steps), [1 / 40, 0.5, 1.0, 1.0])  # linear, default end 0.8 of 50 steps
    plain = load_run(run.folder)
    plain.config["scheduler.temporal.mode"] = "none"
    np.testing.assert_allclose(schedule_progress(plain, steps), [0.02, 0.4, 0.8, 1.0])


def test_kl_by_percentile_averages_the_steps_near_a_progress(run):
    table = pd.DataFrame([row["kl"] for row in run.deciles], dtype=float)
    for tau, steps in ((0.3, range(10, 15)), (0.8, range(30, 35))):  # |step / 40 - tau| <= 0.05
        truth = table.loc[[s - 1 for s in steps]].mean()
        pd.testing.assert_series_equal(kl_at(run, tau), truth)
    early, late = (kl_at(run, tau) for tau in (0.3, 0.8))
    assert early.idxmax() > late.idxmax()  # the boundary moved from late to early percentiles
    axes, = drawn(run, "percentiles.png")
    assert [line.get_label() for line in axes.lines] == ["one, tau 0.3", "one, tau 0.8"]
    np.testing.assert_allclose(axes.lines[1].get_ydata(), late)
    assert list(axes.lines[0].get_xdata()) == list(range(5, 100, 10))


def test_entropy_by_region_weighs_deciles_by_what_was_kept(run):
    early, middle, late = drawn(run, "regions.png")
    kept, everything = late.lines
    assert np.isfinite(kept.get_ydata()).all() and kept.get_ydata()[-1] == pytest.approx(1.5 - 0.1 * 8)  # deciles 7, 8, 9
    first = kept.get_ydata()[[0, 2]]  # decile 9 alone in steps 1 to 4, deciles 8 and 9 in step 5; smoothed over five steps
    assert first == pytest.approx([0.6, (4 * 0.6 + 0.65) / 5])
    assert np.isnan(early.lines[0].get_ydata()[:20]).all() and np.isfinite(early.lines[0].get_ydata()[-5:]).all()
    np.testing.assert_allclose(everything.get_ydata(), 1.5 - 0.1 * 8)
    assert np.isfinite(early.lines[1].get_ydata()).all() and middle.get_title() == "Middle tokens"


def test_snr_points_pair_each_bins_success_with_its_snr(run):
    p, snr = snr_points(run)
    steps = sum(step % 5 != 0 for step in range(1, 51))
    assert len(p) == len(snr) == 4 * steps and np.corrcoef(snr, p * (1 - p))[0, 1] > 0.5
    axes, = drawn(run, "snr.png")
    assert len(axes.lines[0].get_xdata()) == len(p) and axes.lines[1].get_label() == "one, median"


def test_report_with_tokens_names_them_and_writes_the_table(tmp_path):
    run = write_run(tmp_path / "run", steps=3, total=3)
    table = pd.DataFrame({"token": [5, 6, 7], "text": ["First", " so\n", "<end>"], "tp_score": [0.04, 0.5, 0.97], "seen": [40, 30, 99]})
    groups = {name: np.full(100, 0.01) for name in ("early", "middle", "late")}
    page = write_report([run], run, TokenScores(table, groups)).read_text()
    assert "Tokens by position" in page and "&#39; so\\n&#39;" in page and "0.970" in page
    assert "tp_score" in {p.stem for p in (run / "plots").iterdir()}
    pd.testing.assert_frame_equal(pd.read_csv(run / "tp_score.csv"), table)
    assert "Tokens by position" not in write_report([run], tmp_path / "plain").read_text()


def test_rows_of_deciles_are_ten_numbers_or_null(run):
    rows = [json.loads(line) for line in (run.folder / "deciles.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, 51))
    assert all(len(row[name]) == 10 for row in rows for name in ("kept", "entropy", "kl", "surprisal"))
    assert rows[0]["entropy"][0] is None and math.isfinite(rows[0]["entropy"][9])
