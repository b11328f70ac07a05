import numpy as np
import pytest

from fastsched.groups import flat_groups, group_advantages, mixed_groups, successes


def test_formula_on_a_group():
    got = group_advantages(np.array([[1.0, 0.0, 0.0, 0.0]]), normalise_std=True)
    std = np.sqrt(3 / 16)
    np.testing.assert_allclose(got, [[0.75 / (std + 1e-6), *[-0.25 / (std + 1e-6)] * 3]], rtol=1e-12)


def test_dr_grpo_keeps_the_scale_of_the_reward():
    np.testing.assert_allclose(group_advantages(np.array([[4.0, 0.0]]), normalise_std=False), [[2.0, -2.0]])


@pytest.mark.parametrize("normalise", [True, False])
def test_failed_scores_cost_only_themselves(normalise):
    """pitfalls A12: one NaN reward must not make its group NaN."""
    got = group_advantages(np.array([[1.0, 0.0, np.nan, 1.0], [np.nan] * 4]), normalise_std=normalise)
    assert np.isfinite(got).all() and got[0, 2] == 0 and not got[1].any()
    np.testing.assert_allclose(got[0, [0, 1, 3]], group_advantages(np.array([[1.0, 0.0, 1.0]]), normalise_std=normalise)[0])


def test_no_monster_advantage_from_cancellation():
    """pitfalls A9: E[x^2] - mean^2 in fp32 turned this group into -2075; two passes in fp64 keep it at its true size."""
    rewards = np.array([[0.0, *[0.95] * 7]])
    got = group_advantages(rewards, normalise_std=True)
    centred = rewards - rewards.mean()
    np.testing.assert_allclose(got, centred / (np.sqrt((centred**2).mean()) + 1e-6), rtol=1e-12)
    assert np.abs(got).max() < 3


def test_flat_groups_have_exactly_no_advantage():
    """0.1 + 0.2 style rounding of the mean must not leave a residue that the division by std + 1e-6 blows up."""
    rewards = np.array([[0.1] * 7, [1.0] * 7, [0.3, 0.3, 0.3, 0.3, 0.3, 0.3, np.nan]])
    assert flat_groups(rewards).all() and not group_advantages(rewards, normalise_std=True).any()
    assert not flat_groups(np.array([[0.0, 1.0, np.nan]]))[0]


@pytest.mark.parametrize("one", [0.7, 1e-9, 1e25, -3.3])
def test_rewards_that_are_equal_up_to_rounding_make_a_flat_group(one):
    """0.7 from an fp32 model and from Python: the difference divided by its own deviation is an advantage of 1."""
    rewards = np.array([[one, float(np.float32(one)), one, one], [one, one * 1.001, one, one]])
    assert flat_groups(rewards).tolist() == [True, False]
    assert not group_advantages(rewards, normalise_std=True)[0].any()


def test_success_counts_scored_responses_above_the_threshold():
    rewards = np.array([[1.0, 0.6, 0.5, np.nan], [0.2, np.nan, np.nan, np.nan], [np.nan] * 4])
    good, scored = successes(rewards, 0.5)
    assert good.tolist() == [2, 0, 0] and scored.tolist() == [3, 1, 0]


def test_a_group_is_mixed_when_some_succeed_and_some_do_not():
    rewards = np.array([[1.0, 0.6], [1.0, 0.4], [0.2, 0.4], [1.0, np.nan], [np.nan, np.nan]])
    assert mixed_groups(rewards, 0.5).tolist() == [False, True, False, False, False]
    assert mixed_groups(rewards, 0.7).tolist() == [True, True, False, False, False]
