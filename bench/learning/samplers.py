"""Samplers compared in real training runs that sample the same number of responses, or of tokens.

    python -m bench.learning.samplers --preset tiny-cpu --seeds 3
    python -m bench.learning.samplers --preset smollm2-cpu --seeds 2 --arms uniform window sec --tokens 30000

Writes bench/results/samplers-PRESET.{md,json,png}. Finished runs are kept and interrupted ones resumed: run it again to go on.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Optional

import numpy as np
import pandas as pd
from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from bench.learning.arms import Arm, Comparison, chosen, parser, train_all
from bench.learning.summary import band, estimate, markdown_table, write_results
from fastsched.config import BAD_INPUT, DONE, Config, ConfigError, require
from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.models.precision import settled
from fastsched.report.axes import COLOURS, STYLE
from fastsched.report.runs import Run, load_run, mean_accuracy

PALETTE = (*COLOURS, "#111827", "#9f1239")
BASELINE = "uniform"
ARMS = {
    BASELINE: Arm(("--scheduler.kind", "uniform")),
    "fixed": Arm(("--scheduler.kind", "fixed", "--scheduler.fixed_weights", "0.4", "0.3", "0.2", "0.1")),
    "dynamic": Arm(("--scheduler.kind", "uniform", "--scheduler.refills", "2")),
    "speed": Arm(("--scheduler.kind", "speed")),
    "mopps": Arm(("--scheduler.kind", "mopps")),
    "sec": Arm(("--scheduler.kind", "sec")),
    "ads": Arm(("--scheduler.kind", "ads"), cluster=True),
    "dots": Arm(("--scheduler.kind", "dots"), cluster=True),
    "window": Arm(("--scheduler.kind", "adaptive")),
    "learned": Arm(("--scheduler.kind", "learned")),
}
STEPS = {"tiny-cpu": 480}
"""Steps that the uniform sampler takes within the budget; by default those of the preset. Within 160 no sampler but ADS
can be told from another (bench/results/samplers-tiny-cpu-short.md): they gain the first seven points alike, and part later."""
OPTIONS = {"tiny-cpu": {"data.eval_per_bin": 256, "scheduler.coefficients": "constant", "features.clusters": 16, "features.dims": 32}}
"""Its rule table would give each sampler another step size; what comes out is the same (bench/results/samplers-tiny-cpu-rules.md).
Clusters as in ads-tiny."""
EVALUATIONS = 20
EVAL_PER_BIN = 128
GRID = 200
"""Points of the budget at which a run's accuracy is read off, by linear interpolation between its evaluations."""
SMOOTHED = 0.15
"""Share of the budget over which accuracy is averaged, backwards."""


@dataclass(frozen=True)
class Budget:
    """What every run may sample."""

    amount: int
    unit: Literal["responses", "tokens"] = "responses"

    def __str__(self) -> str:
        return f"{self.amount:,} {self.unit} a run"

    @property
    def grid(self) -> np.ndarray:
        return np.linspace(0, self.amount, GRID)


@dataclass(frozen=True)
class Result:
    """One run: smoothed accuracy [GRID] over the budget, and what share of it, how many rollouts and how many tokens were spent when it
    first reached the target (None: not within the budget)."""

    accuracy: np.ndarray
    share: Optional[float]
    rollouts: Optional[float]
    tokens: Optional[float]


