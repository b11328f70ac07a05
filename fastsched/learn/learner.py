"""One rollout batch -> optimizer updates -> averaged policy. The only place with collectives.

P prompts, G responses a prompt, R trained tokens.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterable, NamedTuple, Protocol, Sequence

import numpy as np
import torch
from fastsched_kernels.linear import LinearStats, linear_token_stats
from fastsched_kernels.trajectory import trajectory_keep

from fastsched.config import Config
from fastsched.groups import flat_groups, group_advantages, without_unsolved
from fastsched.learn.objective import SUMS, Objective, Tokens
from fastsched.learn.packing import Sample, dummy, pack, token_weights
from fastsched.learn.snr import gradient_snr
from fastsched.types import Head, Knobs, MicroBatch, Response, Stats

DECILES = 10


class StepResult(NamedTuple):
    grad_norm: float  # before clipping; NaN when the update was skipped
    applied: bool


class LearnerEngine(Protocol):
    """Holds policy, optimizer, average; DeepSpeed behind it. Every method is called on every rank alike."""

    device: torch.device
    rank: int
    world_size: int

    def backward(self, micro: MicroBatch, loss: Callable[[Head, Head | None], tuple], *, reference: bool) -> tuple: ...
    def score(self, micro: MicroBatch, score: Callable[[Head], torch.Tensor]) -> torch.Tensor: ...
    def step(self, lr: float) -> StepResult: ...
    def discard_gradients(self) -> None: ...
    def update_average(self, alpha: float) -> float: ...
    def take_gradient_squares(self) -> list[float]: ...
    def all_reduce(self, values: np.ndarray, op: str = "sum") -> np.ndarray: ...
    def all_gather(self, value: object) -> list: ...
    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]: ...


class NonFiniteLimit(RuntimeError):
    """Too many updates in a row were not finite. Exit code 3."""


@dataclass
class Learner:
    """Drives a `LearnerEngine`; its own state is the count of skipped updates in a row."""

    engine: LearnerEngine
    cfg: Config
    dump_dir: Path
    skipped_in_row: int = 0

    def update(self, responses: Sequence[Response], rewards: np.ndarray, knobs: Knobs, step: int) -> Stats:
        """Train on this rank's responses (prompt-major) with rewards [P, G]; returns statistics over all ranks.

        Responses whose reward is NaN are left out: no loss, no share in any denominator. So are unsolved groups with `drop_unsolved`.
        """
        if self.cfg.learner.drop_unsolved:
            rewards = without_unsolved(rewards, knobs.r_threshold)
        totals, results, squares = np.zeros(len(SUMS) + 1), [], []
        objective = Objective(self.cfg.learner, self.cfg.rollout, knobs)
        batches = self._mini_batches(responses, rewards, knobs, step, objective)
        old_logps = self._old_logps(batches, objective)
        lr = self._lr(step, knobs)
        for micro_batches, old in zip(batches, old_logps, strict=True):
            sums, loss = self._accumulate(micro_batches, old, objective)
            totals += np.append(sums, loss)
            squares.append((self.engine.take_gradient_squares(), [m.groups for m in micro_batches]))
            results.append(self._step(lr, loss, squares[-1][0], micro_batches, step))
        drift = self.engine.update_average(knobs.ema_alpha)
        return self._stats(totals, results, squares, responses, rewards, drift, lr)

    def logp(self, token_ids: Sequence[int]) -> np.ndarray:
        """[len - 1] log-probability (temperature 1) of each token after the first, under the policy."""
        n = len(token_ids) - 1
        sample = Sample(0, token_ids[:1], token_ids[1:], np.zeros(n, np.float32), 0.0, np.ones(n, bool), 1.0)
        micro = pack([sample], token_budget=len(token_ids), share_prompts=False)[0]
        target = torch.from_numpy(micro.targets).to(self.engine.device)
        score = lambda head: linear_token_stats(head.hidden, head.weight, target, softcap=head.softcap, bias=head.bias).logp
        return self.engine.score(micro, score).float().cpu().numpy()

    def _mini_batches(self, responses, rewards, knobs: Knobs, step: int, objective: Objective) -> list[list[MicroBatch]]:
        samples = self._samples(responses, rewards, self._keep(responses, knobs, step, objective))
        n = self.cfg.learner.updates_per_batch
        order = np.flatnonzero(np.isfinite(rewards).any(1))
        if n > 1:
            order = np.random.default_rng([self.cfg.train.seed, step]).permutation(order)
        parts = [set(part.tolist()) for part in np.array_split(order, n)]
        return [self._micro_batches([s for s in samples if s.group in part]) for part in parts]

    def _keep(self, responses: Sequence[Response], knobs: Knobs, step: int, objective: Objective) -> list[np.ndarray]:
        """Which tokens of each response carry the loss, bool [L]."""
        lengths = np.array([len(r.token_ids) for r in responses], np.int64)
        proxy, entropy = self.cfg.scheduler.temporal.proxy, None
        if proxy == "entropy" and knobs.temporal_s > 0:
            entropy = torch.from_numpy(self._entropies(responses, lengths, objective))
        seed = np.random.SeedSequence([self.cfg.train.seed, step, self.engine.rank]).generate_state(1, np.uint64)[0] >> 1
        keep = trajectory_keep(torch.from_numpy(lengths), knobs.temporal_s, proxy=proxy if knobs.temporal_s > 0 else "suffix",
                               entropy=entropy, generator=torch.Generator().manual_seed(int(seed))).keep.numpy()
        return np.split(keep, np.cumsum(lengths)[:-1])

    def _entropies(self, responses: Sequence[Response], lengths: np.ndarray, objective: Objective) -> np.ndarray:
        """Entropy of the policy at every response token, all responses one after another [T]."""
        group = self.cfg.rollout.responses
        samples = [Sample(i // group, r.prompt_ids, r.token_ids, r.logp, 0.0, np.ones(n, bool), 1.0)
                   for i, (r, n) in enumerate(zip(responses, lengths, strict=True))]
        starts, out = np.cumsum(lengths) - lengths, np.zeros(lengths.sum(), np.float32)
        for micro in self._packed(samples):
            if micro.groups:
                out[starts[micro.responses] + micro.offsets] = self._score(micro, objective).entropy.float().cpu().numpy()
            else:
                self._score(micro, objective)
        return out

    def _samples(self, responses, rewards, keep: list[np.ndarray]) -> list[Sample]:
        advantages = group_advantages(rewards, normalise_std=self.cfg.learner.loss != "dr_grpo").reshape(-1)
        group_size = rewards.shape[1]
        return [
            Sample(i // group_size, r.prompt_ids, r.token_ids, r.logp, float(advantages[i]), keep[i], 0.0)
            for i, r in enumerate(responses) if np.isfinite(rewards.flat[i])
        ]

    def _micro_batches(self, samples: list[Sample]) -> list[MicroBatch]:
        """Packed and weighted by the denominators of the global batch."""
        cfg = self.cfg.learner
        kept = np.array([s.keep.sum() for s in samples], np.int64)
        total_kept, total_responses = self.engine.all_reduce(np.array([kept.sum(), len(samples)], np.float64))
        weights = token_weights(cfg.loss, kept, total_kept, total_responses, self.cfg.rollout.max_new_tokens)
        return self._packed([replace(s, weight=w) for s, w in zip(samples, weights, strict=True)
                             if s.advantage or not cfg.skip_flat_groups])

    def _packed(self, samples: list[Sample]) -> list[MicroBatch]:
        """As many micro-batches as on the rank that has most; those that only even out the number carry no group."""
        cfg = self.cfg.learner
        flash = self.cfg.model.attention == "flash_attention_2"
        micro = pack(samples, token_budget=cfg.micro_batch_tokens, share_prompts=cfg.share_prompts,
                     row_width=cfg.micro_batch_tokens if flash else None)
        count = int(self.engine.all_reduce(np.array([len(micro)], np.float64), op="max")[0])
        return micro + [dummy(micro[0] if micro else _blank())] * (max(count, 1) - len(micro))

    def _old_logps(self, batches, objective: Objective) -> list[list[np.ndarray | None]]:
        """On policy with one update the ratio is one by construction; otherwise score the whole batch before the first update."""
        if len(batches) == 1:
            return [[None] * len(batches[0])]
        return [[self._score(m, objective).logp.float().cpu().numpy() for m in micro_batches] for micro_batches in batches]

    def _score(self, micro: MicroBatch, objective: Objective) -> LinearStats:
        target = torch.from_numpy(micro.targets).to(self.engine.device)
        return self.engine.score(micro, lambda head: objective.score(head, target))

    def _accumulate(self, micro_batches, old_logps, objective: Objective) -> tuple[np.ndarray, float]:
        sums, loss = np.zeros(len(SUMS)), 0.0
        for micro, old in zip(micro_batches, old_logps, strict=True):
            tokens = Tokens.of(micro, old, self.engine.device)
            out = self.engine.backward(micro, lambda p, r, t=tokens: objective(p, r, t), reference=self.cfg.learner.kl != "none")
            sums += out.sums.cpu().numpy()
            loss += float(out.loss.detach())
        return sums, loss

    def _step(self, lr: float, loss: float, squares: list[float], micro_batches: list[MicroBatch], step: int) -> StepResult:
        bad = not np.isfinite(loss) or not np.all(np.isfinite(squares))
        if self.engine.all_reduce(np.array([float(bad)]), op="max")[0]:
            self.engine.discard_gradients()
            result = StepResult(float("nan"), False)
        else:
            result = self.engine.step(lr)
        self.skipped_in_row = 0 if result.applied else self.skipped_in_row + 1
        if not result.applied:
            self._dump(micro_batches, step)
        return result

    def _dump(self, micro_batches: list[MicroBatch], step: int) -> None:
        path = self.dump_dir / f"nonfinite-step-{step}-rank-{self.engine.rank}.npz"
        np.savez_compressed(path, **{f"{i}.{k}": v for i, m in enumerate(micro_batches) for k, v in m.__dict__.items()})
        if self.skipped_in_row >= self.cfg.learner.nonfinite_limit:
            raise NonFiniteLimit(f"step {step}: loss or gradient was not finite {self.skipped_in_row} updates in a row "
                                 f"(learner.nonfinite_limit); the last batch is in {path}. Lower learner.lr or inspect the batch")

    def _lr(self, step: int, knobs: Knobs) -> float:
        cfg, steps = self.cfg.learner, self.cfg.train.steps
        warmup = min(1.0, step / cfg.warmup_steps) if cfg.warmup_steps else 1.0
        cooldown = min(1.0, (steps + 1 - step) / (cfg.cooldown * steps + 1)) if cfg.cooldown else 1.0
        return cfg.lr * warmup * max(cooldown, 0.0) * knobs.lr_scale

    def _stats(self, totals, results: list[StepResult], squares, responses, rewards, drift: float, lr: float) -> Stats:
        cfg, last = self.cfg.learner, results[-1]
        local = [*totals, sum(len(r.token_ids) for r in responses), flat_groups(rewards).sum(), len(rewards)]
        reduced = self.engine.all_reduce(np.array(local, np.float64)).tolist()
        tokens, entropy, kl, clipped, deviation, loss, all_tokens, flat, groups = reduced
        per_token = lambda total: total / tokens if tokens else float("nan")
        return Stats(
            loss=loss / len(results), entropy=per_token(entropy), kl=per_token(kl) if cfg.kl != "none" else float("nan"),
            kl_kind=cfg.kl, drift=drift, grad_norm=last.grad_norm, grad_snr=self._snr(squares[-1], last.grad_norm),
            clip_fraction=per_token(clipped), ratio_deviation=per_token(deviation),
            kept_fraction=tokens / all_tokens if all_tokens else float("nan"), flat_groups=flat / groups,
            skipped=sum(not r.applied for r in results), lr=lr,
        )

    def _snr(self, squares: tuple[list[float], list[int]], grad_norm: float) -> float:
        pairs = [pair for rank in self.engine.all_gather(list(zip(*squares, strict=True))) for pair in rank if pair[1]]
        return gradient_snr(np.array([p[0] for p in pairs]), np.array([p[1] for p in pairs]), grad_norm)


def _blank() -> MicroBatch:
    """For a rank without a single trained response: one padding token, no loss."""
    zero, none = np.zeros((1, 1), np.int64), np.zeros(1, np.float32)
    index = np.zeros(1, np.int64)
    return MicroBatch(zero, zero, zero, zero, index, index, none, none, none, index, index, 0)
