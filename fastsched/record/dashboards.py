"""TensorBoard and wandb: the numbers of a row by step, where log.tensorboard and log.wandb ask for them."""

import os
from pathlib import Path
from typing import Mapping

from fastsched.config import ConfigError, LogConfig
from fastsched.record.tables import Value


class Dashboards:
    """Those that `cfg` names, possibly none. `resume_step` N goes on after step N. ConfigError where one is not installed."""

    def __init__(self, run_dir: Path, cfg: LogConfig, resume_step: int | None):
        self._tensorboard = _open_tensorboard(run_dir, resume_step) if cfg.tensorboard else None
        self._wandb = _open_wandb(run_dir, resume_step) if cfg.wandb else None

    def write(self, row: Mapping[str, Value], prefix: str = "") -> None:
        """The numbers of `row` under `prefix`, at its `step`; NaN and text are left out."""
        numbers = {prefix + name: value for name, value in row.items()
                   if isinstance(value, (int, float)) and value == value and name != "step"}
        if self._tensorboard:
            for name, value in numbers.items():
                self._tensorboard.add_scalar(name, value, row["step"])
            self._tensorboard.flush()
        if self._wandb:
            self._wandb.log(numbers, step=row["step"])

    def close(self) -> None:
        """May be called twice."""
        if self._tensorboard:
            self._tensorboard.close()
        if self._wandb:
            self._wandb.finish()
        self._tensorboard = self._wandb = None


def _open_tensorboard(run_dir: Path, resume_step: int | None):
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(run_dir / "tensorboard"), purge_step=None if resume_step is None else resume_step + 1)


def _open_wandb(run_dir: Path, resume_step: int | None):
    try:
        import wandb
    except ImportError as error:
        raise ConfigError(f"log.wandb: {error}; `pip install wandb`, or set log.wandb to false") from error
    known = run_dir / "wandb_id.txt"
    same = {"id": known.read_text(), "resume": "allow"} if resume_step is not None and known.exists() else {}
    run = wandb.init(project=os.environ.get("WANDB_PROJECT", "fastsched"), name=run_dir.name, **same, dir=str(run_dir),
                     settings=wandb.Settings(console="off", silent=True))
    known.write_text(run.id)
    return run