def main(arguments: Sequence[str] | None = None) -> int:
    own_parser = parser(__doc__, ARMS)
    own_parser.add_argument("--preset", default="tiny-cpu")
    own_parser.add_argument("--tokens", type=int, help="budget of every run in response tokens, instead of the responses of --steps; twice "
                                                       "--steps have to suffice for it")
    own, overrides = own_parser.parse_known_args(arguments)
    try:
        arms = chosen(ARMS, own.arms)
        require(BASELINE in arms, f"--arms: {BASELINE} is needed, since its accuracy is the target of the others")
        cfg = settled(parse_config(["--config", str(preset_path(own.preset)), *overrides]))
        steps = own.steps or STEPS.get(own.preset, cfg.train.steps)
        budget = Budget(own.tokens, "tokens") if own.tokens else Budget(responses(cfg, steps))
        name = f"samplers-{own.preset}" + "-tokens" * bool(own.tokens)
        comparison = Comparison(name, own.preset, arms, range(own.seeds), own.runs,
                                equal_budgets(own.preset, cfg, steps, budget), tuple(overrides))
        train_all(comparison)
        runs = {arm: [load_run(folder) for folder in folders] for arm, folders in comparison.folders().items()}
        print(report(runs, budget, own.preset, own.out / name))
    except ConfigError as error:
        print(f"bench.learning.samplers: {error}", file=sys.stderr)
        return BAD_INPUT
    return DONE


def responses(cfg: Config, steps: int) -> int:
    """Responses of `steps` steps of a sampler that rolls out one batch a step."""
    return steps * cfg.train.prompts_per_step * cfg.rollout.responses


