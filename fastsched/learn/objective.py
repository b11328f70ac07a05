"""The loss of one micro-batch: one call into the fused head. R trained tokens, H hidden, V vocabulary."""

from dataclasses import dataclass
from typing import NamedTuple, Optional

import numpy as np
import torch
from fastsched_kernels.linear import linear_token_stats, policy_loss

from fastsched.config import LearnerConfig, RolloutConfig
from fastsched.types import Head, Knobs, MicroBatch


class Tokens(NamedTuple):
    """A micro-batch's trained tokens on the device; every field [R]."""

    target: torch.Tensor  # int64
    advantage: torch.Tensor  # float32
    weight: torch.Tensor  # float32, mask over global denominator
    sampler_logp: torch.Tensor  # float32
    old_logp: Optional[torch.Tensor]  # float32; None on policy: the ratio is one by construction
    response: torch.Tensor  # int64, the response of each token

    @classmethod
    def of(cls, micro: MicroBatch, old_logp: Optional[np.ndarray], device: torch.device) -> "Tokens":
        def move(values):
            return None if values is None else torch.from_numpy(values).to(device, non_blocking=True)

        return cls(move(micro.targets), move(micro.advantages), move(micro.token_weights), move(micro.sampler_logp), move(old_logp),
                   move(micro.responses))


class LossSums(NamedTuple):
    """Differentiable loss of the micro-batch, and detached sums over its R tokens for the log."""

    loss: torch.Tensor
    sums: torch.Tensor  # [len(SUMS)] float64, in the order of SUMS


SUMS = ("tokens", "entropy", "kl", "clipped", "deviation")


@dataclass(frozen=True)
class Objective:
    """Clipped surrogate, KL to the averaged policy and entropy bonus (kernels.md 6.1), with this step's knobs."""

    learner: LearnerConfig
    rollout: RolloutConfig
    knobs: Knobs

    def __call__(self, policy: Head, reference: Optional[Head], tokens: Tokens) -> LossSums:
        out = policy_loss(
            policy.hidden, policy.weight, tokens.target,
            advantage=tokens.advantage, token_weight=tokens.weight, old_logp=tokens.old_logp,
            ref_hidden=None if reference is None else reference.hidden,
            ref_weight=None if reference is None else reference.weight,
            ref_bias=None if reference is None else reference.bias,
            kl=self.learner.kl, kl_coef=self.knobs.kl_coef, entropy_coef=self.knobs.entropy_coef,
            clip=self.learner.clip, dual_clip=self.learner.dual_clip, surrogate="cispo" if self.learner.loss == "cispo" else "clip",
            level="sequence" if self.learner.loss == "gspo" else "token", sequence=tokens.response,
            rollout_weight=self._correction(policy, tokens), temperature=self.rollout.temperature, softcap=policy.softcap,
            bias=policy.bias, skip_flat=False, chunk_rows=self.learner.chunk_rows, implementation=self.learner.head,
        )
        with torch.no_grad():
            live = tokens.weight > 0
            deviation = (out.logp - tokens.sampler_logp).abs().nan_to_num(0.0)  # the sampler may miss a log-probability
            columns = (torch.ones_like(out.logp), out.entropy, out.kl, out.clipped.to(out.logp.dtype), deviation)
            sums = torch.stack([torch.where(live, column, 0.0).double().sum() for column in columns])
        return LossSums(out.loss, sums)

    def _correction(self, policy: Head, tokens: Tokens) -> torch.Tensor | float:
        """Truncated importance sampling min(pi_old / pi_sampler, C) per token (algorithms.md 5.1), detached."""
        if self.rollout.correction == "none":
            return 1.0
        old = tokens.old_logp if tokens.old_logp is not None else self.score(policy, tokens.target).logp
        log_ratio = (old - tokens.sampler_logp).nan_to_num(0.0).clamp(-20.0, 20.0)
        return log_ratio.exp().clamp(max=self.rollout.correction_cap)

    def score(self, policy: Head, target: torch.Tensor):
        """Log-probability and entropy [R] of `target` without gradient."""
        with torch.no_grad():
            return linear_token_stats(policy.hidden.detach(), policy.weight.detach(), target, temperature=self.rollout.temperature,
                                      softcap=policy.softcap, bias=policy.bias, chunk_rows=self.learner.chunk_rows,
                                      implementation=self.learner.head)

