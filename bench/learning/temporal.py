"""Schedules along the trajectory compared in real training runs on chain-of-steps arithmetic.

    python -m bench.learning.temporal --preset chain-tiny --seeds 3

GRPO on every token against TP-Schedule (the end of each response first, arXiv 2605.25381) with four lengths of the schedule,
and against the same schedule over the tokens of highest entropy, over any tokens, and over the beginning. Another preset
is trained on the task of chain-tiny. Writes bench/results/temporal.{md,json,png}. Finished runs are kept and interrupted
ones resumed: run it again to go on.
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib import rc_context
from matplotlib.figure import Figure

from bench.learning.arms import Arm, Comparison, chosen, parser, train_all
from bench.learning.summary import band, estimate, markdown_table, write_results
from fastsched.config import BAD_INPUT, ConfigError, require
from fastsched.config.arguments import parse_config, preset_path
from fastsched.report.axes import COLOURS, STYLE
from fastsched.report.runs import Run, load_run, mean_accuracy

STEPS = 50
BASELINE = "grpo"


def schedule(proxy: str, end: float) -> Arm:
    return Arm(("--scheduler.temporal.mode", "linear", "--scheduler.temporal.proxy", proxy, "--scheduler.temporal.end", str(end)))


ARMS = {
    BASELINE: Arm(("--scheduler.temporal.mode", "none")),
    "tp-0.4": schedule("suffix", 0.4),
    "tp-0.6": schedule("suffix", 0.6),
    "tp-0.8": schedule("suffix", 0.8),
    "tp-1.0": schedule("suffix", 1.0),
    "entropy": schedule("entropy", 0.8),
    "random": schedule("random", 0.8),
    "prefix": schedule("prefix", 0.8),
}
"""The name says what carries the loss; a number is epsilon, the share of all steps after which every token does."""
CHAIN = {
    "data.task": "chain", "data.negative": "false", "data.max_prompt_tokens": 64, "rollout.max_new_tokens": 80,
    "learner.micro_batch_tokens": 2048, "train.prompts_per_step": 16,
    "learner.lr": 3.0e-4, "learner.warmup_steps": 5, "model.warm_start_accuracy": 0.7,
}
# As published: neither entropy nor KL term, so that what differs is the schedule; and prompts drawn without a controller.
PLAIN = {
    "scheduler.kind": "uniform", "scheduler.coefficients": "constant", "learner.kl": "none", "learner.cooldown": 0,
    "learner.skip_flat_groups": "false",  # entropy and shares are of all tokens, for every arm alike
    **{f"scheduler.{term}.{bound}": 0 for term in ("entropy", "kl") for bound in ("start", "floor", "ceiling")},
}
FIRST, LAST = 3, 0.1
"""Entropy before is the mean over the baseline's first FIRST steps of the same seed, entropy after over the LAST share of steps."""


