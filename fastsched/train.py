"""The loop: prompts -> rollouts -> rewards -> update -> sync -> observe -> log, and what stands around it."""

from dataclasses import asdict
from pathlib import Path

import numpy as np

from fastsched.config import GUARD, Config
from fastsched.config.arguments import config_to_yaml
from fastsched.loop.assemble import Training, assemble_training
from fastsched.loop.batches import train_batch
from fastsched.loop.guards import Stop, require_agreement, why_stopped
from fastsched.loop.heap import give_back_freed_memory
from fastsched.loop.progress import Progress
from fastsched.loop.rollouts import Rollouts, mean_of_scored, sample_rows
from fastsched.loop.sync import sync
from fastsched.record.checkpoint import agree_on, load_arrays, restore, save_checkpoint
from fastsched.record.environment import record_start
from fastsched.record.log import RunLog
from fastsched.types import Knobs, Stats


def train(cfg: Config, run_dir: Path, log: RunLog, checkpoint: Path | None) -> int:
    """Train from `checkpoint`, or from the start, to the last step or the first guard; returns the exit code."""
    try:
        with assemble_training(cfg, run_dir, log) as run:
            progress = start(run, checkpoint)
            with Stop(cfg, run.ranks) as stop:
                try:
                    take_steps(run, progress, stop)
                except RuntimeError as error:
                    return stop.failed(error, log.warn)
            if stop.reason:
                log.warn(f"stopped after step {progress.step}: {stop.reason}; continue with --resume")
            elif cfg.train.eval_at_ends and not due(progress.step, cfg.train.eval_every):
                run.evaluator.evaluate(progress.step)
            return stop.code
    except RuntimeError as error:
        log.warn(why_stopped(error))
        return GUARD


def take_steps(run: Training, progress: Progress, stop: Stop) -> None:
    while not progress.complete(run.cfg) and not stop.reason:
        take_step(run, progress)
        stop.check(progress.flat_in_row, progress.unscored_in_row, run.source.scorer.failure)
        if stop.reason or due(progress.step, run.cfg.train.checkpoint_every) or progress.complete(run.cfg):
            save(run, progress)


def take_step(run: Training, progress: Progress) -> None:
    """One batch, from prompts to a row of metrics.csv."""
    cfg, log, step = run.cfg, run.log, progress.step + 1
    rolled = train_batch(run.source, run.buffer, step)  # prompts, responses and rewards
    knobs = run.scheduler.knobs()
    require_agreement(run.ranks, knobs, rolled.outcomes, step)
    with log.phase("learn"):
        stats = run.learner.update(rolled.responses, rolled.rewards, knobs, step)
        give_back_freed_memory(step)
    with log.phase("sync"):
        run.source.wait()
        sync(cfg, run.learner, run.rollout, step, rolled.probe)
    with log.phase("control"):
        run.scheduler.observe(rolled.outcomes, stats)
    progress.accuracy = None
    if due(step, cfg.train.eval_every):
        with log.phase("evaluation"):
            progress.accuracy = run.evaluator.evaluate(step).overall
    progress.count(rolled.outcomes, signal_free=is_signal_free(cfg, knobs, stats))
    log.step(metrics_row(run, progress, rolled, knobs, stats))
    log.deciles(step, stats.deciles)
    log.samples(step, sample_rows(rolled))
    for message in run.scheduler.messages():
        log.note(message)


def start(run: Training, checkpoint: Path | None) -> Progress:
    """Where the run stands: at step 0, or where `checkpoint` left it. The sampler gets the learner's weights."""
    cfg, log, evaluator = run.cfg, run.log, run.evaluator
    checkpoint = agree_on(checkpoint, run.ranks)
    progress = resume(run, checkpoint) if checkpoint else Progress()
    if run.ranks.rank == 0:
        record_start(run.run_dir, config_to_yaml(cfg), progress.step if checkpoint else None)
    prompts = evaluator.heldout if len(evaluator.heldout) else run.source.train_set
    sync(cfg, run.learner, run.rollout, progress.step, prompts.prompt(0).token_ids)
    if not checkpoint and cfg.train.eval_at_ends:
        with log.phase("evaluation"):
            evaluator.evaluate(0)
    log.restart_clock()
    return progress


def resume(run: Training, checkpoint: Path) -> Progress:
    """Give every part the state that `save` wrote."""
    state, ranks = restore(checkpoint, run.learner.engine)
    progress = Progress(**state["progress"])
    run.scheduler.load_state_dict(state["scheduler"])
    run.buffer.load(load_arrays(checkpoint))
    run.learner.load_state_dict(state["learner"])
    run.source.restore(state["ahead"])
    run.log.note(f"resumed {checkpoint.name}: model, optimizer, averaged policy, scheduler, sampler position, random generators; "
                 f"next is step {progress.step + 1}")
    if ranks != run.ranks.world_size:
        run.log.note(f"written by {ranks} ranks, resumed by {run.ranks.world_size}: equal up to rounding from here on")
    return progress


def save(run: Training, progress: Progress) -> None:
    with run.log.phase("checkpoint"):
        state = {"progress": asdict(progress), "scheduler": run.scheduler.state_dict(), "learner": run.learner.state_dict(),
                 "ahead": run.source.state()}
        score = {"none": None, "accuracy": progress.accuracy, "success": run.scheduler.success.ema}[run.cfg.train.keep_best]
        save_checkpoint(run.run_dir, progress.step, run.learner.engine, state, run.cfg.train.keep_checkpoints, score, run.buffer.arrays())


def metrics_row(run: Training, progress: Progress, rolled: Rollouts, knobs: Knobs, stats: Stats) -> dict:
    """One row of metrics.csv; the t_ columns come from the log's phases."""
    outcomes, sampled = rolled.outcomes, rolled.outcomes.sampled
    scored = outcomes.rewards[np.isfinite(outcomes.rewards)]
    return {
        "step": progress.step, "tokens_total": progress.tokens_total, "prompts_total": progress.prompts_total,
        "reward_mean": mean_of_scored(outcomes.rewards),
        "reward_std": float(scored.std()) if scored.size else float("nan"), "reward_failures": int(sampled.sum() - scored.size),
        "r_thr": knobs.r_threshold, "lambda_h": knobs.entropy_coef, "lambda_kl": knobs.kl_coef, "ema_alpha": knobs.ema_alpha,
        "lr_scale": knobs.lr_scale, "temporal_s": knobs.temporal_s, "rule": knobs.rule, **run.scheduler.report(), **stats.columns(),
        "kl_gate": knobs.kl_gate, "reference_copied": int(knobs.copy_reference),
        "truncated": float(outcomes.truncated[sampled].mean()), "response_len_mean": float(outcomes.lengths[sampled].mean()),
        "trained_groups": rolled.trained, "buffered_groups": len(run.buffer),
        "missing_logprobs": run.rollout.missing_logprobs, "tokens_per_s": float(outcomes.lengths.sum()) / run.log.step_seconds(),
        "peak_mem_gb": run.log.peak_memory_gb(), "responses_total": progress.responses_total, **rolled.columns(),
    }


def is_signal_free(cfg: Config, knobs: Knobs, stats: Stats) -> bool:
    """No group, no coefficient and no teacher gave the step a gradient."""
    return stats.flat_groups == 1.0 and knobs.entropy_coef == 0 and knobs.kl_coef == 0 and not cfg.learner.teacher


def due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0
