"""The loop: prompts -> rollouts -> rewards -> update -> sync -> observe -> log, and what stands around it."""

from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastsched.config import GUARD, Config
from fastsched.config.arguments import config_to_yaml
from fastsched.loop.assemble import Run, assemble
from fastsched.loop.batches import train_batch
from fastsched.loop.evaluate import evaluate
from fastsched.loop.guards import Stop, require_agreement, why_stopped
from fastsched.loop.rollouts import Rollouts, ahead_state, restore_ahead, sample_rows, sync
from fastsched.record.checkpoint import agree_on, load_arrays, restore, save_checkpoint
from fastsched.record.log import record_start
from fastsched.types import Knobs, Stats


@dataclass
class Progress:
    """What the loop itself remembers between steps; part of every checkpoint."""

    step: int = 0
    tokens_total: int = 0
    prompts_total: int = 0
    responses_total: int = 0
    flat_in_row: int = 0
    unscored_in_row: int = 0
    accuracy: float | None = None  # held out, when this step was evaluated

    def complete(self, cfg: Config) -> bool:
        return cfg.train.spent(self.step, self.responses_total, self.tokens_total)


def run_training(cfg: Config, run_dir: Path, log, checkpoint: Path | None) -> int:
    """Train from `checkpoint`, or from the start; returns the exit code."""
    try:
        with closing(assemble(cfg, run_dir, log)) as run:
            return _train(run, _start(run, checkpoint))
    except RuntimeError as error:
        log.warn(why_stopped(error))
        return GUARD


def _train(run: Run, progress: Progress) -> int:
    cfg = run.cfg
    with Stop() as stopped:
        while not progress.complete(cfg) and not stopped.reason:
            _step(run, progress)
            stopped.check(run, progress.flat_in_row, progress.unscored_in_row)
            if stopped.reason or _due(progress.step, cfg.train.checkpoint_every) or progress.complete(cfg):
                _save(run, progress)
    if stopped.reason:
        run.log.warn(f"stopped after step {progress.step}: {stopped.reason}; continue with --resume")
    elif cfg.train.eval_at_ends and not _due(progress.step, cfg.train.eval_every):
        evaluate(run, progress.step)
    return stopped.code


def _start(run: Run, checkpoint: Path | None) -> Progress:
    progress, checkpoint = Progress(), agree_on(checkpoint, run.ranks)
    if checkpoint:
        state, ranks = restore(checkpoint, run.learner.engine)
        progress = Progress(**state["progress"])
        run.scheduler.load_state_dict(state["scheduler"])
        run.buffer.load(load_arrays(checkpoint))
        run.learner.load_state_dict(state["learner"])
        restore_ahead(run, state["ahead"])
        run.log.note(f"resumed {checkpoint.name}: model, optimizer, averaged policy, scheduler, sampler position, random generators; "
                     f"next is step {progress.step + 1}")
        if ranks != run.ranks.world_size:
            run.log.note(f"written by {ranks} ranks, resumed by {run.ranks.world_size}: equal up to rounding from here on")
    if run.ranks.rank == 0:
        record_start(run.run_dir, config_to_yaml(run.cfg), progress.step if checkpoint else None)
    sync(run, progress.step, run.heldout.prompt(0).token_ids if len(run.heldout) else run.train_set.prompt(0).token_ids)
    if not checkpoint and run.cfg.train.eval_at_ends:
        with run.log.phase("evaluation"):
            evaluate(run, 0)
    run.log.restart_clock()
    return progress


def _step(run: Run, progress: Progress) -> None:
    cfg, log, step = run.cfg, run.log, progress.step + 1
    rolled = train_batch(run, step)
    knobs = run.scheduler.knobs()
    require_agreement(run.ranks, knobs, rolled.outcomes, step)
    with log.phase("learn"):
        stats = run.learner.update(rolled.responses, rolled.rewards, knobs, step)
    with log.phase("sync"):
        sync(run, step, rolled.probe)
    with log.phase("control"):
        run.scheduler.observe(rolled.outcomes, stats)
    progress.accuracy = None
    if _due(step, cfg.train.eval_every):
        with log.phase("evaluation"):
            progress.accuracy = evaluate(run, step).overall
    progress.step = step
    progress.tokens_total += int(rolled.outcomes.lengths.sum())
    progress.prompts_total += rolled.outcomes.new_prompts
    progress.responses_total += int(rolled.outcomes.sampled.sum())
    signal_free = stats.flat_groups == 1.0 and knobs.entropy_coef == 0 and knobs.kl_coef == 0 and not cfg.learner.teacher
    progress.flat_in_row = progress.flat_in_row + 1 if signal_free else 0
    progress.unscored_in_row = 0 if np.isfinite(rolled.outcomes.rewards).any() else progress.unscored_in_row + 1
    log.step(_row(run, progress, knobs, stats, rolled) | rolled.columns())
    log.deciles(step, stats.deciles)
    log.samples(step, sample_rows(rolled.prompts, rolled.responses, rolled.rewards, rolled.texts))
    for message in run.scheduler.messages():
        log.note(message)


def _row(run: Run, progress: Progress, knobs: Knobs, stats: Stats, rolled: Rollouts) -> dict:
    """One row of metrics.csv; the t_ columns come from the log's phases."""
    outcomes, sampled = rolled.outcomes, rolled.outcomes.sampled
    scored = outcomes.rewards[np.isfinite(outcomes.rewards)]
    return {
        "step": progress.step, "tokens_total": progress.tokens_total, "prompts_total": progress.prompts_total,
        "reward_mean": float(scored.mean()) if scored.size else float("nan"),
        "reward_std": float(scored.std()) if scored.size else float("nan"), "reward_failures": int(sampled.sum() - scored.size),
        "r_thr": knobs.r_threshold, "lambda_h": knobs.entropy_coef, "lambda_kl": knobs.kl_coef, "ema_alpha": knobs.ema_alpha,
        "lr_scale": knobs.lr_scale, "temporal_s": knobs.temporal_s, "rule": knobs.rule, **run.scheduler.report(), **stats.columns(),
        "kl_gate": knobs.kl_gate, "reference_copied": int(knobs.copy_reference),
        "truncated": float(outcomes.truncated[sampled].mean()), "response_len_mean": float(outcomes.lengths[sampled].mean()),
        "trained_groups": rolled.trained, "buffered_groups": len(run.buffer),
        "missing_logprobs": run.rollout.missing_logprobs, "tokens_per_s": float(outcomes.lengths.sum()) / run.log.step_seconds(),
        "peak_mem_gb": run.log.peak_memory_gb(), "responses_total": progress.responses_total,
    }


def _save(run: Run, progress: Progress) -> None:
    with run.log.phase("checkpoint"):
        state = {"progress": asdict(progress), "scheduler": run.scheduler.state_dict(), "learner": run.learner.state_dict(),
                 "ahead": ahead_state(run)}
        score = {"none": None, "accuracy": progress.accuracy, "success": run.scheduler.success.ema}[run.cfg.train.keep_best]
        save_checkpoint(run.run_dir, progress.step, run.learner.engine, state, run.cfg.train.keep_checkpoints, score, run.buffer.arrays())


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
