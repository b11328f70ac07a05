"""What the commands do, below argument parsing: train with its log and report, eval, export."""

import errno
import logging
import os
import shutil
import sys
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Sequence

from fastsched.arguments import changed_keys, parse_config
from fastsched.checkpoint import best_checkpoint, damage, newest_intact, step_of
from fastsched.config import DONE, GUARD, INTERRUPTED, Config, ConfigError, RolloutConfig
from fastsched.log import RunLog
from fastsched.records import complete_lines
from fastsched.types import SAMPLER_ERRORS, EngineError

DISK = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the disk quota is used up", errno.EFBIG: "a file grew beyond its limit",
        errno.EROFS: "the disk became read-only", errno.EIO: "the disk failed"}
REPORT_ERRORS = SAMPLER_ERRORS  # pandas and matplotlib raise as widely


def train(cfg: Config, run_dir: Path, *, resume: bool) -> int:
    """Train and write the report; the last console line is its path. Returns the exit code."""
    try:
        return _train(cfg, run_dir, resume=resume)
    except OSError as error:
        if error.errno not in DISK:
            raise
        print(f"fastsched: {DISK[error.errno]} ({error}); the checkpoints below {run_dir / 'checkpoints'} are untouched. Make room, then "
              "continue with --resume", file=sys.stderr)
        return GUARD


def _train(cfg: Config, run_dir: Path, *, resume: bool) -> int:
    is_main = int(os.environ.get("RANK", 0)) == 0
    if resume:
        _require_run(run_dir, "train --resume")
    damaged: list[str] = []
    checkpoint = newest_intact(run_dir, damaged.append) if resume and is_main else None
    if not resume and (run_dir / "metrics.csv").exists():
        raise ConfigError(f"{run_dir} already holds a run: use --resume to continue it, or another --run_dir")
    _require_writable(run_dir)
    resume_step = (step_of(checkpoint) if checkpoint else 0) if resume else None
    with RunLog(run_dir, cfg.log, cfg.train.steps, resume_step=resume_step, is_main=is_main, window=cfg.scheduler.window) as log:
        log.capture_output()
        if resume:
            _say_what_resumes(log, cfg, run_dir, checkpoint, damaged)
        try:
            from fastsched.train import run_training

            code = run_training(cfg, run_dir, log, checkpoint)
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
        _say_what_was_gained(log, run_dir)
        if cfg.log.plots:
            from fastsched.report import write_report

            with log.phase("writing the report"):
                log.note(str(write_report([run_dir], run_dir / "report.html")))
    except (KeyboardInterrupt, *REPORT_ERRORS) as error:
        logging.getLogger(__name__).exception("report")
        log.warn(f"no report ({type(error).__name__}: {error}); the run itself is complete: `fastsched report {run_dir}` writes it")


def _say_what_was_gained(log: RunLog, run_dir: Path) -> None:
    from fastsched.runs import load_run

    evals = load_run(run_dir).evals
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        log.note(f"held-out accuracy (greedy), step {first['step']} -> step {last['step']}:")
        for label, after in last["accuracy"].items():
            log.note(f"  {label:<10} {first['accuracy'].get(label, float('nan')):6.1%} -> {after:6.1%}   ({last['n'][label]} prompts)")


def _require_run(run_dir: Path, command: str) -> None:
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"fastsched {command}: {run_dir} holds no run (no config.yaml); give what was --run_dir of a training run")