def equal_budgets(preset: str, cfg: Config, steps: int, budget: Budget) -> tuple[str, ...]:
    """Options of every arm. The budget ends a run; twice the steps leave room for a sampler that spends less a step.

    Nothing else may depend on the number of steps, so learning rate and trajectory schedule are constant.
    """
    options = {
        {"responses": "train.rollout_budget", "tokens": "train.token_budget"}[budget.unit]: budget.amount,
        "train.steps": 2 * steps, "train.eval_every": max(1, steps // EVALUATIONS),
        "train.checkpoint_every": max(1, steps // 8), "train.keep_checkpoints": 1, "data.eval_per_bin": EVAL_PER_BIN,
        "learner.cooldown": 0, "scheduler.temporal.mode": "none",
        "scheduler.ads.size": max(1, cfg.train.prompts_per_step // cfg.scheduler.ads.clusters),
        "log.plots": "false", "log.tensorboard": "false", **OPTIONS.get(preset, {}),
    }
    return tuple(part for key, value in options.items() for part in (f"--{key}", str(value)))


def spent(run: Run, unit: str) -> list[float]:
    """Responses or tokens after every step of a run, and 0 before the first."""
    return [0.0, *run.column(f"{unit}_total")]


def accuracy_over(run: Run, budget: Budget) -> np.ndarray:
    """[GRID] held-out accuracy, smoothed backwards over a share of the budget; NaN beyond the run's last evaluation."""
    done = dict(zip([0, *run.steps], spent(run, budget.unit), strict=True))
    points = [(done[record["step"]], mean_accuracy(record)) for record in run.evals if record["step"] in done]
    require(len(points) > 1, f"{run.folder}: fewer than two evaluations; delete the folder and run it again")
    raw = pd.Series(np.interp(budget.grid, *zip(*points, strict=True), right=math.nan))
    return raw.rolling(max(1, round(SMOOTHED * GRID)), min_periods=1).mean().where(raw.notna()).to_numpy()


def result(run: Run, budget: Budget, target: float) -> Result:
    accuracy = accuracy_over(run, budget)
    reached = np.flatnonzero(accuracy >= target)
    if not len(reached):
        return Result(accuracy, None, None, None)
    at = budget.grid[reached[0]]
    rollouts, tokens = (float(np.interp(at, spent(run, budget.unit), spent(run, unit))) for unit in ("responses", "tokens"))
    return Result(accuracy, at / budget.amount, rollouts, tokens)


def target_of(runs: Sequence[Run], budget: Budget) -> tuple[float, float]:
    """(target, start): smoothed accuracy of these runs at the end of the budget and before training, mean over seeds."""
    curves = np.array([accuracy_over(run, budget) for run in runs])
    require(np.isfinite(curves[:, -1]).all(), f"a run of the {BASELINE} sampler ended before its budget, so there is no target")
    return float(curves[:, -1].mean()), float(curves[:, 0].mean())


def until(values: Sequence[Optional[float]], limit: Sequence[float], form: str) -> str:
    """Mean and interval of what it took; with runs that never got there a lower bound, their whole budget counted."""
    known = [at_most if value is None else value for value, at_most in zip(values, limit, strict=True)]
    return f"> {estimate(known).mean:{form}}" if None in values else estimate(known).text(form)


def row(arm: str, runs: Sequence[Run], results: Sequence[Result]) -> list[str]:
    reached = sum(r.share is not None for r in results)
    rollouts, tokens = ([spent(run, unit)[-1] for run in runs] for unit in ("responses", "tokens"))
    return [arm, f"{reached} of {len(runs)}", until([r.rollouts for r in results], rollouts, ",.0f"),
            until([r.share for r in results], [1.0] * len(runs), ".2f"), until([r.tokens for r in results], tokens, ",.0f"),
            estimate([r.accuracy[-1] for r in results]).text(".1f", 100),
            estimate([run.column("t_step").sum() for run in runs]).text(".0f")]


def report(runs: Mapping[str, Sequence[Run]], budget: Budget, preset: str, stem: Path) -> str:
    """Writes the comparison; returns its text."""
    target, start = target_of(runs[BASELINE], budget)
    results = {arm: [result(run, budget, target) for run in of_arm] for arm, of_arm in runs.items()}
    head = ["sampler", "reached", "rollouts to target", "of the budget", "tokens to target", "accuracy at the end, %", "seconds"]
    table = markdown_table(head, [row(arm, of_arm, results[arm]) for arm, of_arm in runs.items()])
    data = {"preset": preset, "budget": budget.amount, "unit": budget.unit, "target": target, "start": start, "grid": budget.grid.tolist(),
            "arms": {arm: [{"accuracy": r.accuracy.tolist(), "share": r.share, "rollouts": r.rollouts, "tokens": r.tokens} for r in of_arm]
                     for arm, of_arm in results.items()}}
    title = f"Samplers on {preset}: {budget}"
    every = [run for of_arm in runs.values() for run in of_arm]
    return write_results(stem, title, notes(target, start), table, data, draw(results, budget, target, title), every)


def notes(target: float, start: float) -> list[str]:
    method = [
        f"Target, chosen before any result was seen: the held-out accuracy (greedy, all bins, smoothed) that the {BASELINE} sampler has at "
        f"the end of the budget, mean over its seeds: {target:.1%}; before training it is {start:.1%}.",
        f"Accuracy is averaged backwards over {SMOOTHED:.0%} of the budget, for every sampler alike. Rollouts are responses sampled, those "
        "of groups without signal and of screening included.",
        "± is half of the 95 % t interval over seeds. `>`: some runs never reached the target; the mean counts their whole budget, so it "
        "is a lower bound.",
    ]
    no_gain = [f"The {BASELINE} sampler gained less than one point: reaching its accuracy says nothing here."] * (target < start + 0.01)
    return no_gain + method


def draw(results: Mapping[str, Sequence[Result]], budget: Budget, target: float, title: str) -> Figure:
    with rc_context(STYLE):
        figure = Figure(figsize=(9.6, 5.0), dpi=140, layout="constrained")
        axes = figure.add_subplot()
        for place, (arm, of_arm) in enumerate(results.items()):
            band(axes, budget.grid, [r.accuracy for r in of_arm], PALETTE[place % len(PALETTE)], arm)
        axes.axhline(target, color="#6b7280", lw=1, ls="--", label="target")
        axes.set(title=title, xlabel=f"{budget.unit} sampled", ylabel="held-out accuracy", xlim=(0, budget.amount))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0))
        figure.legend(loc="outside lower center", ncols=5)
    return figure


if __name__ == "__main__":
    sys.exit(main())
