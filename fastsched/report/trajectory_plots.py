"""Figures over the trajectory: entropy by region, KL by percentile, gradient SNR against success, TP-Score of tokens."""

from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from fastsched.record.tables import bin_count
from fastsched.report.axes import COLOURS, STYLE, finish_axes, marker, new_axes, smoothed
from fastsched.report.plots import Plot
from fastsched.report.runs import Arm, Run, TokenScores, schedule_progress

REGIONS = {"early": slice(0, 3), "middle": slice(3, 7), "late": slice(7, 10)}
TAUS, TAU_WIDTH = {0.3: "-", 0.8: "--"}, 0.05
SUCCESS_BINS = 10


def _decile_table(run: Run, name: str) -> pd.DataFrame:
    """Rows are steps, columns the ten deciles; NaN where nothing was measured."""
    return pd.DataFrame([row[name] for row in run.deciles], index=[row["step"] for row in run.deciles], dtype="float64")


def _region(values: pd.DataFrame, weight: pd.DataFrame, columns: slice) -> pd.Series:
    """Mean over a region's deciles, each with its weight; all deciles hold about as many tokens."""
    v, w = values.iloc[:, columns], weight.iloc[:, columns].where(values.iloc[:, columns].notna(), 0.0)
    return (v * w).sum(axis=1, min_count=1) / w.sum(axis=1).replace(0.0, np.nan)


def _mean_of_runs(runs: list[Run], one) -> pd.Series:
    return pd.concat([smoothed(one(run)) for run in runs if run.deciles], axis=1).mean(axis=1).sort_index()


def _entropy_by_region(figure: Figure, arms: list[Arm]) -> None:
    for place, (name, columns) in enumerate(REGIONS.items(), 1):
        axes = new_axes(figure, f"{name.capitalize()} tokens", "entropy, nats" if place == 1 else "", (1, 3, place))
        for arm in (arm for arm in arms if any(run.deciles for run in arm.runs)):
            kept = _mean_of_runs(arm.runs, lambda run, c=columns: _region(_decile_table(run, "entropy"), _decile_table(run, "kept"), c))
            sampled = _mean_of_runs(arm.runs, lambda run, c=columns: _decile_table(run, "surprisal").iloc[:, c].mean(axis=1))
            for line, style, what in ((kept, "-", "trained tokens"), (sampled, ":", "-logp of all tokens")):
                axes.plot(line.index, line, style, color=arm.colour, lw=1.6, label=f"{arm.name}, {what}", marker=marker(line))
        finish_axes(axes, legend=place == 1)


def kl_at(run: Run, tau: float) -> pd.Series:
    """Mean KL of each decile over the steps within TAU_WIDTH of schedule progress `tau`; NaN where nothing was trained."""
    table = _decile_table(run, "kl")
    near = np.abs(schedule_progress(run, table.index.to_numpy()) - tau) <= TAU_WIDTH + 1e-9
    return table[near].mean()


def _kl_by_percentile(figure: Figure, arms: list[Arm]) -> None:
    axes = new_axes(figure, "KL by percentile of the trajectory", "KL, nats a token")
    for arm in arms:
        for tau, style in TAUS.items():
            curves = [kl_at(run, tau) for run in arm.runs if run.deciles]
            if curves:
                mean = pd.concat(curves, axis=1).mean(axis=1)
                axes.plot(10 * mean.index + 5, mean, style, color=arm.colour, lw=1.8, marker="o", ms=3.5, label=f"{arm.name}, tau {tau}")
    axes.set_xlim(0, 100)
    finish_axes(axes, xlabel="percentile of the response", steps=False)


def snr_points(run: Run) -> tuple[np.ndarray, np.ndarray]:
    """(success of a bin, gradient SNR of its groups) over all bins and steps where both were measured."""
    bins = range(bin_count(run.metrics.columns))
    p, snr = (np.concatenate([run.column(f"{name}_{b}").to_numpy() for b in bins]) for name in ("p", "snr"))
    known = np.isfinite(p) & np.isfinite(snr)
    return p[known], snr[known]


def _snr_by_success(figure: Figure, arms: list[Arm]) -> None:
    axes = new_axes(figure, "Gradient SNR against success", "signal to noise")
    every = []
    for arm in arms:
        p, snr = (np.concatenate(parts) for parts in zip(*(snr_points(run) for run in arm.runs), strict=True))
        axes.plot(p, snr, "o", color=arm.colour, ms=2.5, alpha=0.25)
        place = np.minimum((p * SUCCESS_BINS).astype(int), SUCCESS_BINS - 1)
        medians = pd.Series(snr).groupby(place).median()
        axes.plot((medians.index + 0.5) / SUCCESS_BINS, medians, "o-", color=arm.colour, lw=1.8, ms=4, label=f"{arm.name}, median")
        every.append(snr)
    every = np.concatenate(every)
    if len(every):
        low, high = np.quantile(every, (0.02, 0.98))
        axes.set_ylim(low - 0.1 * (high - low) - 1e-6, high + 0.1 * (high - low) + 1e-6)
    axes.set_xlim(0, 1)
    finish_axes(axes, xlabel="success of the bin (moving average)", steps=False)


def _has_deciles(arms: list[Arm]) -> bool:
    return any(run.deciles for arm in arms for run in arm.runs)


def _has_snr_bins(arms: list[Arm]) -> bool:
    return any(len(snr_points(run)[0]) for arm in arms for run in arm.runs)


TRAJECTORY_PLOTS = (
    Plot("regions.png", "Entropy by region",
         "Early, middle and late tokens of the responses (0-30, 30-70, 70-100 %). Under a temporal schedule a region should gain "
         "entropy once the boundary reaches it. Dotted: -logp of what was sampled, which also measures tokens that are not trained.",
         _entropy_by_region, wide=True, needs=_has_deciles),
    Plot("percentiles.png", "KL by percentile",
         "Mean KL along the trajectory at schedule progress 0.3 and 0.8. A temporal schedule moves it from the late percentiles to the "
         "early ones; without one it shows where the policy changes.", _kl_by_percentile, needs=_has_deciles),
    Plot("snr.png", "Gradient SNR against success",
         "One point a bin and step, the line is the median. With binary rewards it should peak near 0.5.", _snr_by_success,
         needs=_has_snr_bins),
)


def write_token_plot(tokens: TokenScores, folder: Path) -> tuple[Plot, Path]:
    """tp_score.png: how many tokens have which score, and where the tokens of each group stand."""
    plot = Plot("tp_score.png", "TP-Score",
                "Left: tokens by TP-Score, the mean position at which a token occurs. Right: where the tokens of the early, middle and "
                "late group stand.", lambda figure, arms: _token_axes(figure, tokens), wide=True)
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context(STYLE):
        figure = Figure(figsize=(12.4, 3.7), dpi=140, layout="constrained")
        plot.draw(figure, [])
        figure.savefig(folder / plot.file)
    return plot, folder / plot.file


def _token_axes(figure: Figure, tokens: TokenScores) -> None:
    left: Axes = new_axes(figure, "Tokens by TP-Score", "tokens", (1, 2, 1))
    left.hist(tokens.table["tp_score"], bins=50, range=(0, 1), color=COLOURS[0])
    finish_axes(left, xlabel="TP-Score", steps=False)
    right: Axes = new_axes(figure, "Positions of the groups", "share of the group's occurrences", (1, 2, 2))
    for (name, curve), colour in zip(tokens.groups.items(), COLOURS, strict=False):
        right.plot((np.arange(len(curve)) + 0.5) / len(curve), curve, color=colour, lw=1.8, label=name)
    finish_axes(right, xlabel="position in the response", steps=False)
