"""One rollout batch -> optimizer updates -> averaged policy. The only place with collectives.

P prompts, G responses a prompt, R trained tokens.
"""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Callable, Iterable, NamedTuple, Optional, Protocol, Sequence

import numpy as np
import torch
from fastsched_kernels.linear import LinearStats, linear_token_stats

from fastsched.config import Config
from fastsched.groups import group_advantages, without_unsolved
from fastsched.learn import statistics
from fastsched.learn.balance import balanced
from fastsched.learn.corrections import correct
from fastsched.learn.credit import Credit, needs_entropy, token_credit
from fastsched.learn.objective import Objective, Tokens
from fastsched.learn.packing import Sample, dummy, pack, split_by_bin, token_weights
from fastsched.learn.positions import TokenPositions, count_positions
from fastsched.types import Head, Knobs, MicroBatch, Ranks, Response, Stats, StepResult


class LearnerEngine(Protocol):
    """Holds policy, optimizer, average; DeepSpeed behind it. Every method is called on every rank alike."""

    device: torch.device
    ranks: Ranks

    def backward(self, micro: MicroBatch, loss: Callable[[Head, Head | None], tuple], *, reference: bool) -> tuple: ...
    def score(self, micro: MicroBatch, score: Callable[[Head], torch.Tensor]) -> torch.Tensor: ...
    def step(self, lr: float) -> StepResult: ...
    def discard_gradients(self) -> None: ...
    def update_average(self, alpha: float) -> float: ...
    def copy_reference(self) -> None: ...
    def take_gradient_squares(self) -> list[float]: ...
    def take_bin_squares(self) -> dict[int, float]: ...
    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class NonFiniteLimit(RuntimeError):
    """Too many updates in a row were not finite. Exit code 3."""


class TokenScores(NamedTuple):
    """Of the policy before the update, for every response token, all responses one after another; 0 where it was not asked for."""

    logp: np.ndarray  # [T] float32
    entropy: np.ndarray  # [T] float32, nats


