"""The learner's part of the configuration: loss, reference, optimizer, packing."""

from dataclasses import dataclass
from typing import Literal

from fastsched.config.checks import require


@dataclass(frozen=True)
class LearnerConfig:
    zero_stage: Literal[0, 1, 2, 3] = 1
    loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo", "opd", "rpg"] = "dapo"
    """Clipped surrogate with the denominators of GRPO, DAPO or Dr.GRPO; GSPO (one ratio a response, arXiv 2507.18071; its clip is
    near 3e-4); CISPO (clipped weight, no clipped gradient, arXiv 2506.13585). GSPO and CISPO differ off policy only. OPD: on-policy
    distillation from `teacher`, whose advantage log pi_teacher - log pi of every token takes the place of the reward's; RPG: `rpg`.
    Both average over tokens as DAPO does."""
    rpg: Literal["fkl", "ufkl", "rkl", "urkl"] = "urkl"
    """KL-regularised policy gradient (RPG, arXiv 2505.17508): forward or reverse KL to the reference, normalised or unnormalised (u)."""
    teacher: str | None = None
    """Hub name or folder of a model with the policy's tokenizer; it takes the place of the averaged policy as reference network."""
    distill: float = 0.0
    """lam in the advantage A_t - lam (log pi - log pi_teacher) of any loss; OPD has 1 and no A_t."""
    reference: Literal["average", "copy"] = "average"
    """What the KL is taken to: the averaged policy, or a hard copy of the policy renewed by `scheduler.copy_every` or `copy_kl` (RPG)."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    """Largest norm of the gradient; 0 is no limit."""
    warmup_steps: int = 0
    cooldown: float = 0.0
    """Last share of train.steps over which the learning rate falls linearly towards 0; what gradient noise moved then averages out."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the ratio: [1 - lower, 1 + upper]."""
    dual_clip: float | None = None
    kl: Literal["none", "k1", "k2", "k3", "exact"] = "exact"
    """KL to the averaged policy: estimator on the sampled token, or exact over the vocabulary; `none` skips the reference pass."""
    micro_batch_tokens: int = 4096
    """Token budget of one packed micro-batch, padding included."""
    share_prompts: bool = True
    """Pack the G responses of a prompt behind one copy of it (block mask); equal loss and gradients, fewer tokens."""
    balance: bool = True
    """Ranks exchange groups before packing, so that each trains about as many tokens; equal gradients up to rounding."""
    skip_flat_groups: bool | None = None
    """Groups whose rewards are all equal leave the learner and stay in the denominators. By default where that is exact: no teacher, and
    entropy and KL coefficients that stay 0. With `true` both terms act on the other groups only. Entropy and KL are then measured
    over the other groups."""
    drop_unsolved: bool = False
    """Groups without a single success (no reward above the scheduler's threshold) leave the gradient and the denominators after the
    scheduler has seen them (ADS, arXiv 2606.22305); solved groups stay."""
    updates_per_batch: int = 1
    """Optimizer steps on one rollout batch; more than one needs an old-log-probability pass."""
    head: Literal["triton", "cpp", "pytorch"] | None = None
    """Implementation of the fused head; by default the fastest that this device can run, and the log names it."""
    chunk_rows: int | None = None
    """Rows of logits formed at a time in the head; by default 4096 on a GPU, 128 MiB of logits on a CPU."""
    logits: Literal["bf16", "fp32"] | None = None
    """In which dtype the head's products leave the logits of a bf16 model. fp32 takes the rounding of logits out of every log-probability;
    on CUDA the products write it at no price and the passes over the rows read twice the bytes, on a CPU the products themselves are
    formed in fp32. With bf16 the target's own logit is fp32 all the same. By default fp32 on CUDA, bf16 on a CPU; a model in float32
    has fp32 logits."""
    filter_eps: float = 0.0
    """Vocabulary columns in which no token of a chunk has a gradient above this share of the token's coefficients leave the head's two
    backward products; 0 keeps all. Measured on rollouts of SmolLM2 in bf16: 2^-15 takes 0.61 of the head's time at 1.03 times the error
    of its gradient by the hidden states, 2^-14 0.56 at 1.09, 2^-13 0.52 at 1.24; the error of the weight's gradient stays."""
    nonfinite_limit: int = 3
    """Consecutive skipped updates after which the run stops with exit code 3."""

    def __post_init__(self):
        require(self.lr > 0 and self.micro_batch_tokens > 0, "learner: lr and micro_batch_tokens must be positive")
        require(0 <= self.cooldown <= 1, "learner.cooldown: must lie in [0, 1]")
        require(min(self.grad_clip, self.weight_decay, self.warmup_steps) >= 0,
                "learner: grad_clip, weight_decay and warmup_steps must be at least 0")
        require(all(0 <= beta < 1 for beta in self.betas), "learner.betas: must lie in [0, 1)")
        require(min(self.updates_per_batch, self.nonfinite_limit, 1 if self.chunk_rows is None else self.chunk_rows) >= 1,
                "learner: updates_per_batch, nonfinite_limit and chunk_rows must be at least 1")
        require(0 <= self.filter_eps < 1, "learner.filter_eps: must lie in [0, 1)")
        require(0 <= self.clip[0] < 1 and self.clip[1] >= 0, "learner.clip: needs 0 <= lower < 1 and upper >= 0")
        require((self.teacher is None) == (self.loss != "opd" and self.distill == 0),
                "learner.teacher: needed by learner.loss opd and by learner.distill, and by nothing else")
        require(self.teacher is None or self.kl == "none",
                "learner.kl: one reference network is held, and with learner.teacher it is the teacher; set learner.kl none")
        require(self.teacher is None or not self.skip_flat_groups,
                "learner.skip_flat_groups: groups with equal rewards still learn from the teacher; set it to false")
        require(self.loss != "opd" or self.distill == 0, "learner.distill: opd has its own advantage; leave distill at 0")
        require(self.loss != "rpg" or self.kl in ("k1", "k2", "k3"),
                "learner.kl: rpg takes its KL from the sampled token; k1, k2 or k3 says how it is logged")
        require(self.loss != "rpg" or self.teacher is None, "learner.teacher: rpg has no distillation term")
        require(self.dual_clip is None or self.dual_clip > 1, "learner.dual_clip: must be above 1")
