"""What the machine decides about dtypes: `model.dtype: auto`, and in which dtype the logits of a bf16 model are."""

from dataclasses import replace

from fastsched.config import Config


def fast_bf16() -> bool:
    """A GPU, or a processor with vector instructions for bf16. Without them a product takes about six times as long as in fp32."""
    import torch

    return torch.cuda.is_available() or torch.ops.mkldnn._is_mkldnn_bf16_supported()


def fp32_logits_are_free() -> bool:
    """Where a product of bf16 factors can write the fp32 in which it is added up."""
    import torch

    return torch.cuda.is_available()


def settled(cfg: Config) -> Config:
    """`cfg` with what this machine decides filled in; a run keeps it wherever it goes on."""
    if cfg.model.dtype == "auto":
        cfg = replace(cfg, model=replace(cfg.model, dtype="bfloat16" if fast_bf16() else "float32"))
    if cfg.model.dtype == "bfloat16" and cfg.learner.logits is None:
        cfg = replace(cfg, learner=replace(cfg.learner, logits="fp32" if fp32_logits_are_free() else "bf16"))
    if (cfg.rollout.dtype or cfg.model.dtype) == "bfloat16" and cfg.rollout.head_dtype is None:
        cfg = replace(cfg, rollout=replace(cfg.rollout, head_dtype=cfg.learner.logits or "fp32"))
    return cfg


def logits_differ(cfg: Config) -> str | None:
    """What to say where the logits of learner and sampler are of different dtypes."""
    learner = cfg.learner.logits or "fp32"
    sampler = "fp32" if (cfg.rollout.dtype or cfg.model.dtype) == "float32" else cfg.rollout.head_dtype
    if learner == sampler:
        return None
    return (f"the learner's logits are {learner} (learner.logits) and the sampler's {sampler} (rollout.head_dtype): their "
            "log-probabilities are further apart than with one dtype on both sides (ratio_deviation)")
