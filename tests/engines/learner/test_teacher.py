import json

import pytest

from fastsched.config import Config, ConfigError, LearnerConfig, ModelConfig, SchedulerConfig
from fastsched.engines.learner.teacher import load_teacher
from fastsched.engines.models.loading import load_policy
from fastsched.engines.models.tiny import random_tiny

MODEL = ModelConfig(dtype="float32")


@pytest.fixture(scope="module")
def policy_path(tmp_path_factory):
    return random_tiny(tmp_path_factory.mktemp("policy") / "tiny", tied=True, seed=0)


def test_a_teacher_of_other_weights_and_the_same_tokens_is_loaded(policy_path, tmp_path):
    path = random_tiny(tmp_path / "teacher", tied=False, seed=1)
    policy = load_policy(policy_path, MODEL)
    teacher = load_teacher(path, policy_path, policy, MODEL)
    assert teacher is not policy and teacher.get_output_embeddings().weight.shape == policy.get_output_embeddings().weight.shape


def test_another_tokenizer_is_refused_with_the_first_difference(policy_path, tmp_path):
    """The fault: two tokens of the teacher's tokenizer have each other's ids."""
    path = random_tiny(tmp_path / "teacher", tied=True, seed=1)
    tokenizer = json.loads((path / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    a, b = [t for t, i in sorted(vocabulary.items(), key=lambda x: x[1])][20:22]
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match="learner.teacher: its tokenizer is not the policy's .4 entries differ"):
        load_teacher(path, policy_path, load_policy(policy_path, MODEL), MODEL)


def test_another_head_is_refused(policy_path, tmp_path):
    path = random_tiny(tmp_path / "teacher", tied=True, seed=1)
    policy = load_policy(policy_path, MODEL)
    rows = policy.get_output_embeddings().weight.shape[0]
    policy.resize_token_embeddings(rows + 8)
    with pytest.raises(ConfigError, match=f"learner.teacher: its head has {rows} rows, the policy's {rows + 8}"):
        load_teacher(path, policy_path, policy, MODEL)


@pytest.mark.parametrize("options, words", [
    (dict(loss="opd", kl="none"), "learner.teacher: needed by learner.loss opd"),
    (dict(distill=0.5, kl="none"), "learner.teacher: needed by"),
    (dict(teacher="t", kl="none"), "by nothing else"),
    (dict(loss="opd", teacher="t", kl="exact"), "learner.kl: one reference network is held"),
    (dict(loss="opd", teacher="t", kl="none", skip_flat_groups=True), "learner.skip_flat_groups"),
    (dict(loss="opd", teacher="t", kl="none", distill=1.0), "learner.distill: opd has its own advantage"),
    (dict(loss="rpg", kl="exact"), "learner.kl: rpg takes its KL from the sampled token"),
    (dict(loss="rpg", kl="k3", dual_clip=0.5), "learner.dual_clip: must be above 1"),
])
def test_options_that_do_not_go_together_are_named(options, words):
    with pytest.raises(ConfigError, match=words):
        LearnerConfig(**options)


def test_a_scheduled_kl_needs_an_estimator_also_beside_a_teacher():
    with pytest.raises(ConfigError, match="scheduler.kl may rise above 0"):
        Config(learner=LearnerConfig(loss="opd", teacher="t", kl="none"),
               scheduler=SchedulerConfig(kl=type(SchedulerConfig().kl)(0.1, 0.0, 0.5)))
