"""`make compare`: the adaptive scheduler against fixed weights, several seeds each, overlaid in one report.

Weights that suit the policy as it starts, and stay: FIXED lets the shipped policy of `tiny-cpu` begin inside the success window, below
its upper edge (84, 62, 28 and 0 % of sampled answers right, 58 % of the batch). Learning one to three digits can only raise that, and
93, 70 and 30 % are outside already, so fixed weights leave the window on any machine; four digits stay unsolved, so that the window
can be reached at every step.

    python -m bench.learning.compare --preset tiny-cpu --seeds 0 1 2
    python -m bench.learning.compare --preset tiny-cpu --window 0.35 0.65 --window 0.40 0.60
"""

import argparse
import sys
from pathlib import Path

import numpy as np

from bench.learning.arms import Arm, Comparison, train_all
from fastsched.config import BAD_INPUT, ConfigError
from fastsched.report.page import write_report
from fastsched.report.runs import SETTLED, in_window_share, load_run

FIXED = ("0.35", "0.35", "0.25", "0.05")  # of one, two, three and four digits
ARMS = {
    "adaptive": Arm(("--scheduler.kind", "adaptive")),
    "fixed": Arm(("--scheduler.kind", "fixed", "--scheduler.fixed_weights", *FIXED, "--scheduler.coefficients", "constant")),
}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--preset", default="tiny-cpu")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--window", nargs=2, action="append", metavar=("LOW", "HIGH"),
                        help="success windows to compare under the adaptive scheduler, instead of adaptive against fixed")
    parser.add_argument("--runs", type=Path, default=Path("runs"))
    own, overrides = parser.parse_known_args(arguments)
    arms = window_arms(own.window) if own.window else ARMS
    comparison = Comparison("compare", own.preset, arms, own.seeds, own.runs, overrides=tuple(overrides))
    try:
        train_all(comparison)
        folders = comparison.folders()
        print(table(folders))
        page = "compare-windows.html" if own.window else "compare.html"
        print(write_report([f for arm in folders.values() for f in arm], own.runs / page))
    except ConfigError as error:
        print(f"bench.learning.compare: {error}", file=sys.stderr)
        return BAD_INPUT
    return 0


def window_arms(windows: list[list[str]]) -> dict[str, Arm]:
    """One arm for each success window, named by it."""
    return {f"window-{low}-{high}": Arm(("--scheduler.kind", "adaptive", "--scheduler.window", low, high)) for low, high in windows}


def table(folders: dict[str, list[Path]]) -> str:
    lines = [f"{'run':28} {'in window':>9} {'of steps':>8} {'success':>16} {'lambda_H':>18} {'lambda_KL':>18}  rules that fired"]
    for arm, paths in folders.items():
        shares = []
        for run in map(load_run, paths):
            share, steps = in_window_share(run)
            shares.append(share if share is not None else float("nan"))
            success = run.column("success_ema")
            moved = [f"{run.column(c).iloc[0]:.4g} -> {run.column(c).iloc[-1]:.4g}" for c in ("lambda_h", "lambda_kl")]
            rules = sorted({r for cell in run.metrics["rule"].dropna() for r in cell.split("+")})
            lines.append(f"{run.name:28} {shares[-1]:9.1%} {steps:8d} "
                         f"{f'{success.iloc[0]:.3f} -> {success.iloc[-1]:.3f}':>16} "
                         f"{moved[0]:>18} {moved[1]:>18}  {', '.join(rules)}")
        lines.append(f"{arm:28} {np.nanmean(shares):9.1%} mean share of reachable steps after step {SETTLED} "
                     "with the success EMA in the window")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
