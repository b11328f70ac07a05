"""What every figure of a report is drawn with: colours, style, axes, lines of arms, legends."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from fastsched.report.runs import Arm, Run

COLOURS = ("#2563eb", "#d97706", "#059669", "#c026d3", "#dc2626", "#0891b2", "#65a30d", "#7c3aed")
LEFT, RIGHT, BAND = COLOURS[0], COLOURS[1], "#10b981"
BINS = ("#93c5fd", "#3b82f6", "#1d4ed8", "#172554", "#c4b5fd", "#8b5cf6", "#6d28d9", "#2e1065")
STYLE = {"font.size": 9.5, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left",
         "axes.spines.top": False, "axes.grid": True, "grid.color": "#e5e7eb", "axes.edgecolor": "#9ca3af",
         "axes.axisbelow": True, "legend.frameon": False, "legend.fontsize": 8.5, "text.color": "#1f2937",
         "axes.labelcolor": "#1f2937", "xtick.color": "#4b5563", "ytick.color": "#4b5563"}


def new_axes(figure: Figure, title: str, ylabel: str, place=(1, 1, 1)) -> Axes:
    axes = figure.add_subplot(*place)
    axes.set(title=title, ylabel=ylabel)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
    axes.spines["right"].set_visible(False)
    return axes


def single_run(arms: list[Arm]) -> Run | None:
    return arms[0].runs[0] if len(arms) == 1 and len(arms[0].runs) == 1 else None


def smoothed(values: pd.Series) -> pd.Series:
    """Centred moving average over a twentieth of the run, at least 5 steps; unlike an EMA it has no lag."""
    return values.rolling(max(5, len(values) // 20), center=True, min_periods=1).mean()


def mean_over_seeds(runs: list[Run], column: str, smooth: bool) -> pd.Series:
    columns = [pd.Series(_maybe(run.column(column), smooth).to_numpy(), index=run.steps) for run in runs]
    return pd.concat(columns, axis=1).mean(axis=1).sort_index()


def _maybe(values: pd.Series, smooth: bool) -> pd.Series:
    return smoothed(values) if smooth else values


def marker(values: pd.Series) -> str | None:
    return "o" if len(values) == 1 else None  # a line through one point is invisible


def draw_lines(axes: Axes, arms: list[Arm], column: str, smooth: bool = False, style: str = "-") -> None:
    """One line an arm (the mean of its seeds), faint lines for single seeds."""
    for arm in arms:
        if len(arm.runs) > 1:
            for run in arm.runs:
                axes.plot(run.steps, _maybe(run.column(column), smooth), color=arm.colour, alpha=0.25, lw=0.9)
        mean = mean_over_seeds(arm.runs, column, smooth)
        axes.plot(mean.index, mean, style, color=arm.colour, lw=1.8, label=arm.name, marker=marker(mean))


def finish_axes(axes: Axes, legend: bool = True, xlabel: str = "step", steps: bool = True) -> None:
    """Axis label, limits (`steps`: the x axis counts steps), a legend below the figure, "not measured" if empty."""
    axes.set_xlabel(xlabel)
    if steps:
        right = max(axes.get_xlim()[1], 2.0)
        axes.set_xlim(-0.015 * right, right)
    drawn = [line for line in axes.lines if np.isfinite(np.asarray(line.get_ydata(), dtype=float)).any()]
    if not (drawn or axes.collections or axes.patches):
        axes.text(0.5, 0.5, "not measured in this run", transform=axes.transAxes, ha="center", color="#6b7280")
        axes.set_yticks([])
    elif legend and axes.get_legend_handles_labels()[0]:
        axes.figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=4)


def limit_still(axes: Axes) -> None:
    """Limits for a value that never moved: 1 % around it."""
    values = np.concatenate([np.asarray(line.get_ydata(), dtype=float) for line in axes.lines])
    values = values[np.isfinite(values)]
    if len(values) and np.ptp(values) <= 1e-9 * abs(values[0]):
        margin = 0.01 * abs(values[0]) or 0.01
        axes.set_ylim(values[0] - margin, values[0] + margin)


def draw_stack(axes: Axes, steps, parts, colours: list[str], labels: Sequence[str] = ()) -> None:
    """Stacked areas; a single step is drawn one step wide."""
    edges = steps if len(steps) > 1 else np.array([-0.5, 0.5]) + float(steps[0])
    axes.stackplot(edges, *(np.broadcast_to(part, len(edges)) for part in parts), colors=colours, labels=labels)
