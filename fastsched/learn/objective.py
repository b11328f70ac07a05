"""The loss of one micro-batch: one call into the fused head. R trained tokens, H hidden, V vocabulary."""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from fastsched_kernels.linear import LinearStats, linear_token_loss, linear_token_stats, policy_loss
from fastsched_kernels.reference import kl_estimate
from fastsched_kernels.trajectory import decile_sums

from fastsched.config import LearnerConfig, RolloutConfig
from fastsched.learn.corrections import Correction, correct
from fastsched.learn.losses import LOSSES, Loss
from fastsched.learn.rpg import rpg_weight
from fastsched.types import Head, Knobs, MicroBatch

LOGITS = {"bf16": torch.bfloat16, "fp32": torch.float32, None: None}


class Tokens(NamedTuple):
    """A micro-batch's trained tokens on the device; every field [R]."""

    target: torch.Tensor  # int64
    advantage: torch.Tensor  # float32
    weight: torch.Tensor  # float32, mask over global denominator
    sampler_logp: torch.Tensor  # float32
    old_logp: torch.Tensor | None  # float32, NaN: unknown; None on policy: the ratio is one by construction
    response: torch.Tensor  # int64, the response of each token
    decile: torch.Tensor  # int64
    kl_scale: torch.Tensor | None  # float32, factor of the KL coefficient

    @classmethod
    def of(cls, micro: MicroBatch, device: torch.device) -> "Tokens":
        def move(values: np.ndarray | None):
            return None if values is None else torch.from_numpy(values).to(device, non_blocking=True)

        return cls(move(micro.targets), move(micro.advantages), move(micro.token_weights), move(micro.sampler_logp),
                   move(micro.old_logp), move(micro.responses), move(micro.deciles), move(micro.kl_scale))


class LossSums(NamedTuple):
    """Differentiable loss of the micro-batch, and what is logged of its R tokens, detached."""

    loss: torch.Tensor
    sums: torch.Tensor  # [len(SUMS)] float64, in the order of SUMS
    deciles: torch.Tensor  # [3, 10] float64: tokens, sum of entropy, sum of KL by tenth of the response
    largest_ratio: torch.Tensor  # of pi_old / pi_sampler; 0 without correction


SUMS = ("tokens", "entropy", "kl", "clipped", "deviation", "rho", "capped", "rejected")


class _Measured(NamedTuple):
    loss: torch.Tensor
    logp: torch.Tensor  # [R], like the rest
    entropy: torch.Tensor
    kl: torch.Tensor
    clipped: torch.Tensor


