"""The run folder and the checkpoint that a command reads, and the folder that it writes."""

import os
import shutil
import sys
from pathlib import Path

from fastsched.config import ConfigError
from fastsched.config.arguments import run_config
from fastsched.record.checkpoint import best_checkpoint, damage, newest_intact


def require_run(run_dir: Path, command: str) -> None:
    if not (run_dir / "config.yaml").exists():
        raise ConfigError(f"fastsched {command}: {run_dir} holds no run (no config.yaml); give what was --run_dir of a training run")


def require_writable(run_dir: Path) -> None:
    """Make the run folder. ConfigError where it cannot be written."""
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--run_dir: {run_dir} cannot be made ({error.strerror}); give another folder") from error
    if not os.access(run_dir, os.W_OK | os.X_OK):
        raise ConfigError(f"--run_dir: {run_dir} cannot be written by this user; give another folder")


def checkpoint_for(run_dir: Path, command: str, *, best: bool) -> Path:
    """The newest intact checkpoint, or the best one by train.keep_best."""
    say = lambda line: print(f"fastsched {command}: {line}", file=sys.stderr)
    require_run(run_dir, command)
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


def export_checkpoint(run_dir: Path, checkpoint: Path, out: Path, *, average: bool) -> Path:
    """Write a checkpoint's policy, or its average, as a folder that transformers and vLLM load; `out` is empty or not there.

    The checkpoint is known to be intact.
    """
    from fastsched.loop.prepare import prepare_model

    cfg = run_config(run_dir)
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
