"""The figures of a report. One run: twin axes. Several: one colour an arm, faint lines for seeds, the mean in full."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fastsched.record.tables import COLUMNS
from fastsched.report.axes import (
    BAND,
    BINS,
    LEFT,
    RIGHT,
    STYLE,
    draw_lines,
    draw_stack,
    finish_axes,
    limit_still,
    marker,
    mean_over_seeds,
    new_axes,
    single_run,
)
from fastsched.report.runs import Arm, Run

PHASES = {"t_rollout": "#3b82f6", "t_reward": "#f59e0b", "t_learn": "#10b981", "t_sync": "#a855f7",
          "t_control": "#ef4444", "other": "#cbd5e1"}


@dataclass(frozen=True)
class Plot:
    """`draw(figure, arms)` fills the figure; `aid` is the sentence that says how to read it."""

    file: str
    title: str
    aid: str
    draw: Callable[[Figure, list[Arm]], None]
    wide: bool = False
    needs: Callable[[list[Arm]], bool] = lambda arms: True  # whether the runs hold what it shows


def write_plots(arms: list[Arm], folder: Path, plots: Sequence[Plot]) -> list[tuple[Plot, Path]]:
    """Draws the figures that these arms have something for as PNG into `folder` (made if missing)."""
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for plot in plots:
        if not plot.needs(arms):
            continue
        with rc_context(STYLE):
            figure = Figure(figsize=(12.4 if plot.wide else 6.6, 3.7), dpi=140, layout="constrained")
            plot.draw(figure, arms)
            figure.savefig(folder / plot.file)
        written.append((plot, folder / plot.file))
    return written


def _success(figure: Figure, arms: list[Arm]) -> None:
    axes = new_axes(figure, "Success against the window", "share of responses")
    for window in sorted({run.window for arm in arms for run in arm.runs if run.window}):
        axes.axhspan(*window, color=BAND, alpha=0.16, lw=0, label=f"window [{window[0]:.2f}, {window[1]:.2f}]")
    run = single_run(arms)
    if run:
        axes.plot(run.steps, run.column("success"), "o", color="#94a3b8", ms=3, alpha=0.7, label="one batch")
        axes.plot(run.steps, run.column("success_ema"), color=LEFT, lw=2, label="moving average (success_ema)",
                  marker=marker(run.steps))
    else:
        draw_lines(axes, arms, "success_ema")
    axes.set_ylim(-0.02, 1.02)
    finish_axes(axes)


def _one(column: str, title: str, ylabel: str, log: bool = False) -> Callable:
    """A figure of one column: every step as a dot, smoothed as a line."""
    def draw(figure: Figure, arms: list[Arm]) -> None:
        axes = new_axes(figure, title, ylabel)
        run = single_run(arms)
        if run:
            axes.plot(run.steps, run.column(column), "o", color="#94a3b8", ms=3, alpha=0.7, label="one step")
        draw_lines(axes, [Arm("smoothed", [run], LEFT)] if run else arms, column, smooth=True)
        if log and any((r.column(column) > 0).any() for arm in arms for r in arm.runs):
            axes.set_yscale("log")
        finish_axes(axes)
    return draw


def _pair(left: tuple[str, str], right: tuple[str, str], title: str, smooth_right: bool = False) -> Callable:
    """Two columns, each (name, axis label): a twin axis for one run, panels one above the other for several."""
    def draw(figure: Figure, arms: list[Arm]) -> None:
        run = single_run(arms)
        if run is None:
            for row, (column, label) in enumerate((left, right), 1):
                axes = new_axes(figure, title if row == 1 else "", label, (2, 1, row))
                draw_lines(axes, arms, column, smooth=row == 1 or smooth_right)
                limit_still(axes)
                finish_axes(axes, legend=row == 1, xlabel="" if row == 1 else "step")
            return
        axes = new_axes(figure, title, left[1])
        axes.plot(run.steps, run.column(left[0]), "o", color=LEFT, ms=2.5, alpha=0.3)
        draw_lines(axes, [Arm(left[1], [run], LEFT)], left[0], smooth=True)
        axes.yaxis.label.set_color(LEFT)
        finish_axes(axes, legend=False)
        twin = axes.twinx()
        draw_lines(twin, [Arm(right[1], [run], RIGHT)], right[0], smooth=smooth_right)
        limit_still(twin)
        twin.set_ylabel(right[1], color=RIGHT)
        twin.grid(False)
        twin.ticklabel_format(axis="y", useOffset=False)
    return draw


def _weights(figure: Figure, arms: list[Arm]) -> None:
    for place, arm in enumerate(arms, 1):
        run = arm.runs[0]
        names = run.bin_names
        shape = (1, 2) if len(arms) == 1 else (2, len(arms))
        title = "Sampling weights" if len(arms) == 1 else arm.name
        area = new_axes(figure, title, "weight by bin" if place == 1 else "", (*shape, place))
        success = new_axes(figure, "Success by bin" if len(arms) == 1 else "", "success by bin" if place == 1 else "",
                        (*shape, place + (1 if len(arms) == 1 else len(arms))))
        weights = [mean_over_seeds(arm.runs, f"w_{b}", False) for b in range(len(names))]
        if weights:
            draw_stack(area, weights[0].index, weights, [BINS[b % len(BINS)] for b in range(len(names))])
        if run.window:
            success.axhspan(*run.window, color=BAND, alpha=0.16, lw=0)
        for b, name in enumerate(names):
            mean = mean_over_seeds(arm.runs, f"p_{b}", False)
            success.plot(mean.index, mean, color=BINS[b % len(BINS)], lw=1.8, label=name, marker=marker(mean))
        area.set_ylim(0, 1)
        success.set_ylim(-0.02, 1.02)
        finish_axes(area, xlabel="step" if len(arms) == 1 else "")
        finish_axes(success, legend=place == 1)


def _time(figure: Figure, arms: list[Arm]) -> None:
    run = single_run(arms)
    if run:
        axes = new_axes(figure, "Time by phase", "seconds a step")
        parts = phase_seconds(run)
        draw_stack(axes, run.steps, parts.values(), [PHASES[p] for p in parts], [p.removeprefix("t_") for p in parts])
        finish_axes(axes)
        return
    axes = new_axes(figure, "Time by phase", "")
    for row, arm in enumerate(arms):
        start = 0.0
        for phase, colour in PHASES.items():
            width = float(np.nanmean([phase_seconds(r)[phase].mean() for r in arm.runs]))
            axes.barh(row, width, left=start, color=colour, label=phase.removeprefix("t_") if row == 0 else None)
            start += width
    axes.set_yticks(range(len(arms)), [arm.name for arm in arms])
    axes.invert_yaxis()
    axes.set_ylim(len(arms) - 0.4, -1.0)
    finish_axes(axes, xlabel="mean seconds a step", steps=False)


def phase_seconds(run: Run) -> dict[str, pd.Series]:
    """Seconds of each phase by step; "other" is what the whole step took beyond them."""
    parts = {phase: run.column(phase).fillna(0.0) for phase in PHASES if phase in COLUMNS}
    parts["other"] = (run.column("t_step").fillna(0.0) - sum(parts.values())).clip(lower=0.0)
    return parts


def _accuracy(figure: Figure, arms: list[Arm]) -> None:
    axes = new_axes(figure, "Held-out accuracy", "")
    run = single_run(arms)
    names = list(next(r for arm in arms for r in arm.runs if r.evals).evals[0]["accuracy"])
    curve = run is not None and len(run.evals) > 2
    if curve:
        for b, name in enumerate(names):
            steps, values = zip(*((e["step"], e["accuracy"].get(name, np.nan)) for e in run.evals), strict=True)
            axes.plot(steps, values, "o-", ms=3.5, color=BINS[b % len(BINS)], label=name)
    elif run:
        shades = ["#94a3b8", LEFT][-len(run.evals):]
        _bars(axes, names, [(f"step {e['step']}", c, [[e]]) for e, c in zip(run.evals, shades, strict=True)])
    else:
        _bars(axes, names, [(arm.name, arm.colour, [[r.evals[-1]] for r in arm.runs if r.evals]) for arm in arms])
    axes.set_ylim(0, 1.05)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    finish_axes(axes, xlabel="step" if curve else "", steps=curve)


def _bars(axes: Axes, names: list[str], groups: list[tuple[str, str, list]]) -> None:
    """Bars by bin, side by side for each group (label, colour, evaluations of its seeds); dots are single seeds."""
    width = 0.8 / len(groups)
    for place, (label, colour, seeds) in enumerate(groups):
        values = np.array([[record["accuracy"].get(name, np.nan) for name in names] for (record,) in seeds])
        if not len(values):
            continue
        x = np.arange(len(names)) + (place - (len(groups) - 1) / 2) * width
        axes.bar(x, values.mean(axis=0), width * 0.92, color=colour, label=label)
        if len(values) > 1:
            axes.plot(np.tile(x, (len(values), 1)), values, ".", color="#1f2937", ms=4)
    axes.set_xticks(range(len(names)), names)
    axes.grid(axis="x", visible=False)


PLOTS = (
    Plot("success.png", "Success",
         "The line is the average that the scheduler steers. It should enter the shaded window and stay there as long "
         "as the window is reachable.", _success, wide=True),
    Plot("accuracy.png", "Held-out accuracy",
         "Greedy decoding on prompts that never occur in training.", _accuracy,
         needs=lambda arms: any(run.evals for arm in arms for run in arm.runs)),
    Plot("reward.png", "Reward",
         "An adaptive sampler keeps the mean reward near the window while the prompts get harder, so progress shows in "
         "held-out accuracy, not here.", _one("reward_mean", "Reward", "mean reward")),
    Plot("weights.png", "Sampling weights and success by bin",
         "Weight moves to the bins that hold success inside the window: first the easy ones, later the hard ones.",
         _weights, wide=True),
    Plot("entropy.png", "Entropy",
         "A fall to near 0 means that exploration is over; lambda_H rises when entropy is low.",
         _pair(("entropy", "entropy, nats"), ("lambda_h", "lambda_H"), "Entropy and its coefficient")),
    Plot("kl.png", "KL",
         "Distance to the averaged policy. A steady climb means that the policy runs away from its average.",
         _pair(("kl", "KL, nats a token"), ("lambda_kl", "lambda_KL"), "KL to the average and its coefficient")),
    Plot("drift.png", "Drift",
         "Relative distance of the weights from their average; the scheduler answers with alpha.",
         _pair(("drift", "drift"), ("ema_alpha", "alpha"), "Drift and the momentum of the average")),
    Plot("length.png", "Response length",
         "Length and truncation that grow together mean that the token limit binds.",
         _pair(("response_len_mean", "tokens"), ("truncated", "truncated"), "Response length and truncation", True)),
    Plot("gradient.png", "Gradient",
         "Spikes of the norm precede trouble. The signal-to-noise ratio should be largest with success near 0.5.",
         _pair(("grad_norm", "norm before clipping"), ("grad_snr", "signal to noise"), "Gradient", True)),
    Plot("flat.png", "Flat groups",
         "Groups with equal rewards give no policy gradient; the window keeps them few. Kept: the share in the loss.",
         _pair(("flat_groups", "flat groups"), ("kept_fraction", "kept tokens"), "Flat groups and kept tokens")),
    Plot("ratio.png", "Sampler against learner",
         "Both hold the same weights, so this is numerical noise: flat and small. A jump is a fault.",
         _one("ratio_deviation", "Sampler against learner", "mean |difference of logp|, nats", log=True)),
    Plot("time.png", "Time by phase", "Where the seconds of a step go.", _time),
)