def _require_writable(run_dir: Path) -> None:
    """Make the run folder. ConfigError where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run_dir: {run_dir} cannot be made ({error.strerror}); give another folder") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"--run_dir: {run_dir} cannot be written by this user; give another folder")


def _say_what_resumes(log: RunLog, cfg: Config, run_dir: Path, checkpoint: Path | None, damaged: list[str]) -> None:
    for line in damaged:
        log.warn(line)
    if checkpoint is None and log.is_main:
        log.warn(f"--resume: no complete checkpoint below {run_dir / 'checkpoints'}; starting again from step 1")
    for partial in (run_dir / "checkpoints").glob(".partial-*"):
        log.warn(f"{partial.name} was never completed and is ignored")
    for change in changed_keys(parse_config(["--config", str(run_dir / "config.yaml")]), cfg):
        log.warn(f"--resume: {change}")


def checkpoint_for(run_dir: Path, command: str, *, best: bool) -> Path:
    """The newest intact checkpoint, or the best one by train.keep_best."""
    say = lambda line: print(f"fastsched {command}: {line}", file=sys.stderr)
    _require_run(run_dir, command)
    checkpoint = best_checkpoint(run_dir) if best else newest_intact(run_dir, say)
    if checkpoint is None:
        what = "scored checkpoint (train.keep_best, train.eval_every)" if best else "complete checkpoint"
        raise ConfigError(f"fastsched {command}: no {what} below {run_dir / 'checkpoints'}")
    if best and (problem := damage(checkpoint)):
        raise ConfigError(f"fastsched {command}: the best checkpoint, {checkpoint.name}, is damaged ({problem}); leave out --best")
    return checkpoint


def require_empty(out: Path) -> None:
    """ConfigError for an --out that is no folder, or one that holds something."""
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: {out} is {'not empty' if out.is_dir() else 'a file'}; give a folder that is empty or does not exist yet")


def export_run(run_dir: Path, out: Path, *, average: bool, best: bool = False) -> Path:
    """Write the last (`best`: the best) checkpoint's policy, or its average, as a folder that transformers and vLLM load."""
    require_empty(out)
    return export_checkpoint(run_dir, checkpoint_for(run_dir, "export", best=best), out, average=average)


def export_checkpoint(run_dir: Path, checkpoint: Path, out: Path, *, average: bool) -> Path:
    """The same of one checkpoint, which is known to be intact, into a folder that is empty or not there."""
    from fastsched.prepare import prepare_model

    cfg = parse_config(["--config", str(run_dir / "config.yaml")])
    model_path = prepare_model(cfg)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror}); give another folder") from error
    for file in model_path.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt") and file.name != "model.safetensors.index.json":
            shutil.copy(file, out)
    if average:
        _write_average(checkpoint / "average.safetensors", out / "model.safetensors", cfg.model.dtype)
    else:
        shutil.copy(checkpoint / "policy.safetensors", out / "model.safetensors")
    return out


def _write_average(source: Path, target: Path, dtype: str) -> None:
    """The averaged policy, fp32 in a checkpoint, in the model's dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    save_file({name: w.to(getattr(torch, dtype)) for name, w in load_file(source).items()}, target, metadata={"format": "pt"})


def report(run_dirs: Sequence[Path], out: Path, *, tp_score: bool) -> Path:
    """Write the report of one run or several; returns the page's path."""
    if tp_score and len(run_dirs) > 1:
        raise ConfigError("fastsched report: --tp-score is of one run; give one run folder")
    from fastsched.report import write_report

    tokens = None
    if tp_score:
        from fastsched.tp_score import read_token_scores

        tokens = read_token_scores(run_dirs[0])
    return write_report(run_dirs, out, tokens)


def in_one_process(cfg: RolloutConfig) -> RolloutConfig:
    """For eval, where there is no launcher, nothing is trained, and running servers hold other weights than the checkpoint's."""
    return replace(cfg, servers=(), ahead=0, tensor_parallel=1, sleep=False)


def evaluate_run(run_dir: Path, *, average: bool, best: bool = False) -> int:
    """Greedy held-out accuracy of the last (`best`: the best) checkpoint, printed by bin; nothing in the run folder changes."""
    checkpoint = checkpoint_for(run_dir, "eval", best=best)
    cfg = parse_config(["--config", str(run_dir / "config.yaml")])
    with tempfile.TemporaryDirectory() as folder:
        model = export_checkpoint(run_dir, checkpoint, Path(folder) / "model", average=average)
        cfg = replace(cfg, model=replace(cfg.model, name=str(model)), log=replace(cfg.log, tensorboard=False, wandb=False),
                      rollout=in_one_process(cfg.rollout))
        with RunLog(Path(folder) / "log", cfg.log, cfg.train.steps) as log:
            log.capture_output()
            from fastsched.assemble import assemble
            from fastsched.evaluate import evaluate

            with closing(assemble(cfg, Path(folder), log, learn=False)) as run:
                evaluate(run, step_of(checkpoint))
    return DONE
