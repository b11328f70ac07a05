"""Seeds into means with intervals, and a comparison's table, numbers and figure into bench/results."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy import stats

from fastsched.report.runs import Run

CONFIDENCE = 0.95


class Estimate(NamedTuple):
    """Mean over n seeds and half the width of its interval; NaN where there are too few seeds for one."""

    mean: float
    half: float
    n: int

    def text(self, form: str = ".3g", scale: float = 1.0) -> str:
        if not math.isfinite(self.mean):
            return "–"
        shown = format(self.mean * scale, form)
        return f"{shown} ± {format(self.half * scale, form).removeprefix('+')}" if math.isfinite(self.half) else shown


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student's t interval of the finite values."""
    known = np.array([v for v in values if v is not None and math.isfinite(v)], dtype=float)
    if not len(known):
        return Estimate(math.nan, math.nan, 0)
    half = stats.t.ppf((1 + CONFIDENCE) / 2, len(known) - 1) * stats.sem(known) if len(known) > 1 else math.nan
    return Estimate(float(known.mean()), float(half), len(known))


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """First column left, all others right."""
    lines = [head, ["---", *["---:"] * (len(head) - 1)], *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def band(axes: Axes, grid: np.ndarray, curves: Sequence[np.ndarray], colour: str, label: str) -> None:
    """Mean of the seeds' curves [S, X] over `grid` [X] as a line, their t interval as a band."""
    estimates = [estimate(column) for column in np.array(curves).T]
    mean, half = (np.array([e[i] for e in estimates]) for i in (0, 1))
    axes.plot(grid, mean, color=colour, lw=1.8, label=label)
    axes.fill_between(grid, mean - half, mean + half, color=colour, alpha=0.13, lw=0)


def provenance(runs: Sequence[Run]) -> dict[str, str]:
    """Machine, days and commits of the runs, from their environment.json."""
    seen = [run.environment for run in runs if run.environment]
    cores = lambda e: f"{e['cores']} core{'s' * (e['cores'] > 1)}"
    machines = {", ".join([e["cpu"], cores(e), f"{e['memory_gb']:.0f} GB", *e["gpus"]]) for e in seen}
    commits = {e["git"]["commit"][:10] + (" with uncommitted changes" if e["git"]["dirty"] else "") for e in seen if e.get("git")}
    days = sorted({e["started"][:10] for e in seen})
    return {"machine": "; ".join(sorted(machines)) or "unknown", "commit": ", ".join(sorted(commits)) or "unknown",
            "date": " to ".join(dict.fromkeys([days[0], days[-1]])) if days else "unknown"}


def write_results(stem: Path, title: str, notes: Sequence[str], table: str, data: dict, figure: Figure, runs: Sequence[Run]) -> str:
    """`stem`.md, .json and .png; returns the text of the first."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    origin = provenance(runs)
    lines = [f"# {title}", "", f"{origin['machine']}; {origin['date']}; commit {origin['commit']}.", "", table, "",
             *[f"- {note}" for note in notes], "", f"![{title}]({stem.name}.png)", ""]
    stem.with_name(stem.name + ".md").write_text("\n".join(lines))
    numbers = {**origin, "title": title, "notes": list(notes), **finite(data)}
    stem.with_name(stem.name + ".json").write_text(json.dumps(numbers) + "\n")
    figure.savefig(stem.with_name(stem.name + ".png"))
    return "\n".join(lines)


def finite(value):
    """`value` with NaN and infinities as None, at any depth: JSON has neither."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
