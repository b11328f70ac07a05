"""What the commands do, below argument parsing: train with its log and report, eval, export."""

import os
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from fastsched.arguments import changed_keys, parse_config
from fastsched.checkpoint import checkpoints, step_of
from fastsched.config import Config, ConfigError, RolloutConfig
from fastsched.log import RunLog

INTERRUPTED = 130


def train(cfg: Config, run_dir: Path, *, resume: bool) -> int:
    """Train and write the report; the last console line is its path. Returns the exit code."""
    is_main = int(os.environ.get("RANK", 0)) == 0
    checkpoint = _resume_point(run_dir) if resume else None
    if not resume and (run_dir / "metrics.csv").exists():
        raise ConfigError(f"{run_dir} already holds a run: use --resume to continue it, or another --run_dir")
    resume_step = (step_of(checkpoint) if checkpoint else 0) if resume else None
    with RunLog(run_dir, cfg.log, cfg.train.steps, resume_step=resume_step, is_main=is_main, window=cfg.scheduler.window) as log:
        log.capture_output()
        if resume:
            _say_what_resumes(log, cfg, run_dir, checkpoint)
        try:
            from fastsched.train import run_training

            code = run_training(cfg, run_dir, log, checkpoint)
        except KeyboardInterrupt:
            log.warn("interrupted; the last checkpoint is untouched")
            return INTERRUPTED
        if is_main:
            _finish(log, cfg, run_dir)
        return code


def _finish(log: RunLog, cfg: Config, run_dir: Path) -> None:
    from fastsched.report import write_report
    from fastsched.runs import load_run

    evals = load_run(run_dir).evals
    if len(evals) > 1:
        first, last = evals[0], evals[-1]
        log.note(f"held-out accuracy (greedy), step {first['step']} -> step {last['step']}:")
        for label, after in last["accuracy"].items():
            log.note(f"  {label:<10} {first['accuracy'].get(label, float('nan')):6.1%} -> {after:6.1%}   ({last['n'][label]} prompts)")
    if cfg.log.plots:
        with log.phase("writing the report"):
            log.note(str(write_report([run_dir], run_dir / "report.html")))


def _resume_point(run_dir: Path) -> Path | None:
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"--resume: {run_dir} holds no run; start one without --resume")
    found = checkpoints(run_dir)
    return found[-1] if found else None


def _say_what_resumes(log: RunLog, cfg: Config, run_dir: Path, checkpoint: Path | None) -> None:
    if checkpoint is None:
        log.warn(f"--resume: no complete checkpoint below {run_dir / 'checkpoints'}; starting again from step 1")
    for partial in (run_dir / "checkpoints").glob(".partial-*"):
        log.warn(f"{partial.name} was never completed and is ignored")
    for change in changed_keys(parse_config(["--config", str(run_dir / "config.yaml")]), cfg):
        log.warn(f"--resume: {change}")


def _last_checkpoint(run_dir: Path, command: str) -> Path:
    checkpoint = _resume_point(run_dir)
    if checkpoint is None:
        raise ConfigError(f"fastsched {command}: no complete checkpoint below {run_dir / 'checkpoints'}")
    return checkpoint


def export_run(run_dir: Path, out: Path, *, average: bool) -> Path:
    """Write the last checkpoint's policy, or its average, in Hugging Face layout; transformers and vLLM load the folder."""
    checkpoint = _last_checkpoint(run_dir, "export")
    if out.exists() and any(out.iterdir()):
        raise ConfigError(f"--out: {out} is not empty")
    from fastsched.prepare import prepare_model

    model_path = prepare_model(parse_config(["--config", str(run_dir / "config.yaml")]))
    out.mkdir(parents=True, exist_ok=True)
    for file in model_path.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt") and file.name != "model.safetensors.index.json":
            shutil.copy(file, out)
    shutil.copy(checkpoint / f"{'average' if average else 'policy'}.safetensors", out / "model.safetensors")
    return out


def in_one_process(cfg: RolloutConfig) -> RolloutConfig:
    """For eval, where there is no launcher, nothing is trained, and running servers hold other weights than the checkpoint's."""
    return replace(cfg, servers=(), ahead=0, tensor_parallel=1, sleep=False)


def evaluate_run(run_dir: Path, *, average: bool) -> int:
    """Greedy held-out accuracy of the last checkpoint, printed by bin; nothing in the run folder changes."""
    cfg = parse_config(["--config", str(run_dir / "config.yaml")]) if (run_dir / "config.yaml").exists() else Config()
    step = step_of(_last_checkpoint(run_dir, "eval"))
    with tempfile.TemporaryDirectory() as folder:
        model = export_run(run_dir, Path(folder) / "model", average=average)
        cfg = replace(cfg, model=replace(cfg.model, name=str(model)), log=replace(cfg.log, tensorboard=False, wandb=False),
                      rollout=in_one_process(cfg.rollout))
        with RunLog(Path(folder) / "log", cfg.log, cfg.train.steps) as log:
            log.capture_output()
            from fastsched.assemble import assemble
            from fastsched.evaluate import evaluate

            run = assemble(cfg, Path(folder), log, learn=False)
            try:
                evaluate(run, step)
            finally:
                run.close()
    return 0
