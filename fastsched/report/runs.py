"""Reading run folders back: tables as pandas frames, seeds gathered into arms, and the figures that compare runs."""

import io
import json
import math
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pandas as pd
import yaml

from fastsched.config import ConfigError
from fastsched.record.tables import bin_count, complete_lines, read_jsonl

SETTLED = 20
"""Steps at the start of a run that the in-window share leaves out."""
TEXT_COLUMNS = ("kl_kind", "rule")
TOKEN_GROUPS = {"early (at most 10 %)": (0.0, 0.10), "middle (45-55 %)": (0.45, 0.55), "late (at least 90 %)": (0.90, 1.0)}
"""Tokens by TP-Score, as the figures of arXiv 2605.25381 group them."""


@dataclass(frozen=True)
class Run:
    """One run folder, finished or still going. `config` is flat ("learner.lr"), empty when there is no config.yaml."""

    name: str
    folder: Path
    metrics: pd.DataFrame
    config: dict
    environment: dict
    samples: list[dict]
    evals: list[dict]
    deciles: list[dict] = field(default_factory=list)

    def column(self, name: str) -> pd.Series:
        """A column as float64, all NaN when the run does not have it."""
        return self.metrics[name] if name in self.metrics else pd.Series(float("nan"), index=self.metrics.index)

    @property
    def steps(self) -> pd.Series:
        return self.metrics["step"]

    @property
    def window(self) -> tuple[float, float] | None:
        window = self.config.get("scheduler.window")
        return (float(window[0]), float(window[1])) if window else None

    @property
    def bin_names(self) -> list[str]:
        """Names of the bins as the evaluation calls them, where both have the same (`data.difficulty` column), else bin 0, bin 1, ..."""
        count = bin_count(self.metrics.columns)
        same = self.config.get("data.difficulty", "column") == "column"
        named = list(self.evals[0]["accuracy"]) if self.evals and same else []
        return named if len(named) == count else [f"bin {b}" for b in range(count)]


@dataclass(frozen=True)
class Arm:
    """Runs that differ in the seed only, told by names `...-seed-N`; any other run is an arm of its own."""

    name: str
    runs: list[Run]
    colour: str


@dataclass(frozen=True)
class TokenScores:
    """Where tokens stand in responses: `table` with columns token, text, tp_score, seen, earliest first; `groups` with the share of
    each group's occurrences by position bin [100].
    """

    table: pd.DataFrame
    groups: dict[str, np.ndarray]


def load_run(folder: Path) -> Run:
    """Reads a run folder. ConfigError names a folder that is missing, is no run, or has not finished a step."""
    folder = Path(folder)
    metrics = folder / "metrics.csv"
    if not metrics.is_file():
        what = "holds no metrics.csv, so it is not a run folder" if folder.is_dir() else "does not exist"
        raise ConfigError(f"{folder} {what}; give the folder that was --run_dir of a training run")
    lines = complete_lines(metrics)
    if len(lines) < 2:
        raise ConfigError(f"{metrics} holds no complete row yet: wait for the first step")
    table = pd.read_csv(io.StringIO("\n".join(lines)), keep_default_na=False, na_values=[""])
    for name in table.columns.difference(TEXT_COLUMNS):
        table[name] = pd.to_numeric(table[name], errors="coerce").astype("float64")
    config, environment = folder / "config.yaml", folder / "environment.json"
    evals = {record["step"]: _known(record) for record in read_jsonl(folder / "evals.jsonl")}  # a step's last counts
    return Run(folder.resolve().name, folder, table,
               _flat(yaml.safe_load(config.read_text()) or {}) if config.exists() else {},
               json.loads(environment.read_text()) if environment.exists() else {},
               read_jsonl(folder / "samples.jsonl"), [evals[step] for step in sorted(evals)], read_jsonl(folder / "deciles.jsonl"))


def _known(record: dict) -> dict:
    """An evaluation with the accuracy of bins without prompts, null in JSON, as NaN."""
    accuracy = {name: float("nan") if value is None else value for name, value in record["accuracy"].items()}
    return {**record, "accuracy": accuracy}


def _flat(tree: dict, prefix: str = "") -> dict:
    leaves = {}
    for key, value in tree.items():
        leaves.update(_flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value})
    return leaves


def arms_of(runs: list[Run], colours: tuple[str, ...]) -> list[Arm]:
    """Runs grouped by name without `-seed-N`, in order of first appearance, one colour an arm."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(re.sub(r"-seed-\d+$", "", run.name), []).append(run)
    return [Arm(name if len(group) > 1 else group[0].name, group, colours[i % len(colours)])
            for i, (name, group) in enumerate(groups.items())]


def schedule_progress(run: Run, steps: np.ndarray) -> np.ndarray:
    """tau of each step: the share of the temporal schedule that has passed; without a schedule the share of all steps."""
    total = int(run.config.get("train.steps") or run.steps.max())
    first, last = 0, total
    if run.config.get("scheduler.temporal.mode", "none") != "none":
        first, last = (math.floor(total * float(run.config.get(f"scheduler.temporal.{name}", default)))
                       for name, default in (("start", 0.0), ("end", 0.8)))
    return np.clip((steps - first) / max(last - first, 1), 0.0, 1.0)


def in_window_share(run: Run) -> tuple[float | None, int]:
    """(share of steps with the success EMA inside the window, number of steps counted).

    Counted are the steps after `SETTLED` at which the window was reachable; without any the share is None.
    """
    counted = (run.steps > SETTLED) & (run.column("window_reachable") == 1)
    inside = run.column("in_window")[counted]
    return (float(inside.mean()), int(counted.sum())) if counted.any() else (None, 0)


def last(run: Run, column: str) -> float | None:
    """The last measured value of a column, None when there is none."""
    values = run.column(column).dropna()
    return float(values.iloc[-1]) if len(values) else None


def mean_accuracy(record: dict) -> float:
    """Accuracy of an evaluation over all its prompts: bins weighted by their number of prompts."""
    counts = {name: count for name, count in record["n"].items() if count}
    return sum(record["accuracy"][name] * n for name, n in counts.items()) / max(sum(counts.values()), 1)
