import json
import math

import numpy as np
import pytest
from matplotlib.figure import Figure
from synthetic_run import write_run

from bench.learning.summary import band, estimate, finite, markdown_table, provenance, write_results
from fastsched.report.runs import load_run


def test_interval_is_students_t():
    found = estimate([1.0, 2.0, 3.0])
    assert found.mean == 2.0 and found.n == 3 and found.half == pytest.approx(4.302653 / math.sqrt(3))  # t of 97.5 %, 2 degrees of freedom
    assert found.text(".1f") == "2.0 ± 2.5" and found.text(".0f", 100) == "200 ± 248"
    assert found.text("+.1f") == "+2.0 ± 2.5"
    assert estimate([5.0]).text() == "5" and estimate([5.0, math.nan]).n == 1
    assert estimate([]).text() == "–" and estimate([None, math.nan]).text() == "–"


def test_markdown_table_has_a_row_each_and_numbers_on_the_right():
    assert markdown_table(["arm", "n"], [["a", "1"], ["b", "2"]]) == "| arm | n |\n| --- | ---: |\n| a | 1 |\n| b | 2 |"


def test_json_has_neither_nan_nor_infinity():
    assert finite({"a": [math.nan, 1.0, (math.inf, None)], "b": "text"}) == {"a": [None, 1.0, [None, None]], "b": "text"}


def test_band_is_the_mean_and_its_interval():
    axes = Figure().add_subplot()
    band(axes, np.arange(3.0), [np.array([0.0, 1.0, math.nan]), np.array([2.0, 3.0, 4.0])], "red", "arm")
    assert axes.lines[0].get_ydata().tolist() == [1.0, 2.0, 4.0] and axes.lines[0].get_label() == "arm"
    low, high = axes.collections[0].get_paths()[0].get_extents().intervaly
    assert (high - low) / 2 == pytest.approx(12.7062 + 0.5, rel=1e-4)  # t of one degree of freedom, over the two means 1 and 2


def test_results_name_machine_day_and_commit(tmp_path):
    run = load_run(write_run(tmp_path / "run", 2))
    origin = provenance([run])
    assert run.environment["cpu"] in origin["machine"] and origin["date"] == run.environment["started"][:10]
    assert run.environment["git"]["commit"][:10] in origin["commit"]
    assert provenance([])["commit"] == "unknown"
    text = write_results(tmp_path / "out" / "cmp-v1.5", "Title", ["a note"], "| a |", {"x": math.nan}, Figure(), [run])
    assert text == (tmp_path / "out/cmp-v1.5.md").read_text()
    assert "cmp-v1.5.png" in text and "- a note" in text and origin["machine"] in text
    assert json.loads((tmp_path / "out/cmp-v1.5.json").read_text()) == {**origin, "title": "Title", "notes": ["a note"], "x": None}
    assert (tmp_path / "out/cmp-v1.5.png").read_bytes()[:4] == b"\x89PNG"
