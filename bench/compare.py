"""`make compare`: the adaptive scheduler against fixed weights, several seeds each, overlaid in one report.

    python -m bench.compare --preset tiny-cpu --seeds 0 1 2
"""

import argparse
import subprocess
import sys
from pathlib import Path

import numpy as np

from fastsched.checkpoint import checkpoints, step_of
from fastsched.report import write_report
from fastsched.runs import SETTLED, in_window_share, load_run

ARMS = {
    "adaptive": ["--scheduler.kind", "adaptive"],
    "fixed": ["--scheduler.kind", "fixed", "--scheduler.coefficients", "constant"],
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", default="tiny-cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    own, overrides = parser.parse_known_args()
    folders = {arm: [own.runs / f"compare-{arm}-seed-{seed}" for seed in own.seeds] for arm in ARMS}
    for seed in own.seeds:  # arms interleaved, so that an interrupted comparison is still one
        for arm, options in ARMS.items():
            run(own.preset, own.runs / f"compare-{arm}-seed-{seed}", ["--train.seed", str(seed), *options, *overrides])
    print(table(folders))
    print(write_report([f for arm in folders.values() for f in arm], own.runs / "compare.html"))
    return 0


def run(preset: str, folder: Path, options: list[str]) -> None:
    """One training run in a process of its own; a finished run is kept, an interrupted one resumed."""
    command = [sys.executable, "-m", "fastsched.cli", "train", "--preset", preset, "--run_dir", str(folder), *options]
    if (folder / "metrics.csv").exists():
        steps = load_run(folder).config["train.steps"]
        if any(step_of(c) == steps for c in checkpoints(folder)):
            print(f"{folder} is finished and kept; delete it to run again", flush=True)
            return
        command.append("--resume")
    print(f"== {folder}", flush=True)
    done = subprocess.run(command)
    if done.returncode:
        sys.exit(done.returncode)


def table(folders: dict[str, list[Path]]) -> str:
    lines = [f"{'run':28} {'in window':>9} {'of steps':>8} {'success':>8} {'lambda_H':>18} {'lambda_KL':>18}  rules that fired"]
    for arm, paths in folders.items():
        shares = []
        for run in map(load_run, paths):
            share, steps = in_window_share(run)
            shares.append(share if share is not None else float("nan"))
            moved = [f"{run.column(c).iloc[0]:.4g} -> {run.column(c).iloc[-1]:.4g}" for c in ("lambda_h", "lambda_kl")]
            rules = sorted({r for cell in run.metrics["rule"].dropna() for r in cell.split("+")})
            lines.append(f"{run.name:28} {shares[-1]:9.1%} {steps:8d} {run.column('success_ema').iloc[-1]:8.3f} "
                         f"{moved[0]:>18} {moved[1]:>18}  {', '.join(rules)}")
        lines.append(f"{arm:28} {np.nanmean(shares):9.1%} mean share of reachable steps after step {SETTLED} "
                     "with the success EMA in the window")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
