"""The loop: prompts -> rollouts -> rewards -> update -> sync -> observe -> log, and what stands around it."""

import signal
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from fastsched.arguments import config_to_yaml
from fastsched.assemble import Run, assemble
from fastsched.checkpoint import restore, save_checkpoint
from fastsched.config import Config
from fastsched.engines.weights import SyncError
from fastsched.evaluate import evaluate
from fastsched.learn.learner import NonFiniteLimit
from fastsched.log import write_config, write_environment
from fastsched.rollouts import roll_out, sample_rows, sync
from fastsched.types import Knobs, Outcomes, Stats

DONE, GUARD, INTERRUPTED = 0, 3, 130


@dataclass
class Progress:
    """What the loop itself remembers between steps; part of every checkpoint."""

    step: int = 0
    tokens_total: int = 0
    prompts_total: int = 0
    responses_total: int = 0
    flat_in_row: int = 0

    def complete(self, cfg: Config) -> bool:
        return self.step >= cfg.train.steps or 0 < cfg.train.rollout_budget <= self.responses_total


def run_training(cfg: Config, run_dir: Path, log, checkpoint: Path | None) -> int:
    """Train from `checkpoint`, or from the start; returns the exit code."""
    run = assemble(cfg, run_dir, log)
    try:
        progress = _start(run, checkpoint)
        stopped = _Stop()
        while not progress.complete(cfg) and not stopped.reason:
            _step(run, progress)
            stopped.check(run, progress)
            if stopped.reason or _due(progress.step, cfg.train.checkpoint_every) or progress.complete(cfg):
                _save(run, progress)
        if stopped.reason:
            log.warn(f"stopped after step {progress.step}: {stopped.reason}; continue with --resume")
        elif cfg.train.eval_at_ends and not _due(progress.step, cfg.train.eval_every):
            evaluate(run, progress.step)
        return stopped.code
    except (NonFiniteLimit, SyncError) as error:
        log.warn(str(error))
        return GUARD
    finally:
        run.close()


def _start(run: Run, checkpoint: Path | None) -> Progress:
    progress = Progress()
    if checkpoint:
        state = restore(checkpoint, run.learner.engine)
        progress = Progress(**state["progress"])
        run.scheduler.load_state_dict(state["scheduler"])
        run.learner.skipped_in_row = state["skipped_in_row"]
        run.log.note(f"resumed {checkpoint.name}: model, optimizer, averaged policy, scheduler, sampler position, random generators; "
                     f"next is step {progress.step + 1}")
    elif run.learner.engine.rank == 0:
        write_config(run.run_dir, config_to_yaml(run.cfg))
        write_environment(run.run_dir)
    sync(run, progress.step, run.heldout.prompt(0).token_ids if len(run.heldout) else run.train_set.prompt(0).token_ids)
    if not checkpoint and run.cfg.train.eval_at_ends:
        with run.log.phase("evaluation"):
            evaluate(run, 0)
    run.log.restart_clock()
    return progress


def _step(run: Run, progress: Progress) -> None:
    cfg, log, step = run.cfg, run.log, progress.step + 1
    rolled = roll_out(run, step)
    knobs = run.scheduler.knobs()
    with log.phase("learn"):
        stats = run.learner.update(rolled.responses, rolled.rewards, knobs, step)
    with log.phase("sync"):
        sync(run, step, rolled.probe)
    with log.phase("control"):
        run.scheduler.observe(rolled.outcomes, stats)
    if _due(step, cfg.train.eval_every):
        with log.phase("evaluation"):
            evaluate(run, step)
    progress.step = step
    progress.tokens_total += int(rolled.outcomes.lengths.sum())
    progress.prompts_total += len(rolled.outcomes.rows)
    progress.responses_total += int(np.count_nonzero(rolled.outcomes.lengths))
    signal_free = stats.flat_groups == 1.0 and knobs.entropy_coef == 0 and knobs.kl_coef == 0
    progress.flat_in_row = progress.flat_in_row + 1 if signal_free else 0
    log.step(_row(run, progress, knobs, stats, rolled.outcomes))
    log.samples(step, sample_rows(rolled.prompts, rolled.responses, rolled.rewards, rolled.texts))
    for message in run.scheduler.messages():
        log.note(message)


def _row(run: Run, progress: Progress, knobs: Knobs, stats: Stats, outcomes: Outcomes) -> dict:
    """One row of metrics.csv; the t_ columns come from the log's phases."""
    scored = outcomes.rewards[np.isfinite(outcomes.rewards)]
    measured = asdict(stats)
    measured["skipped_nonfinite"] = measured.pop("skipped")
    return {
        "step": progress.step, "tokens_total": progress.tokens_total, "prompts_total": progress.prompts_total,
        "reward_mean": float(scored.mean()) if scored.size else float("nan"),
        "reward_std": float(scored.std()) if scored.size else float("nan"), "reward_failures": int(outcomes.rewards.size - scored.size),
        "r_thr": knobs.r_threshold, "lambda_h": knobs.entropy_coef, "lambda_kl": knobs.kl_coef, "ema_alpha": knobs.ema_alpha,
        "lr_scale": knobs.lr_scale, "temporal_s": knobs.temporal_s, "rule": knobs.rule, **run.scheduler.report(), **measured,
        "truncated": float(outcomes.truncated.mean()), "response_len_mean": float(outcomes.lengths.mean()),
        "missing_logprobs": run.rollout.missing_logprobs, "tokens_per_s": float(outcomes.lengths.sum()) / run.log.step_seconds(),
        "peak_mem_gb": run.log.peak_memory_gb(), "responses_total": progress.responses_total,
    }


def _save(run: Run, progress: Progress) -> None:
    with run.log.phase("checkpoint"):
        state = {"progress": asdict(progress), "scheduler": run.scheduler.state_dict(), "skipped_in_row": run.learner.skipped_in_row}
        save_checkpoint(run.run_dir, progress.step, run.learner.engine, state, run.cfg.train.keep_checkpoints)


def _due(step: int, every: int) -> bool:
    return every > 0 and step % every == 0


class _Stop:
    """Interrupts and guards, agreed by all ranks at the end of a step."""

    def __init__(self):
        self.code, self.reason, self._signal = DONE, "", 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._interrupt)

    def _interrupt(self, number: int, frame) -> None:
        self._signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a second Ctrl-C does not wait for the step to end

    def check(self, run: Run, progress: Progress) -> None:
        if run.learner.engine.all_reduce(np.array([float(self._signal)]), op="max")[0]:
            self.code, self.reason = INTERRUPTED, "interrupted"
        elif progress.flat_in_row >= run.cfg.train.no_signal_limit:
            self.code, self.reason = GUARD, (f"no signal: in {progress.flat_in_row} steps in a row every group had equal rewards "
                                             "(train.no_signal_limit); the task is too easy, too hard, or the reward is constant")
