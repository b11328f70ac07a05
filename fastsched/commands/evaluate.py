"""`fastsched eval`: greedy held-out accuracy of a checkpoint."""

import argparse
import tempfile
from dataclasses import replace
from pathlib import Path

from fastsched.commands.run_folder import checkpoint_for, export_checkpoint
from fastsched.config import DONE, RolloutConfig
from fastsched.config.arguments import run_config
from fastsched.record.checkpoint import step_of
from fastsched.record.log import RunLog


def run(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched eval", description="Greedy held-out accuracy by bin of a run's last checkpoint.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--best", action="store_true", help="the best checkpoint (train.keep_best) instead of the last")
    own = parser.parse_args(arguments)
    evaluate_run(own.run, average=own.average, best=own.best)
    return DONE


def in_one_process(cfg: RolloutConfig) -> RolloutConfig:
    """For eval, where there is no launcher, nothing is trained, and running servers hold other weights than the checkpoint's."""
    return replace(cfg, servers=(), ahead=0, tensor_parallel=1, sleep=False)


def evaluate_run(run_dir: Path, *, average: bool, best: bool = False) -> None:
    """Greedy held-out accuracy of the last (`best`: the best) checkpoint, printed by bin; nothing in the run folder changes."""
    checkpoint = checkpoint_for(run_dir, "eval", best=best)
    cfg = run_config(run_dir)
    with tempfile.TemporaryDirectory() as folder:
        model = export_checkpoint(run_dir, checkpoint, Path(folder) / "model", average=average)
        cfg = replace(cfg, model=replace(cfg.model, name=str(model)), log=replace(cfg.log, tensorboard=False, wandb=False),
                      rollout=in_one_process(cfg.rollout))
        with RunLog(Path(folder) / "log", cfg.log, cfg.train.steps) as log:
            log.capture_output()
            from fastsched.loop.assemble import assemble_evaluation

            with assemble_evaluation(cfg, Path(folder), log) as evaluator:
                evaluator.evaluate(step_of(checkpoint))
