"""report.html: one file that opens from disk, for one run or for several laid over one another.

    write_report([Path("runs/demo")], Path("runs/demo"))
    write_report([Path("runs/a-seed-0"), Path("runs/a-seed-1"), Path("runs/b-seed-0")], Path("runs/compare"))
"""

import base64
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Sequence

import numpy as np
from jinja2 import Environment, StrictUndefined

from fastsched.config import ConfigError
from fastsched.record.tables import COLUMNS, OPTIONAL_COLUMNS, replace_text
from fastsched.report.axes import COLOURS
from fastsched.report.plots import PLOTS, phase_seconds, write_plots
from fastsched.report.runs import SETTLED, TOKEN_GROUPS, Arm, Run, TokenScores, arms_of, in_window_share, last, load_run, mean_accuracy
from fastsched.report.template import PAGE
from fastsched.report.trajectory_plots import TRAJECTORY_PLOTS, write_token_plot

TOKENS_SHOWN = 12  # of each group of the TP-Score table
LONGEST_TEXT = 3000  # characters of a prompt or response shown in the sample table


@dataclass(frozen=True)
class Table:
    """Cells as text. `numeric` columns are aligned right, `code` columns set in monospace, `strong` rows stand out."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    numeric: Sequence[int] = ()
    code: Sequence[int] = ()
    strong: Sequence[int] = ()
    colours: Sequence[str] = ()


def write_report(run_dirs: Sequence[Path], out: Path, tokens: TokenScores | None = None) -> Path:
    """Writes `out`/report.html and `out`/plots/*.png from run folders, finished or going on; returns the HTML's path.

    `out` may also name the HTML file itself. With `tokens`, also tp_score.csv beside it, a figure and a table of them.
    Runs named `...-seed-N` are gathered into one arm. ConfigError names a folder that is no run, or has not finished a step.
    """
    if not run_dirs:
        raise ConfigError("report: give at least one run folder")
    runs = [load_run(Path(folder)) for folder in run_dirs]
    arms = arms_of(runs, COLOURS)
    page = Path(out) if Path(out).suffix == ".html" else Path(out) / "report.html"
    page.parent.mkdir(parents=True, exist_ok=True)
    drawn = write_plots(arms, page.parent / "plots", (*PLOTS, *TRAJECTORY_PLOTS))
    if tokens is not None:
        tokens.table.to_csv(page.parent / "tp_score.csv", index=False)
        drawn.append(write_token_plot(tokens, page.parent / "plots"))
    plots = [(plot, _data_uri(path)) for plot, path in drawn]
    template = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True).from_string(PAGE)
    parts = _one_run(runs[0]) if len(runs) == 1 else _several(runs, arms)
    replace_text(page, template.render(plots=plots, tokens=None if tokens is None else _tokens_by_position(tokens), **parts))
    return page


def _tokens_by_position(tokens: TokenScores) -> Table:
    """The most frequent tokens of each group, with their text as Python writes it, so that blanks and line ends are seen."""
    rows = []
    for name, (low, high) in TOKEN_GROUPS.items():
        group = tokens.table[tokens.table["tp_score"].between(low, high)]
        rows += [[name, repr(row.text), f"{row.tp_score:.3f}", str(row.seen)]
                 for row in group.nlargest(TOKENS_SHOWN, "seen").sort_values("tp_score").itertuples()]
    return Table(["Group", "Token", "TP-Score", "Seen"], rows, numeric=(2, 3), code=(1,))


def _data_uri(path: Path) -> str:
    return "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode("ascii")


def _one_run(run: Run) -> dict:
    parts = {"title": run.name, "subtitle": _subtitle(run), "cards": _cards(run),
             "comparison": None, "comparison_note": "", "accuracy": _accuracy_of_run(run),
             "samples": _samples(run), "samples_of": "", "time": _time([run]),
             "rules": _rules(run), "differences": None, "config": _config(run), "environment": _environment(run)}
    return {**parts, "glossary": _glossary([run]), "sections": _sections(parts)}


def _several(runs: list[Run], arms: list[Arm]) -> dict:
    note = (f"In window: of the steps after step {SETTLED} at which the window was reachable, the share with the "
            "success average inside it, and their number.")
    parts = {"title": "Comparison: " + ", ".join(arm.name for arm in arms), "subtitle": f"{len(runs)} runs",
             "cards": [], "comparison": _comparison(arms), "comparison_note": note, "accuracy": _accuracy_of_arms(arms),
             "samples": _samples(runs[0]), "samples_of": f" of {runs[0].name}", "time": _time(runs), "rules": None,
             "differences": _differences(runs), "config": _config(runs[0]),
             "environment": _environment(runs[0])}
    return {**parts, "glossary": _glossary(runs), "sections": _sections(parts)}


def _sections(parts: dict) -> list[tuple[str, str]]:
    names = {"comparison": "Comparison", "accuracy": "Accuracy", "plots": "Plots", "samples": "Samples", "time": "Time",
             "rules": "Rules", "config": "Configuration", "environment": "Environment", "glossary": "Columns"}
    return [(key, name) for key, name in names.items() if key in ("plots", "glossary") or parts[key]]


def _number(value: float | None, form: str = ".3g") -> str:
    return "–" if value is None or not np.isfinite(value) else format(value, form)


def _percent(value: float) -> str:
    return _number(value, ".1%")


def _duration(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {seconds:02d} s" if minutes else f"{seconds} s"


def _tokens(value: float | None) -> str:
    if value is None:
        return "–"
    scale, unit = next((s, u) for s, u in ((1e9, " G"), (1e6, " M"), (1e3, " k"), (1, "")) if value >= s or s == 1)
    return f"{value / scale:.3g}{unit}"


def _share(run: Run) -> str:
    share, counted = in_window_share(run)
    return "–" if share is None else f"{share:.0%} of {counted}"


def _subtitle(run: Run) -> str:
    names = {"model.name": "model", "data.task": "task", "scheduler.kind": "sampler", "learner.loss": "loss",
             "rollout.engine": "rollouts by", "train.seed": "seed"}
    parts = [f"{name} {run.config[key]}" for key, name in names.items() if key in run.config]
    commit = (run.environment.get("git") or {}).get("commit")
    return " · ".join([*parts, *([f"commit {commit[:10]}"] if commit else [])])


def _cards(run: Run) -> list[tuple[str, str]]:
    total, (share, counted) = run.config.get("train.steps"), in_window_share(run)
    cards = [(f"{run.steps.iloc[-1]:.0f}" + (f" / {total}" if total else ""), "steps"),
             (_number(last(run, "success_ema"), ".2f"), "success, moving average"),
             (_number(share, ".0%"), f"in the window, of {counted} reachable steps after step {SETTLED}")]
    if run.evals:
        first, final = mean_accuracy(run.evals[0]), mean_accuracy(run.evals[-1])
        cards.append((f"{first:.0%} → {final:.0%}" if len(run.evals) > 1 else f"{final:.0%}", "held-out accuracy"))
    cards += [(_duration(run.column("t_step").sum()), "time in steps"),
              (_tokens(last(run, "tokens_total")), "response tokens"),
              (_number(run.column("peak_mem_gb").max(), ".1f") + " GB", "peak memory")]
    skipped = run.column("skipped_nonfinite").sum()
    return cards + ([(f"{skipped:.0f}", "updates skipped (not finite)")] if skipped else [])


def _accuracy_of_run(run: Run) -> Table | None:
    if not run.evals:
        return None
    first, final = run.evals[0], run.evals[-1]
    bins = [(name, count, first["accuracy"].get(name, np.nan), final["accuracy"][name])
            for name, count in final["n"].items()]
    bins.append(("all", sum(final["n"].values()), mean_accuracy(first), mean_accuracy(final)))
    rows = [[name, str(count), _percent(before), _percent(after), _number(100 * (after - before), "+.1f")]
            for name, count, before, after in bins]
    head = ["Bin", "Prompts", f"Step {first['step']}", f"Step {final['step']}", "Points"]
    shown = 3 if len(run.evals) == 1 else 5
    return Table(head[:shown], [row[:shown] for row in rows], numeric=(1, 2, 3, 4), strong=(len(rows) - 1,))


def _accuracy_of_arms(arms: list[Arm]) -> Table | None:
    evaluated = [(arm, [run.evals for run in arm.runs if run.evals]) for arm in arms]
    evaluated = [(arm, evals) for arm, evals in evaluated if evals]
    if not evaluated:
        return None
    names = list(evaluated[0][1][0][-1]["accuracy"])
    rows = []
    for arm, evals in evaluated:
        by_bin = [np.mean([e[-1]["accuracy"].get(name, np.nan) for e in evals]) for name in names]
        first, final = (np.mean([mean_accuracy(e[place]) for e in evals]) for place in (0, -1))
        rows.append([arm.name, str(len(evals)), *(_percent(value) for value in (*by_bin, first, final))])
    head = ["Run", "Seeds", *names, "All, first", "All, last"]
    return Table(head, rows, numeric=range(1, len(head)), colours=[arm.colour for arm, _ in evaluated])


def _comparison(arms: list[Arm]) -> Table:
    rows, strong, colours = [], [], []
    for arm in arms:
        for run in arm.runs:
            rows.append([run.name, f"{run.steps.iloc[-1]:.0f}", _share(run), _number(last(run, "success_ema"), ".2f"),
                         _number(last(run, "reward_mean")), _tokens(last(run, "tokens_total")),
                         _duration(run.column("t_step").sum())])
        if len(arm.runs) > 1:
            strong.append(len(rows))
            rows.append(_arm_row(arm))
        colours += [arm.colour] * (len(rows) - len(colours))
    head = ["Run", "Steps", "In window", "Final success", "Final reward", "Tokens", "Time"]
    return Table(head, rows, numeric=range(1, len(head)), strong=strong, colours=colours)


def _arm_row(arm: Arm) -> list[str]:
    def mean(values: list[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return float(np.mean(known)) if known else None

    shares = [in_window_share(run) for run in arm.runs]
    counted = sum(count for _, count in shares)
    share = sum(s * count for s, count in shares if s is not None) / counted if counted else None
    return [f"{arm.name}, all seeds", f"{mean([run.steps.iloc[-1] for run in arm.runs]):.0f}",
            "–" if share is None else f"{share:.0%} of {counted}",
            _number(mean([last(run, "success_ema") for run in arm.runs]), ".2f"),
            _number(mean([last(run, "reward_mean") for run in arm.runs])),
            _tokens(mean([last(run, "tokens_total") for run in arm.runs])),
            _duration(mean([run.column("t_step").sum() for run in arm.runs]))]


def _samples(run: Run) -> list[tuple[int, list[dict]]]:
    steps = sorted({sample["step"] for sample in run.samples})
    chosen = sorted({steps[0], steps[len(steps) // 2], steps[-1]}) if steps else []
    threshold = dict(zip(run.steps, run.column("r_thr"), strict=True))
    return [(step, [_sample(s, threshold.get(step, 0.5)) for s in run.samples if s["step"] == step]) for step in chosen]


def _sample(sample: dict, threshold: float) -> dict:
    reward = sample["reward"]
    texts = {key: str(sample[key]) for key in ("prompt", "response", "answer")}
    cut = {key: text if len(text) <= LONGEST_TEXT else text[:LONGEST_TEXT] + " […]" for key, text in texts.items()}
    return {**sample, **cut, "success": reward is not None and reward > threshold,
            "shown_reward": "failed" if reward is None else f"{reward:.3g}"}


def _time(runs: list[Run]) -> Table:
    seconds = [{phase: float(s.sum()) for phase, s in phase_seconds(run).items()} for run in runs]
    rows = []
    for run, parts in zip(runs, seconds, strict=True):
        total = sum(parts.values()) or 1.0
        rows.append([run.name, _duration(sum(parts.values())), f"{sum(parts.values()) / len(run.steps):.2f} s",
                     *(f"{value / total:.1%}" for value in parts.values())])
    head = ["Run", "Total", "A step", *(phase.removeprefix("t_") for phase in seconds[0])]
    return Table(head, rows, numeric=range(1, len(head)))


def _rules(run: Run) -> Table | None:
    if "rule" not in run.metrics:
        return None
    fired = run.metrics[["step", "rule"]].dropna().groupby("rule")["step"].agg(["count", "min", "max"])
    rows = [[rule, f"{row['count']:.0f}", f"{row['min']:.0f}", f"{row['max']:.0f}"] for rule, row in fired.iterrows()]
    return Table(["Rule", "Steps", "First", "Last"], rows, numeric=(1, 2, 3)) if rows else None


def _config(run: Run) -> list[Table]:
    parts: dict[str, list] = {}
    for key, value in run.config.items():
        part, _, rest = key.partition(".")
        parts.setdefault(part, []).append([rest or part, str(value)])
    return [Table([part, ""], rows, code=(0, 1)) for part, rows in parts.items()]


def _differences(runs: list[Run]) -> Table:
    keys = dict.fromkeys(key for run in runs for key in run.config)
    values = {key: [str(run.config.get(key, "–")) for run in runs] for key in keys}
    rows = [[key, *cells] for key, cells in values.items() if len(set(cells)) > 1]
    return Table(["Setting", *(run.name for run in runs)], rows, code=range(len(runs) + 1))


def _environment(run: Run) -> Table | None:
    rows = []
    for key, value in run.environment.items():
        if key == "git" and value:
            value = value["commit"] + (", with uncommitted changes" if value["dirty"] else "")
        elif isinstance(value, dict):
            value = ", ".join(f"{name} {version}" for name, version in value.items())
        elif isinstance(value, list):
            value = " ".join(str(v) for v in value) or "none"
        rows.append([key, str(value)])
    return Table(["", ""], rows, code=(0,)) if rows else None


def _glossary(runs: list[Run]) -> Table:
    present = {re.sub(r"\d+$", "b", name) for run in runs for name in run.metrics}
    added = {name: text for name, text in OPTIONAL_COLUMNS.items() if name in present}
    return Table(["Column", "Meaning"], list({**COLUMNS, **added}.items()), code=(0,))
