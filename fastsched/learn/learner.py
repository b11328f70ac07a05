"""One rollout batch -> optimizer updates -> averaged policy, with everything that ranks exchange on the way.

P prompts, G responses a prompt, T response tokens of this rank.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Sequence

import numpy as np

from fastsched.config import Config
from fastsched.groups import without_unsolved
from fastsched.learn.batching import global_index, mini_batches, scored_samples
from fastsched.learn.contract import LearnerEngine
from fastsched.learn.corrections import mean_weight
from fastsched.learn.credit import Credit, needs_entropy, token_credit
from fastsched.learn.losses import reward_advantages
from fastsched.learn.objective import StepObjective, Tokens
from fastsched.learn.packing import Sample
from fastsched.learn.positions import TokenPositions, count_positions
from fastsched.learn.scoring import old_logp, score_responses, sequence_logp
from fastsched.learn.snr import GradientSnr, trained_share
from fastsched.learn.statistics import Steps, Totals, reduced, stats_of, token_quantile
from fastsched.types import Knobs, MicroBatch, Ranks, Response, Stats, StepResult


class NonFiniteLimit(RuntimeError):
    """Too many updates in a row were not finite. Exit code 3."""


@dataclass
class Learner:
    """Drives a `LearnerEngine`; its own state is the count of skipped updates in a row and where in responses tokens occurred."""

    engine: LearnerEngine
    cfg: Config
    dump_dir: Path
    bins: np.ndarray | None = None  # [N] difficulty bin of every dataset row, for log.snr_bins
    skipped_in_row: int = 0
    positions: TokenPositions = field(default_factory=TokenPositions)

    @property
    def ranks(self) -> Ranks:
        return self.engine.ranks

    def update(self, responses: Sequence[Response], rewards: np.ndarray, knobs: Knobs, step: int) -> Stats:
        """Train on this rank's responses (prompt-major) with rewards [P, G]; returns statistics over all ranks.

        Responses whose reward is NaN are left out: no loss, no share in any denominator; so are unsolved groups with
        `drop_unsolved`. A response is stale if sampled from other weights than version `step - 1`. With a stale one on any rank,
        the sampler is pi_old for the whole batch; with `rollout.correction`, pi_old is the learner's own and the correction
        weighs pi_old / pi_sampler, of older weights too (the decoupled objective of arXiv 2110.00641).
        """
        cfg, ranks = self.cfg, self.ranks
        if cfg.learner.drop_unsolved:
            rewards = without_unsolved(rewards, knobs.r_threshold)
        if knobs.copy_reference:
            self.engine.copy_reference()
        stale = np.array([r.weight_version != step - 1 for r in responses])
        any_stale = bool(ranks.all_reduce(np.array([stale.sum()], np.float64))[0])
        objective = StepObjective(cfg.learner, cfg.rollout, knobs, bypass=any_stale and cfg.rollout.correction == "none")
        samples, quantile = self._samples(responses, rewards, objective, step)
        batches = mini_batches(samples, np.flatnonzero(np.isfinite(rewards).any(1)).tolist(), cfg, ranks, knobs, step)
        if objective.divides:
            everything = [micro for micro_batches in batches for micro in micro_batches]
            objective = replace(objective, correction_mean=mean_weight(cfg.rollout, everything, ranks.all_reduce))
        totals, snr = Totals(), GradientSnr(self._trained_share(samples, knobs), ranks)
        steps = self._train(batches, objective, totals, snr, step)
        return stats_of(reduced(totals, responses, rewards, stale, ranks.all_reduce), steps, objective, snr, quantile)

    def _samples(self, responses: Sequence[Response], rewards: np.ndarray, objective: StepObjective,
                 step: int) -> tuple[list[Sample], float]:
        """Responses with a reward and what each of their tokens counts; the quantile of token entropy that the KL gate follows."""
        cfg, knobs, quantile = self.cfg, objective.knobs, float("nan")
        scores = score_responses(self.engine, cfg, objective, responses) if needs_entropy(cfg.scheduler, knobs) else None
        if cfg.scheduler.kl_gate.enabled:
            quantile = token_quantile(scores.entropy, cfg.scheduler.kl_gate.quantile, self.ranks.all_reduce)
        credit = self._credit(responses, rewards, None if scores is None else scores.entropy, objective, step)
        old = old_logp(self.engine, cfg, objective, responses, scores, credit.keep)
        return scored_samples(responses, rewards, credit, old, self.bins if cfg.log.snr_bins else None), quantile

    def _credit(self, responses: Sequence[Response], rewards: np.ndarray, entropy: np.ndarray | None, objective: StepObjective,
                step: int) -> Credit:
        """Of every token, entropy [T] where credit rests on it; the responses' tokens join the counts of positions first."""
        cfg, knobs, ids, group = self.cfg, objective.knobs, [r.token_ids for r in responses], rewards.shape[1]
        by_position = cfg.scheduler.temporal.proxy == "tp_score"
        if by_position or cfg.log.tp_score:
            self.positions.add(self.ranks.all_gather(count_positions(ids)))
        seeds = [(cfg.train.seed, step, global_index(i // group, self.ranks), i % group) for i in range(len(ids))]
        return token_credit(cfg.scheduler, knobs, np.array([len(i) for i in ids], np.int64), reward_advantages(objective.loss, rewards),
                            entropy=entropy, seeds=seeds,
                            tp_score=self.positions.score_tokens(ids) if by_position and knobs.temporal_s > 0 else None)

    def _trained_share(self, samples: Sequence[Sample], knobs: Knobs) -> np.ndarray:
        bins = int(self.bins.max()) + 1 if self.cfg.log.snr_bins else 0
        return trained_share(samples, self.cfg.skips_flat(knobs.entropy_coef, knobs.kl_coef), bins, self.ranks.all_reduce)

    def _train(self, batches: Sequence[Sequence[MicroBatch]], objective: StepObjective, totals: Totals, snr: GradientSnr,
               step: int) -> Steps:
        """One optimizer step for each mini-batch, and after it one of the average, which stays where the update was skipped."""
        results, lr = [], learning_rate(self.cfg, step, objective.knobs)
        for micro_batches in batches:
            loss = self._accumulate(micro_batches, objective, totals)
            squares = snr.take(self.engine, micro_batches)
            results.append(self._step(lr, bool(np.all(np.isfinite([loss, *squares]))), micro_batches, step))
            drift = self.engine.update_average(objective.knobs.ema_alpha if results[-1].applied else 1.0)
        return Steps(results, drift, lr)

    def _accumulate(self, micro_batches: Sequence[MicroBatch], objective: StepObjective, totals: Totals) -> float:
        """Backward over one update's micro-batches; returns their loss on this rank."""
        before = totals.loss
        for micro in micro_batches:
            tokens = Tokens.of(micro, self.engine.device)
            totals.add(self.engine.backward(micro, lambda p, r, t=tokens: objective(p, r, t), reference=objective.needs_reference))
        return totals.loss - before

    def _step(self, lr: float, finite: bool, micro_batches: Sequence[MicroBatch], step: int) -> StepResult:
        """The optimizer's step, unless loss or gradients were not finite on some rank."""
        if self.ranks.all_reduce(np.array([float(not finite)]), op="max")[0]:
            self.engine.discard_gradients()
            result = StepResult(float("nan"), False)
        else:
            result = self.engine.step(lr)
        self.skipped_in_row = 0 if result.applied else self.skipped_in_row + 1
        if not result.applied:
            self._dump(micro_batches, step)
        return result

    def _dump(self, micro_batches: Sequence[MicroBatch], step: int) -> None:
        path = self.dump_dir / f"nonfinite-step-{step}-rank-{self.ranks.rank}.npz"
        np.savez_compressed(path, **{f"{i}.{k}": v for i, m in enumerate(micro_batches) for k, v in m.__dict__.items() if v is not None})
        if self.skipped_in_row >= self.cfg.learner.nonfinite_limit:
            raise NonFiniteLimit(f"step {step}: loss or gradient was not finite {self.skipped_in_row} updates in a row "
                                 f"(learner.nonfinite_limit); the last batch is in {path}. Lower learner.lr or inspect the batch")

    def logp(self, token_ids: Sequence[int]) -> np.ndarray:
        """[len - 1] log-probability (temperature 1) of each token after the first, under the policy."""
        return sequence_logp(self.engine, token_ids)

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same on every rank."""
        return {"skipped_in_row": self.skipped_in_row, "positions": self.positions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_in_row = state["skipped_in_row"]
        self.positions.load_state_dict(state["positions"])


def learning_rate(cfg: Config, step: int, knobs: Knobs) -> float:
    """Of step 1..train.steps: linear warm-up, then constant, a linear cool-down at the end; times the scheduler's scale."""
    learner, steps = cfg.learner, cfg.train.steps
    warmup = min(1.0, step / learner.warmup_steps) if learner.warmup_steps else 1.0
    cooldown = min(1.0, (steps + 1 - step) / (learner.cooldown * steps + 1)) if learner.cooldown else 1.0
    return learner.lr * warmup * max(cooldown, 0.0) * knobs.lr_scale
