"""`fastsched report`: plots and one page of one run, or several overlaid."""

import argparse
from pathlib import Path
from typing import Sequence

from fastsched.config import DONE, ConfigError


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched report", description="Plots and report.html of one run, or several overlaid.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: RUN/report.html; for several runs report-overlay.html beside the first")
    parser.add_argument("--tp-score", action="store_true", help="of one run: where in a response each token occurs (arXiv 2605.25381)")
    own = parser.parse_args(arguments)
    out = own.out or (own.runs[0] / "report.html" if len(own.runs) == 1 else own.runs[0].parent / "report-overlay.html")
    print(report(own.runs, out, tp_score=own.tp_score))
    return DONE


def report(run_dirs: Sequence[Path], out: Path, *, tp_score: bool) -> Path:
    """Write the report of one run or several; returns the page's path."""
    if tp_score and len(run_dirs) > 1:
        raise ConfigError("fastsched report: --tp-score is of one run; give one run folder")
    from fastsched.report.page import write_report

    tokens = None
    if tp_score:
        from fastsched.report.tp_score import read_token_scores

        tokens = read_token_scores(run_dirs[0])
    return write_report(run_dirs, out, tokens)
