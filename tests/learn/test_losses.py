"""The table of losses: the names that can be configured, what each column does, and a new loss as a row of it."""

from dataclasses import replace
from typing import get_args, get_type_hints

import numpy as np
import pytest
from plain import BASE, KNOBS, assert_same, batch, difference, gradient, make, plain_gradient, suffix

from fastsched.config import LearnerConfig
from fastsched.groups import group_advantages
from fastsched.learn.losses import LOSSES, Loss, reward_advantages, token_weights


def test_what_can_be_configured_is_the_table():
    assert get_args(get_type_hints(LearnerConfig)["loss"]) == tuple(LOSSES)


@pytest.mark.parametrize("name, expected", [
    ("dapo", [1 / 10, 1 / 10]), ("cispo", [1 / 10, 1 / 10]), ("opd", [1 / 10, 1 / 10]), ("rpg", [1 / 10, 1 / 10]),
    ("grpo", [1 / (2 * 5), 1 / (8 * 5)]), ("gspo", [1 / (2 * 5), 1 / (8 * 5)]),
    ("dr_grpo", [1 / (5 * 16), 1 / (5 * 16)]),
])
def test_token_weights_are_the_published_denominators(name, expected):
    """algorithms.md 5.2 with 2 and 8 kept tokens here, 10 kept tokens and 5 responses over all ranks, L_max 16."""
    np.testing.assert_allclose(token_weights(LOSSES[name], np.array([2, 8]), 10, 5, 16), expected)


def test_a_response_without_a_kept_token_has_a_finite_weight():
    """It is multiplied with nothing."""
    assert token_weights(LOSSES["grpo"], np.array([0]), 0, 1, 9)[0] == token_weights(LOSSES["dapo"], np.array([0]), 0, 1, 9)[0] == 1.0


@pytest.mark.parametrize("name", LOSSES)
def test_advantages_are_the_published_ones(name):
    """R - mean over the group, divided by its standard deviation but for Dr. GRPO; OPD has its teacher alone."""
    rewards = np.array([[0.0, 1.0, 0.0, 0.5], [1.0, np.nan, 0.0, 0.0]])
    expected = {"dr_grpo": group_advantages(rewards, normalise_std=False), "opd": np.zeros((2, 4))}.get(
        name, group_advantages(rewards, normalise_std=True))
    np.testing.assert_array_equal(reward_advantages(LOSSES[name], rewards), expected.reshape(-1))


def test_a_new_loss_is_a_row(model_path, tmp_path, monkeypatch):
    """GSPO's ratio of a response with DAPO's mean over all tokens, off policy, against plain PyTorch; it is neither of the two."""
    row = Loss("clip", "sequence", "tokens", "std", 0.0, None, "")
    monkeypatch.setitem(LOSSES, "gspo_over_tokens", row)
    responses, rewards = batch(model_path, version=-1)
    knobs, keep = replace(KNOBS, temporal_s=0.5, entropy_coef=0.05), suffix(responses, 0.5)
    found = {}
    for name in ("gspo_over_tokens", "gspo", "dapo"):
        learner = make(model_path, tmp_path, replace(BASE, loss=name))
        found[name] = gradient(learner, responses, rewards, knobs)[1]
        assert_same(found[name], plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=keep, old="sampler"))
    assert min(difference(found[name], found["gspo_over_tokens"]) for name in ("gspo", "dapo")) > 1e-2


def test_rpg_has_no_sequence_level_and_no_teacher():
    for change in (dict(level="sequence"), dict(distill=1.0)):
        with pytest.raises(ValueError, match="rpg"):
            replace(LOSSES["rpg"], **change)
