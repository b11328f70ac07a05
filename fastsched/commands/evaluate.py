"""`fastsched eval`: greedy held-out accuracy of a checkpoint."""

import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fastsched.commands.export import export_checkpoint
from fastsched.commands.run_folder import checkpoint_for
from fastsched.config import DONE, RolloutConfig
from fastsched.config.arguments import run_config
from fastsched.record.checkpoint import step_of
from fastsched.record.log import RunLog


def in_one_process(cfg: RolloutConfig) -> RolloutConfig:
    """For eval, where there is no launcher, nothing is trained, and running servers hold other weights than the checkpoint's."""
    return replace(cfg, servers=(), ahead=0, tensor_parallel=1, sleep=False)


def evaluate_run(run_dir: Path, *, average: bool, best: bool = False) -> int:
    """Greedy held-out accuracy of the last (`best`: the best) checkpoint, printed by bin; nothing in the run folder changes."""
    checkpoint = checkpoint_for(run_dir, "eval", best=best)
    cfg = run_config(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        model = export_checkpoint(run_dir, checkpoint, Path(folder) / "model", average=average)
        cfg = replace(cfg, model=replace(cfg.model, name=str(model)), log=replace(cfg.log, tensorboard=False, wandb=False),
                      rollout=in_one_process(cfg.rollout))
        with RunLog(Path(folder) / "log", cfg.log, cfg.train.steps) as log:
            log.capture_output()
            from fastsched.loop.assemble import assemble
            from fastsched.loop.evaluate import evaluate

            with closing(assemble(cfg, Path(folder), log, learn=False)) as run:
                evaluate(run, step_of(checkpoint))
    return DONE