@dataclass
class Learner:
    """Drives a `LearnerEngine`; its own state is the count of skipped updates in a row and where in responses tokens occurred."""

    engine: LearnerEngine
    cfg: Config
    dump_dir: Path
    bins: Optional[np.ndarray] = None  # [N] difficulty bin of every dataset row, for log.snr_bins
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
        if self.cfg.learner.drop_unsolved:
            rewards = without_unsolved(rewards, knobs.r_threshold)
        if knobs.copy_reference:
            self.engine.copy_reference()
        stale = np.array([r.weight_version != step - 1 for r in responses])
        any_stale = bool(self._over_ranks(stale.sum()))
        objective = Objective(self.cfg.learner, self.cfg.rollout, knobs, bypass=any_stale and self.cfg.rollout.correction == "none")
        samples, quantile = self._samples(responses, rewards, objective, step)
        batches = self._mini_batches(samples, np.flatnonzero(np.isfinite(rewards).any(1)), knobs, step)
        objective = self._divided(objective, batches)
        shares = self._trained_share(samples, knobs)
        totals, results, lr = statistics.Totals(), [], self._lr(step, knobs)
        for micro_batches in batches:
            loss = self._accumulate(micro_batches, objective, totals)
            squares, of_bins = self.engine.take_gradient_squares(), self.engine.take_bin_squares()
            results.append(self._step(lr, loss, squares, micro_batches, step))
            drift = self.engine.update_average(knobs.ema_alpha if results[-1].applied else 1.0)  # skipped: it stays
        last = results[-1].grad_norm
        stats = self._stats(*statistics.reduced(totals, responses, rewards, stale, self.ranks.all_reduce), len(results), objective)
        return replace(
            stats, drift=drift, lr=lr, grad_norm=last, skipped=sum(not r.applied for r in results), entropy_quantile=quantile,
            grad_snr=statistics.snr(squares, batches[-1], last, shares[0], self.ranks.all_gather),
            snr_bins=statistics.snr_by_bin(squares, batches[-1], of_bins, shares[1:], self.ranks.all_gather),
            correction_max=self._over_ranks(totals.largest_ratio, "max") if objective.corrects else float("nan"),
        )

    def state_dict(self) -> dict[str, Any]:
        """JSON-able; the same on every rank."""
        return {"skipped_in_row": self.skipped_in_row, "positions": self.positions.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped_in_row = state["skipped_in_row"]
        self.positions.load_state_dict(state["positions"])

    def logp(self, token_ids: Sequence[int]) -> np.ndarray:
        """[len - 1] log-probability (temperature 1) of each token after the first, under the policy."""
        n = len(token_ids) - 1
        sample = Sample(0, token_ids[:1], token_ids[1:], np.zeros(n, np.float32), 0.0, np.ones(n, bool), 1.0)
        micro = pack([sample], token_budget=len(token_ids), share_prompts=False)[0]
        target = torch.from_numpy(micro.targets).to(self.engine.device)
        score = lambda head: linear_token_stats(head.hidden, head.weight, target, softcap=head.softcap, bias=head.bias).logp
        return self.engine.score(micro, score).float().cpu().numpy()

    def _over_ranks(self, value: float, op: str = "sum") -> float:
        return float(self.ranks.all_reduce(np.array([value], np.float64), op)[0])

    def _samples(self, responses, rewards, objective: Objective, step: int) -> tuple[list[Sample], float]:
        """Responses with a reward and what each of their tokens counts; the quantile of token entropy that the KL gate follows."""
        cfg, knobs = self.cfg, objective.knobs
        lengths = np.array([len(r.token_ids) for r in responses], np.int64)
        scores = self._scores(responses, lengths, objective) if needs_entropy(cfg.scheduler, knobs) else None
        entropy = None if scores is None else scores.entropy
        quantile = float("nan")
        if cfg.scheduler.kl_gate.enabled:
            quantile = statistics.token_quantile(entropy, cfg.scheduler.kl_gate.quantile, self.ranks.all_reduce)
        credit = self._credit(responses, rewards, lengths, entropy, knobs, step)
        old = self._old_logp(responses, lengths, objective, scores, credit.keep)
        cuts, group = np.cumsum(lengths)[:-1], rewards.shape[1]
        split = lambda values: [None] * len(lengths) if values is None else np.split(values, cuts)[:len(lengths)]  # [] of no response
        columns = zip(split(credit.keep), split(credit.advantage), split(old), split(credit.kl_scale), strict=True)
        return [
            Sample(i // group, r.prompt_ids, r.token_ids, r.logp, advantage, keep, 0.0, old_logp, kl_scale, self._bin(r.row))
            for i, (r, (keep, advantage, old_logp, kl_scale)) in enumerate(zip(responses, columns, strict=True))
            if np.isfinite(rewards.flat[i])
        ], quantile

    def _credit(self, responses, rewards, lengths: np.ndarray, entropy: Optional[np.ndarray], knobs: Knobs, step: int) -> Credit:
        cfg, ids = self.cfg, [r.token_ids for r in responses]
        by_position = cfg.scheduler.temporal.proxy == "tp_score"
        if by_position or cfg.log.tp_score:
            self.positions.add(self.ranks.all_gather(count_positions(ids)))
        advantages = np.zeros(len(ids)) if cfg.learner.loss == "opd" else group_advantages(
            rewards, normalise_std=cfg.learner.loss != "dr_grpo").reshape(-1)
        group = rewards.shape[1]
        seeds = [(cfg.train.seed, step, self._place(i // group), i % group) for i in range(len(ids))]
        return token_credit(cfg.scheduler, knobs, lengths, advantages, entropy=entropy, seeds=seeds,
                            tp_score=self.positions.score_tokens(ids) if by_position and knobs.temporal_s > 0 else None)

    def _old_logp(self, responses, lengths, objective: Objective, scores: Optional[TokenScores], keep: np.ndarray) -> Optional[np.ndarray]:
        """Log-probabilities [T] that ratios are taken against; None: the policy's own, so that every ratio is one."""
        if objective.bypass:
            return np.concatenate([np.asarray(r.logp, np.float32) for r in responses] or [np.zeros(0, np.float32)])
        if self.cfg.learner.updates_per_batch == 1 and not (self.cfg.rollout.correction_divide and objective.corrects):
            return None
        return (scores or self._scores(responses, lengths, objective, keep)).logp

    def _scores(self, responses, lengths: np.ndarray, objective: Objective, keep: Optional[np.ndarray] = None) -> TokenScores:
        """One pass without gradient over every response token, or those of `keep` [T]."""
        keep = np.ones(lengths.sum(), bool) if keep is None else keep
        group, starts = self.cfg.rollout.responses, np.cumsum(lengths) - lengths
        samples = [Sample(i // group, r.prompt_ids, r.token_ids, r.logp, 0.0, kept, 1.0)
                   for i, (r, kept) in enumerate(zip(responses, np.split(keep, starts[1:])[:len(lengths)], strict=True))]
        out = TokenScores(np.zeros(len(keep), np.float32), np.zeros(len(keep), np.float32))
        for micro in self._packed(samples):
            found = self._score(micro, objective)
            if micro.groups:
                at = starts[micro.responses] + micro.offsets
                out.logp[at], out.entropy[at] = found.logp.float().cpu().numpy(), found.entropy.float().cpu().numpy()
        return out

    def _bin(self, row: int) -> int:
        return int(self.bins[row]) if self.cfg.log.snr_bins else -1

    def _mini_batches(self, samples: list[Sample], groups: np.ndarray, knobs: Knobs, step: int) -> list[list[MicroBatch]]:
        """One for each optimizer step: a random share of the groups of all ranks."""
        if self.cfg.learner.updates_per_batch == 1:
            return [self._micro_batches(samples, knobs)]
        places = sorted(place for part in self.ranks.all_gather([self._place(g) for g in groups.tolist()]) for place in part)
        order = np.random.default_rng([self.cfg.train.seed, step]).permutation(places)
        parts = [set(part.tolist()) for part in np.array_split(order, self.cfg.learner.updates_per_batch)]
        return [self._micro_batches([s for s in samples if self._place(s.group) in part], knobs) for part in parts]

    def _place(self, group: int) -> int:
        """Of this rank's group in the batch of all ranks, which is dealt out in turn; where refills or DOTS compose it otherwise, still
        a number of its own, but one that depends on the number of ranks."""
        return group * self.ranks.world_size + self.ranks.rank

    def _micro_batches(self, samples: list[Sample], knobs: Knobs) -> list[MicroBatch]:
        """Packed and weighted by the denominators of the global batch."""
        cfg, skips_flat = self.cfg.learner, self.cfg.skips_flat(knobs.entropy_coef, knobs.kl_coef)
        kept = np.array([s.keep.sum() for s in samples], np.int64)
        total_kept, total_responses = self.ranks.all_reduce(np.array([kept.sum(), len(samples)], np.float64))
        weights = token_weights(cfg.loss, kept, total_kept, total_responses, self.cfg.rollout.max_new_tokens)
        trained = [replace(s, weight=w) for s, w in zip(samples, weights, strict=True) if np.any(s.advantage) or not skips_flat]
        if cfg.balance and self.ranks.world_size > 1:
            trained = balanced(trained, cfg.share_prompts, self.ranks.rank, self.ranks.all_gather)
        return self._packed(trained, by_bin=self.cfg.log.snr_bins)

    def _packed(self, samples: list[Sample], by_bin: bool = False) -> list[MicroBatch]:
        """As many micro-batches as on the rank that has most; those that only even out the number carry no group."""
        cfg = self.cfg.learner
        flash = self.cfg.model.attention == "flash_attention_2"
        parts = split_by_bin(samples) if by_bin else [samples]
        micro = [m for part in parts for m in pack(part, token_budget=cfg.micro_batch_tokens, share_prompts=cfg.share_prompts,
                                                   row_width=cfg.micro_batch_tokens if flash else None)]
        count = int(self.ranks.all_reduce(np.array([len(micro)], np.float64), op="max")[0])
        return micro + [dummy(micro[0] if micro else _blank())] * (max(count, 1) - len(micro))

    def _divided(self, objective: Objective, batches: list[list[MicroBatch]]) -> Objective:
        """With the mean correction weight over the trained tokens of the whole batch, by which weights are divided."""
        if not (self.cfg.rollout.correction_divide and objective.corrects):
            return objective
        total, count = 0.0, 0.0
        for micro in (m for micro_batches in batches for m in micro_batches if m.groups):
            live = torch.from_numpy(micro.token_weights) > 0
            arrays = (torch.from_numpy(a) for a in (micro.old_logp, micro.sampler_logp, micro.responses))
            total += float(correct(self.cfg.rollout, *arrays, live).weight[live].double().sum())
            count += float(live.sum())
        total, count = self.ranks.all_reduce(np.array([total, count]))
        return replace(objective, correction_mean=total / count if total > 0 else 1.0)

    def _score(self, micro: MicroBatch, objective: Objective) -> LinearStats:
        target = torch.from_numpy(micro.targets).to(self.engine.device)
        return self.engine.score(micro, lambda head: objective.score(head, target))

    def _accumulate(self, micro_batches: list[MicroBatch], objective: Objective, totals: statistics.Totals) -> float:
        """Backward over one update's micro-batches; returns their loss on this rank."""
        before = totals.loss
        for micro in micro_batches:
            tokens = Tokens.of(micro, self.engine.device)
            totals.add(self.engine.backward(micro, lambda p, r, t=tokens: objective(p, r, t), reference=objective.needs_reference))
        return totals.loss - before

    def _step(self, lr: float, loss: float, squares: list[float], micro_batches: list[MicroBatch], step: int) -> StepResult:
        bad = not np.isfinite(loss) or not np.all(np.isfinite(squares))
        if self.ranks.all_reduce(np.array([float(bad)]), op="max")[0]:
            self.engine.discard_gradients()
            result = StepResult(float("nan"), False)
        else:
            result = self.engine.step(lr)
        self.skipped_in_row = 0 if result.applied else self.skipped_in_row + 1
        if not result.applied:
            self._dump(micro_batches, step)
        return result

    def _dump(self, micro_batches: list[MicroBatch], step: int) -> None:
        path = self.dump_dir / f"nonfinite-step-{step}-rank-{self.ranks.rank}.npz"
        np.savez_compressed(path, **{f"{i}.{k}": v for i, m in enumerate(micro_batches) for k, v in m.__dict__.items() if v is not None})
        if self.skipped_in_row >= self.cfg.learner.nonfinite_limit:
            raise NonFiniteLimit(f"step {step}: loss or gradient was not finite {self.skipped_in_row} updates in a row "
                                 f"(learner.nonfinite_limit); the last batch is in {path}. Lower learner.lr or inspect the batch")

    def _lr(self, step: int, knobs: Knobs) -> float:
        cfg, steps = self.cfg.learner, self.cfg.train.steps
        warmup = min(1.0, step / cfg.warmup_steps) if cfg.warmup_steps else 1.0
        cooldown = min(1.0, (steps + 1 - step) / (cfg.cooldown * steps + 1)) if cfg.cooldown else 1.0
        return cfg.lr * warmup * max(cooldown, 0.0) * knobs.lr_scale

    def _stats(self, sums: dict[str, float], deciles: np.ndarray, updates: int, objective: Objective) -> Stats:
        """Means over all ranks; what is no mean over tokens is filled in by `update`."""
        cfg, nan = self.cfg.learner, float("nan")
        per_token = lambda name: sums[name] / sums["tokens"] if sums["tokens"] else nan
        corrected = lambda name: per_token(name) if objective.corrects else nan
        return Stats(
            loss=sums["loss"] / updates, entropy=per_token("entropy"), kl=per_token("kl") if objective.needs_reference else nan,
            kl_kind="k1 to teacher" if cfg.teacher else cfg.kl, drift=nan, grad_norm=nan, grad_snr=nan,
            clip_fraction=per_token("clipped"), ratio_deviation=per_token("deviation"),
            kept_fraction=sums["tokens"] / sums["all_tokens"] if sums["all_tokens"] else nan, flat_groups=sums["flat"] / sums["groups"],
            skipped=0, lr=nan, stale=sums["stale"] / sums["responses"], correction_mean=corrected("rho"),
            correction_capped=corrected("capped"), correction_rejected=corrected("rejected"), deciles=statistics.decile_columns(deciles),
        )

    def _trained_share(self, samples: list[Sample], knobs: Knobs) -> np.ndarray:
        """As `statistics.trained_share`; without log.snr_bins of all groups alone."""
        skips_flat, groups = self.cfg.skips_flat(knobs.entropy_coef, knobs.kl_coef), {}
        for s in samples:
            groups[s.group] = s.bin, groups.get(s.group, (0, False))[1] or not skips_flat or bool(np.any(s.advantage))
        bins = int(self.bins.max()) + 1 if self.cfg.log.snr_bins else 0
        return statistics.trained_share(groups.values(), bins, self.ranks.all_reduce)


def _blank() -> MicroBatch:
    """For a rank without a single trained response: one padding token, no loss."""
    zero, none = np.zeros((1, 1), np.int64), np.zeros(1, np.float32)
    index = np.zeros(1, np.int64)
    return MicroBatch(zero, zero, zero, zero, index, index, none, none, none, index, index, index, 0)
