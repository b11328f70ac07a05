"""The teacher of on-policy distillation: another model over the policy's own tokens."""

from pathlib import Path

from torch import nn

from fastsched.config import ConfigError, ModelConfig, require
from fastsched.engines.models.loading import backbone_and_head, load_policy, load_tokenizer


def load_teacher(path: Path, policy_path: Path, policy: nn.Module, cfg: ModelConfig) -> nn.Module:
    """The causal language model in `path`, checked against the policy: same tokenizer, same vocabulary, same form of logits.

    Raises ConfigError naming learner.teacher.
    """
    own, other = load_tokenizer(policy_path, cfg), load_tokenizer(path, cfg, "learner.teacher")
    if own.get_vocab() != other.get_vocab():
        differ = sorted(set(own.get_vocab().items()) ^ set(other.get_vocab().items()))
        raise ConfigError(f"learner.teacher: its tokenizer is not the policy's ({len(differ)} entries differ, the first is {differ[0]}); "
                          "token-level distillation needs the same token ids")
    teacher = load_policy(path, cfg, "learner.teacher")
    ours, theirs = backbone_and_head(policy), backbone_and_head(teacher)
    require(len(ours.weight) == len(theirs.weight),
            f"learner.teacher: its head has {len(theirs.weight)} rows, the policy's {len(ours.weight)}; resize the padded vocabulary")
    require(theirs.bias is None and ours.softcap == theirs.softcap,
            "learner.teacher: its head has a bias, or another softcap than the policy's, which the fused loss does not support")
    return teacher
