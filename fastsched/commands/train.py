"""`fastsched train`: the run with its log and report."""

import argparse
import errno
import logging
import os
import shlex
import signal
import sys
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Iterator

from fastsched.commands.source import config_of, show, source_file, source_parser
from fastsched.config import DONE, GUARD, INTERRUPTED, Config, ConfigError, FeaturesMissing
from fastsched.config.arguments import changed_keys, config_parser, run_config
from fastsched.config.help import short_help
from fastsched.record.log import RunLog
from fastsched.record.tables import complete_lines
from fastsched.types import SAMPLER_ERRORS, EngineError

DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file grew beyond its limit",
        errno.EROFS: "the disk became read-only", errno.EIO: "the disk failed"}
REPORT_ERRORS = SAMPLER_ERRORS  # pandas and matplotlib raise as widely


def run(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        show(config_parser().format_help() if "all" in arguments else short_help())
        return DONE
    own, overrides = _parser().parse_known_args(arguments)
    source = source_file(own)
    run_dir = Path(own.run_dir or f"runs/{own.preset or Path(own.config or 'train').stem}")
    if own.resume and not source:
        source = str(run_dir / "config.yaml")
    cfg = config_of(source, overrides, resumed=own.resume)
    if own.dry_run:
        from fastsched.commands.dry_run import dry_run

        show(dry_run(cfg, run_dir))
        return DONE
    try:
        return train_and_report(cfg, run_dir, resume=own.resume)
    except FeaturesMissing as error:
        given = ["--preset", own.preset] if own.preset else ["--config", source] if source else []
        raise ConfigError(f"{error}; run `{shlex.join(['fastsched', 'cluster', *given, *overrides])}`") from error
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"fastsched: {DISK[error.errno]} ({error}); the checkpoints below {run_dir / 'checkpoints'} are untouched. Make room, then "
              "continue with --resume", file=sys.stderr)
        return GUARD


def _parser() -> argparse.ArgumentParser:
    parser = source_parser("train")
    parser.add_argument("--run_dir", "--run-dir")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    return parser


def train_and_report(cfg: Config, run_dir: Path, *, resume: bool) -> int:
    """Train and write the report; the last console line is its path. Returns the exit code."""
    from fastsched.commands.run_folder import require_run, require_writable
    from fastsched.record.lock import writing

    if resume:
        require_run(run_dir, "train --resume")
    if not resume and (run_dir / "metrics.csv").exists():
        raise ConfigError(f"{run_dir} already holds a run: use --resume to continue it, or another --run_dir")
    require_writable(run_dir)
    is_main = int(os.environ.get("RANK", 0)) == 0
    with _terminated_as_interrupted(), writing(run_dir) if is_main else nullcontext():
        return _train_and_report(cfg, run_dir, resume=resume, is_main=is_main)


@contextmanager
def _terminated_as_interrupted() -> Iterator[None]:
    """SIGTERM ends a run as Ctrl-C does, from its start until its engines are closed; inside the loop `guards.Stop` takes both."""
    former = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, former)


def _train_and_report(cfg: Config, run_dir: Path, *, resume: bool, is_main: bool) -> int:
    from fastsched.record.checkpoint import newest_intact, set_aside_newer, step_of

    damaged: list[str] = []
    checkpoint = newest_intact(run_dir, damaged.append) if resume and is_main else None
    if checkpoint:
        damaged += [f"a damaged checkpoint is set aside as {folder.name}" for folder in set_aside_newer(run_dir, checkpoint)]
    if damaged and checkpoint is None:
        raise ConfigError(f"--resume: no checkpoint below {run_dir / 'checkpoints'} is intact ({'; '.join(damaged)}). Tables and "
                          "checkpoints are as they were: bring one back, or start anew with the same --config in another --run_dir")
    resume_step = (step_of(checkpoint) if checkpoint else 0) if resume else None
    with RunLog(run_dir, cfg.log, cfg.train.steps, resume_step=resume_step, is_main=is_main, window=cfg.scheduler.window) as log:
        log.capture_output()
        if resume:
            _note_what_resumes(log, cfg, run_dir, checkpoint, damaged)
        try:
            from fastsched.train import train  # what the engines print when they are imported goes to the log

            code = train(cfg, run_dir, log, checkpoint)
        except KeyboardInterrupt:
            log.warn("interrupted; the last checkpoint is untouched")
            return INTERRUPTED
        except (ConfigError, EngineError) as error:
            log.record(f"ERROR: {error}")  # the console hears of it from the command line, and of rank 0's only
            raise
        if is_main:
            _finish(log, cfg, run_dir)
        return code


def _finish(log: RunLog, cfg: Config, run_dir: Path) -> None:
    """What was gained, and the report; whatever goes wrong here changes nothing about how the run ended."""
    if len(complete_lines(run_dir / "metrics.csv")) < 2:
        return
    try:
        _note_what_was_gained(log, run_dir)
        if cfg.log.plots:
            from fastsched.report.page import write_report

            with log.phase("writing the report"):
                log.note(str(write_report([run_dir], run_dir / "report.html")))
    except (KeyboardInterrupt, *REPORT_ERRORS) as error:
        logging.getLogger(__name__).exception("report")
        log.warn(f"no report ({type(error).__name__}: {error}); the run itself is complete: `fastsched report {run_dir}` writes it")


def _note_what_was_gained(log: RunLog, run_dir: Path) -> None:
    from fastsched.report.runs import load_run

    evals = load_run(run_dir).evals
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        log.note(f"held-out accuracy (greedy), step {first['step']} -> step {last['step']}:")
        for label, after in last["accuracy"].items():
            log.note(f"  {label:<10} {first['accuracy'].get(label, float('nan')):6.1%} -> {after:6.1%}   ({last['n'][label]} prompts)")


def _note_what_resumes(log: RunLog, cfg: Config, run_dir: Path, checkpoint: Path | None, damaged: list[str]) -> None:
    for line in damaged:
        log.warn(line)
    if checkpoint is None and log.is_main:
        log.warn(f"--resume: no complete checkpoint below {run_dir / 'checkpoints'}; starting again from step 1")
    for partial in (run_dir / "checkpoints").glob(".partial-*"):
        log.warn(f"{partial.name} was never completed and is ignored")
    for change in changed_keys(run_config(run_dir, warn=lambda line: log.warn(f"--resume: {line}")), cfg):
        log.warn(f"--resume: {change}")