@dataclass(frozen=True)
class StepObjective:
    """The surrogate of the loss's row, KL to the reference and entropy bonus (kernels.md 6.1), with this step's knobs."""

    learner: LearnerConfig
    rollout: RolloutConfig
    knobs: Knobs
    bypass: bool = False  # pi_old is the sampler: stale responses without a correction
    correction_mean: float = 1.0  # by which correction weights are divided

    @property
    def loss(self) -> Loss:
        return LOSSES[self.learner.loss]

    @property
    def corrects(self) -> bool:
        return self.rollout.correction != "none"

    @property
    def divides(self) -> bool:
        """Correction weights are divided by their mean, which takes old log-probabilities of the whole batch."""
        return self.corrects and self.rollout.correction_divide

    @property
    def needs_reference(self) -> bool:
        return self.learner.kl != "none" or self.learner.teacher is not None

    def __call__(self, policy: Head, reference: Head | None, tokens: Tokens) -> LossSums:
        tokens = tokens._replace(old_logp=self._known(policy, tokens))
        correction = self._correction(policy, tokens) if self.corrects else None
        scale = 1.0 if tokens.kl_scale is None else tokens.kl_scale
        loss = self._rpg if self.loss.surrogate == "rpg" else self._clipped
        weight = 1.0 if correction is None else correction.weight / self.correction_mean
        return _sums(loss(policy, reference, tokens, weight, self.knobs.kl_coef * scale), tokens, correction)

    def _clipped(self, policy: Head, reference: Head | None, tokens: Tokens, rollout_weight, kl_coef) -> _Measured:
        cfg, teacher = self.learner, self.learner.teacher is not None
        out = policy_loss(
            policy.hidden, policy.weight, tokens.target,
            advantage=tokens.advantage, token_weight=tokens.weight, old_logp=tokens.old_logp,
            ref_hidden=None if reference is None else reference.hidden,
            ref_weight=None if reference is None else reference.weight,
            ref_bias=None if reference is None else reference.bias,
            kl="k1" if teacher else cfg.kl, kl_coef=0.0 if teacher else kl_coef,  # of the teacher, for the log
            distill=self.loss.distill + cfg.distill, entropy_coef=self.knobs.entropy_coef,
            clip=cfg.clip, dual_clip=cfg.dual_clip, surrogate=self.loss.surrogate, level=self.loss.level, sequence=tokens.response,
            rollout_weight=rollout_weight, skip_flat=False, **self._head(policy),
        )
        return _Measured(out.loss, out.logp, out.entropy, out.kl, out.clipped)

    def _rpg(self, policy: Head, reference: Head, tokens: Tokens, rollout_weight, kl_coef) -> _Measured:
        live = tokens.weight > 0
        columns = {"advantage": tokens.advantage, "weight": tokens.weight, "ref_logp": self.score(reference, tokens.target).logp,
                   "rollout": rollout_weight, "beta": kl_coef, "old_logp": tokens.old_logp}
        columns = {k: torch.as_tensor(v, device=live.device).expand(live.shape) for k, v in columns.items() if v is not None}

        def weigh(logp: torch.Tensor, t) -> tuple[torch.Tensor, torch.Tensor]:
            return rpg_weight(self.learner.rpg, t["advantage"], logp - t.get("old_logp", logp), logp - t["ref_logp"], t["beta"],
                              self.learner.clip, self.learner.dual_clip)

        def loss(logp, entropy, kl, t):
            weight = t["rollout"] * weigh(logp.detach(), t)[0]
            return t["weight"] * (-weight * logp - self.knobs.entropy_coef * entropy)

        out = linear_token_loss(policy.hidden, policy.weight, tokens.target, loss, tokens=columns, keep=live, **self._head(policy))
        return _Measured(out.loss, out.logp, out.entropy, kl_estimate(self.learner.kl, out.logp, columns["ref_logp"]),
                         weigh(out.logp, columns)[1])

    def _known(self, policy: Head, tokens: Tokens) -> torch.Tensor | None:
        """Old log-probabilities; a token without one has ratio one."""
        old = tokens.old_logp
        if old is None or bool(old.isfinite().all()):
            return old
        return torch.where(old.isfinite(), old, self.score(policy, tokens.target).logp)

    def _correction(self, policy: Head, tokens: Tokens) -> Correction:
        old = tokens.old_logp if tokens.old_logp is not None else self.score(policy, tokens.target).logp
        return correct(self.rollout, old, tokens.sampler_logp, tokens.response, tokens.weight > 0)

    def score(self, head: Head, target: torch.Tensor) -> LinearStats:
        """Log-probability and entropy [R] of `target` without gradient."""
        detached = head._replace(hidden=head.hidden.detach(), weight=head.weight.detach())
        with torch.no_grad():
            return linear_token_stats(detached.hidden, detached.weight, target, **self._head(head))

    def _head(self, head: Head) -> dict:
        return dict(temperature=self.rollout.temperature, softcap=head.softcap, bias=head.bias, chunk_rows=self.learner.chunk_rows,
                    filter_eps=self.learner.filter_eps, implementation=self.learner.head, logits_dtype=LOGITS[self.learner.logits])


@torch.no_grad()
def _sums(out: _Measured, tokens: Tokens, correction: Correction | None) -> LossSums:
    live = tokens.weight > 0
    deviation = (out.logp - tokens.sampler_logp).abs().nan_to_num(0.0)  # the sampler may miss a log-probability
    none = torch.zeros_like(out.logp)
    rho = (none, none, none) if correction is None else (correction.ratio, correction.capped, correction.rejected)
    columns = (torch.ones_like(none), out.entropy, out.kl, out.clipped, deviation, *rho)
    sums = torch.stack([torch.where(live, column.to(none.dtype), 0.0).double().sum() for column in columns])
    by_decile = decile_sums(tokens.decile, out.entropy, out.kl, live)
    largest = torch.where(live, rho[0], 0.0).max() if live.numel() else none.sum()
    return LossSums(out.loss, sums, torch.stack([by_decile.count.double(), by_decile.entropy, by_decile.kl]), largest)


