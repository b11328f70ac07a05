"""`fastsched report`: plots and one page of one run, or several overlaid."""

from pathlib import Path
from typing import Sequence

from fastsched.config import ConfigError


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