def main(arguments: Sequence[str] | None = None) -> int:
    own_parser = parser(__doc__, ARMS)
    own_parser.add_argument("--preset", default="chain-tiny")
    own, overrides = own_parser.parse_known_args(arguments)
    try:
        arms = chosen(ARMS, own.arms)
        require(BASELINE in arms, f"--arms: {BASELINE} is needed, since the others are measured against it")
        comparison = Comparison(f"temporal-{own.preset}", own.preset, arms, range(own.seeds), own.runs,
                                fixed_options(own.preset, own.steps or STEPS), tuple(overrides))
        train_all(comparison)
        runs = {arm: [load_run(folder) for folder in folders] for arm, folders in comparison.folders().items()}
        print(report(runs, own.preset, own.out / "temporal"))
    except ConfigError as error:
        print(f"bench.learning.temporal: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def fixed_options(preset: str, steps: int) -> tuple[str, ...]:
    """Options of every arm: the task where the preset has another, and what must not differ."""
    other = parse_config(["--config", str(preset_path(preset))]).data.task != "chain"
    options = {**(CHAIN if other else {}), **PLAIN, "train.steps": steps, "train.eval_every": max(1, steps // 10),
               "train.checkpoint_every": max(1, steps // 4), "train.keep_checkpoints": 1, "data.eval_per_bin": 128,
               "log.plots": "false", "log.tensorboard": "false"}
    return tuple(part for key, value in options.items() for part in (f"--{key}", str(value)))


def measures(run: Run, baseline: Run) -> dict[str, float]:
    """The figures of one run; `baseline` is that of the same seed."""
    tail = max(1, round(LAST * len(run.steps)))
    after = run.column("entropy").iloc[-tail:].mean()
    norms = run.column("grad_norm")
    return {
        "accuracy": mean_accuracy(run.evals[-1]), "gain": mean_accuracy(run.evals[-1]) - mean_accuracy(run.evals[0]),
        "mean accuracy": float(np.mean([mean_accuracy(record) for record in run.evals])),
        "entropy kept": after / baseline.column("entropy").iloc[:FIRST].mean(),
        "entropy of baseline": after / baseline.column("entropy").iloc[-tail:].mean(),
        "norm mean": norms.mean(), "norm max": norms.max(), "kept tokens": run.column("kept_fraction").mean(),
        "learner seconds": run.column("t_learn").sum(), "steps": float(len(run.steps)),
    }


SHOWN = {
    "accuracy": ("accuracy, %", ".1f", 100), "gain": ("gain, points", "+.1f", 100), "mean accuracy": ("mean accuracy, %", ".1f", 100),
    "entropy kept": ("entropy, last / first", ".2f"), "entropy of baseline": (f"entropy / {BASELINE}'s", ".2f"),
    "norm mean": ("gradient norm, mean", ".3g"), "norm max": ("max", ".3g"), "kept tokens": ("tokens in the loss", ".2f"),
    "learner seconds": ("learner, s", ".1f"), "steps": ("steps", ".0f"),
}
"""Column title, number format and scale of each measure."""


def report(runs: Mapping[str, Sequence[Run]], preset: str, stem: Path) -> str:
    """Writes the comparison; returns its text."""
    found = {arm: [measures(run, base) for run, base in zip(of_arm, runs[BASELINE], strict=True)] for arm, of_arm in runs.items()}
    rows = [[arm, *(estimate([m[key] for m in of_arm]).text(*form) for key, (_, *form) in SHOWN.items())] for arm, of_arm in found.items()]
    table = markdown_table(["arm", *(title for title, *_ in SHOWN.values())], rows)
    title = f"Schedules along the trajectory, {preset}, {len(runs[BASELINE])} seeds"
    every = [run for of_arm in runs.values() for run in of_arm]
    return write_results(stem, title, notes(every), table, {"preset": preset, "arms": found}, draw(runs), every)


def notes(runs: Sequence[Run]) -> list[str]:
    lengths = [run.column("response_len_mean").iloc[0] for run in runs]
    return [
        f"`{BASELINE}`: the loss on every token. `tp-E`: TP-Schedule, the end of each response first, all of it after the share E of the "
        "steps. `entropy`, `random`, `prefix`: the same schedule with E = 0.8 over the tokens of highest entropy, any tokens, or the "
        "beginning.",
        f"Chain-of-steps arithmetic, responses of {np.mean(lengths):.0f} tokens at the start; no entropy or KL term, prompts drawn evenly. "
        "Accuracy is greedy, held out, over all bins: after training, and the mean over ten evaluations on the way.",
        f"Entropy: the mean over the last {LAST:.0%} of steps, where every token is in the loss except under tp-1.0, against the first "
        f"{FIRST} steps of {BASELINE} with the same seed, and against the last of it.",
        "Learner: seconds in forward, backward and optimizer over the whole run. ± is half of the 95 % t interval over seeds. Fewer steps "
        "than the others: a guard stopped runs.",
    ]


PANELS = {"entropy": "entropy, nats", "grad_norm": "gradient norm", "success_ema": "success", "kept_fraction": "tokens in the loss"}


def draw(runs: Mapping[str, Sequence[Run]]) -> Figure:
    with rc_context(STYLE):
        figure = Figure(figsize=(11.5, 7.2), dpi=140, layout="constrained")
        for place, (column, label) in enumerate(PANELS.items(), 1):
            axes = figure.add_subplot(2, 2, place)
            for colour, (arm, of_arm) in zip(COLOURS, runs.items(), strict=False):
                steps = max((run.steps for run in of_arm), key=len).to_numpy()
                curves = [np.interp(steps, run.steps, smooth(run, column), right=np.nan) for run in of_arm]
                band(axes, steps, curves, colour, arm)
            axes.set(title=label, xlabel="step")
        figure.legend(*axes.get_legend_handles_labels(), loc="outside lower center", ncols=len(runs))
    return figure


def smooth(run: Run, column: str) -> np.ndarray:
    return run.column(column).rolling(max(1, len(run.steps) // 12), center=True, min_periods=1).mean().to_numpy()


if __name__ == "__main__":
    sys.exit(main())
