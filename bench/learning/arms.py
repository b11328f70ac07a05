"""Comparisons of training runs: one preset under several arms and seeds, each run a process of its own, kept once finished.

What is shared by `bench.learning.compare`, `bench.learning.samplers` and `bench.learning.temporal`.
"""

import argparse
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from fastsched.config import DONE, GUARD, INTERRUPTED, Config, ConfigError
from fastsched.config.arguments import changed_keys, parse_config, preset_path, run_config
from fastsched.engines.models.precision import settled
from fastsched.record.checkpoint import checkpoints, step_of
from fastsched.record.tables import complete_lines
from fastsched.report.runs import last, load_run


@dataclass(frozen=True)
class Arm:
    """What one arm adds to the command line of every run. `cluster`: `fastsched cluster` describes the prompts first."""

    options: tuple[str, ...] = ()
    cluster: bool = False


@dataclass(frozen=True)
class Comparison:
    """Folders are RUNS/NAME-ARM-seed-N; `options` hold for every arm and come before the arm's own, `overrides` after."""

    name: str
    preset: str
    arms: Mapping[str, Arm]
    seeds: Sequence[int]
    runs: Path
    options: tuple[str, ...] = ()
    overrides: tuple[str, ...] = ()

    def folder(self, arm: str, seed: int) -> Path:
        return self.runs / f"{self.name}-{arm}-seed-{seed}"

    def folders(self) -> dict[str, list[Path]]:
        return {arm: [self.folder(arm, seed) for seed in self.seeds] for arm in self.arms}

    def arguments(self, arm: str, seed: int) -> list[str]:
        return [*self.options, "--train.seed", str(seed), *self.arms[arm].options, *self.overrides]

    def config(self, arm: str, seed: int) -> Config:
        return settled(parse_config(["--config", str(preset_path(self.preset)), *self.arguments(arm, seed)]))


def chosen(arms: Mapping[str, Arm], names: Sequence[str] | None) -> dict[str, Arm]:
    """The arms of these names, in the order of `arms`; all without names. ConfigError names one that is unknown."""
    for name in names or ():
        if name not in arms:
            raise ConfigError(f"--arms: {name!r} is none of {', '.join(arms)}")
    return {name: arm for name, arm in arms.items() if not names or name in names}


def train_all(comparison: Comparison) -> None:
    """Every run that is not finished yet, the arms taking turns, so that an interrupted comparison is still one.

    ConfigError, before anything runs, for an arm that this version cannot train and for a folder that holds other settings.
    """
    plan = [(arm, seed, comparison.config(arm, seed)) for seed in comparison.seeds for arm in comparison.arms]
    for arm, seed, wanted in plan:
        check_settings(comparison.folder(arm, seed), wanted)
    for place, (arm, seed, wanted) in enumerate(plan, 1):
        print(f"== {comparison.folder(arm, seed)} ({place} of {len(plan)})", flush=True)
        train(comparison, arm, seed, wanted)


def check_settings(folder: Path, wanted: Config) -> None:
    """A folder that a run of other settings left behind must not be taken for the arm's."""
    if not (folder / "config.yaml").exists():
        return
    changes = changed_keys(run_config(folder), wanted)
    if changes:
        raise ConfigError(f"{folder} holds a run of other settings: {'; '.join(changes)}. Delete it, or use another --runs")


def train(comparison: Comparison, arm: str, seed: int, wanted: Config) -> None:
    """One run: kept when finished, resumed when interrupted. A run that a guard stopped counts as it is; other errors end all."""
    folder, arguments = comparison.folder(arm, seed), ["--preset", comparison.preset, *comparison.arguments(arm, seed)]
    if finished(folder, wanted):
        print("finished and kept; delete the folder to run it again", flush=True)
        return
    if comparison.arms[arm].cluster:
        command("cluster", *arguments)
    resume = ["--resume"] if (folder / "metrics.csv").exists() else []
    if command("train", *arguments, "--run_dir", str(folder), *resume) == GUARD:
        print(f"WARNING: a guard stopped {folder}; the comparison goes on", flush=True)


def command(*arguments: str) -> int:
    """`fastsched` in a process of its own; its exit code, 0 or that of a guard. Any other ends this process with the same.

    Ctrl-C reaches the run as well, which saves a checkpoint before it ends; this process waits for that.
    """
    process = subprocess.Popen([sys.executable, "-m", "fastsched.cli", *arguments])
    try:
        code = process.wait()
    except KeyboardInterrupt:
        process.wait()
        sys.exit(INTERRUPTED)
    if code not in (DONE, GUARD):
        sys.exit(code)
    return code


def finished(folder: Path, cfg: Config) -> bool:
    """Whether the run has taken its last step, saved it and evaluated it."""
    if len(complete_lines(folder / "metrics.csv")) < 2:
        return False
    run = load_run(folder)
    step = int(run.steps.iloc[-1])
    complete = cfg.train.spent(step, last(run, "responses_total") or 0, last(run, "tokens_total") or 0)
    evaluated = not cfg.train.eval_at_ends or any(record["step"] == step for record in run.evals)
    return complete and evaluated and any(step_of(c) == step for c in checkpoints(folder))


def parser(description: str, arms: Mapping[str, Arm]) -> argparse.ArgumentParser:
    """The options that the comparisons have in common; what it does not know are overrides for every run."""
    own = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    own.add_argument("--seeds", type=int, default=3, help="how many: 0, 1, ...")
    own.add_argument("--arms", nargs="+", metavar="ARM", help=f"of {', '.join(arms)}; all by default")
    own.add_argument("--steps", type=int, help="steps of a run")
    own.add_argument("--runs", type=Path, default=Path("runs"))
    own.add_argument("--out", type=Path, default=Path("bench/results"))
    return own
