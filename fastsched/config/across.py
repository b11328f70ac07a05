"""Every check that looks at more than one section of a configuration, in one table; those of a sampler alone stand in samplers.py."""

from typing import Any

from fastsched.config.checks import require
from fastsched.config.samplers import Check

CHECKS: tuple[Check, ...] = (
    (lambda c: not c.rollout.ahead or c.scheduler.traits.ahead,
     lambda c: f"rollout.ahead: scheduler.kind {c.scheduler.kind} composes its batches from what the step before brought; set it to 0"),
    (lambda c: not c.rollout.ahead or not c.scheduler.refills,
     lambda c: "rollout.ahead: a batch sampled ahead cannot be refilled by what its own rewards say; set scheduler.refills to 0"),
    (lambda c: not c.reward.prefill or c.data.prefill is not None or c.data.task == "dataset",
     lambda c: "reward.prefill: no answer begins with anything; set data.prefill, or leave it out"),
    (lambda c: c.data.task.startswith("reasoning-gym:") or all(part.kind != "task" for part in c.reward.parts),
     lambda c: f"reward.kind: `task` needs a task with its own verifier (reasoning-gym:NAME); data.task is {c.data.task!r}"),
    (lambda c: c.learner.updates_per_batch <= c.train.prompts_per_step,
     lambda c: f"learner.updates_per_batch: {c.learner.updates_per_batch} optimizer steps on {c.train.prompts_per_step} prompts "
               "(train.prompts_per_step); each needs one at least"),
    (lambda c: c.learner.zero_stage > 0 or c.model.dtype == "float32",
     lambda c: "learner.zero_stage: stage 0 keeps no fp32 master weights; with model.dtype=bfloat16 use stage 1 or more"),
    (lambda c: c.model.dtype != "float32" or c.learner.logits != "bf16",
     lambda c: "learner.logits: a model in float32 has logits in fp32; leave it out, or set model.dtype bfloat16"),
    (lambda c: (c.rollout.dtype or c.model.dtype) != "float32" or c.rollout.head_dtype != "bf16",
     lambda c: "rollout.head_dtype: a sampler in float32 has logits in fp32; leave it out, or set rollout.dtype bfloat16"),
    (lambda c: c.model.dtype == "bfloat16" or c.model.attention != "flash_attention_2",
     lambda c: "model.attention: flash_attention_2 computes in bf16 only; set model.dtype to bfloat16, or model.attention to sdpa"),
    (lambda c: not c.learner.share_prompts or c.model.attention != "flash_attention_2",
     lambda c: "learner.share_prompts: needs a block mask, which flash_attention_2 does not take; set it to false, or model.attention "
               "to sdpa or flex_attention"),
    (lambda c: c.scheduler.kl.ceiling == 0 or c.learner.kl != "none",
     lambda c: "learner.kl: scheduler.kl may rise above 0, so an estimator is needed; set learner.kl or scheduler.kl.ceiling 0"),
    (lambda c: c.learner.loss != "opd" or c.scheduler.temporal.mode == "none" or c.scheduler.temporal.proxy != "advantage",
     lambda c: "scheduler.temporal.proxy: advantage adds to the reward's advantage, which opd does not have; choose another proxy"),
    (lambda c: not c.scheduler.kl_gate.enabled or c.learner.kl != "none",
     lambda c: "scheduler.kl_gate: gates the KL term, and learner.kl is none; choose an estimator"),
    (lambda c: not c.scheduler.kl_gate.enabled or not c.scheduler.kl.is_zero(c.scheduler.coefficients == "constant"),
     lambda c: "scheduler.kl_gate: gates the KL term, whose coefficient stays 0; raise scheduler.kl.start or scheduler.kl.ceiling"),
    (lambda c: c.scheduler.renews_copy == (c.learner.reference == "copy"),
     lambda c: "learner.reference: copy needs scheduler.copy_every or scheduler.copy_kl, and average takes neither"),
    (lambda c: not c.scheduler.renews_copy or c.learner.kl != "none",
     lambda c: "learner.reference: copy is what the KL is taken to, and learner.kl is none (as with a teacher, which is then the one "
               "reference network); choose an estimator, or leave reference at average"),
    (lambda c: not c.trains_earlier_responses or c.rollout.top_p == 1.0 and c.rollout.top_k == -1,
     lambda c: f"rollout.top_p, rollout.top_k: {'rollout.ahead' if c.rollout.ahead else f'scheduler.kind={c.scheduler.kind}'} trains "
               "responses of earlier weights against the sampler's log-probabilities, which top_p and top_k renormalise; use top_p=1, "
               "top_k=-1"),
)
"""(holds, message); the first that does not hold is what the user reads."""


def check_across(cfg: Any) -> None:
    """ConfigError for the first check that `cfg`, a Config, does not pass."""
    for holds, message in (*CHECKS, *cfg.scheduler.traits.checks):
        if not holds(cfg):
            require(False, message(cfg))
