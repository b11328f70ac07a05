"""Groups that leave the learner: flat ones, which have no gradient, and with `drop_unsolved` those without a success."""

from dataclasses import replace

import numpy as np
import pytest
from test_learner import BASE, KNOBS, ROUNDING, G, batch, distance, make, train, weights

from fastsched.config import CoefficientConfig, Config, LearnerConfig, LogConfig, RolloutConfig, SchedulerConfig
from fastsched.learn import snr


def test_skipped_flat_groups_stay_in_the_denominators(model_path, tmp_path):
    """Without entropy and KL term a flat group has no gradient: leaving it out changes nothing but the work (kernels.md 39)."""
    quiet = replace(KNOBS, entropy_coef=0.0, kl_coef=0.0)
    plain, skipping = make(model_path, tmp_path), make(model_path, tmp_path, replace(BASE, skip_flat_groups=True))
    a, b = train(plain, quiet), train(skipping, quiet)
    assert distance(weights(plain), weights(skipping)) < ROUNDING and b.grad_norm == pytest.approx(a.grad_norm, rel=1e-3)
    assert b.kept_fraction < a.kept_fraction and b.flat_groups == a.flat_groups > 0
    by_default = make(model_path, tmp_path, replace(BASE, skip_flat_groups=None))
    assert repr(train(by_default, quiet)) == repr(b)
    moving = make(model_path, tmp_path, replace(BASE, skip_flat_groups=None), kl=CoefficientConfig(0.0, 0.0, 0.1))
    assert repr(train(moving, quiet)) == repr(a)
    resumed = [train(make(model_path, tmp_path, replace(BASE, skip_flat_groups=skip))) for skip in (None, False)]  # lambda_H is not 0
    assert repr(resumed[0]) == repr(resumed[1])


@pytest.mark.parametrize("skip", [True, False])
def test_snr_knows_which_share_of_the_groups_is_left(model_path, tmp_path, monkeypatch, skip):
    """Of all groups with a score, and by difficulty bin."""
    responses, rewards = batch(1)
    rewards[:] = np.tile([0.0, 1.0], rewards.shape[1])[:rewards.shape[1]]
    rewards[[0, 2]], rewards[4] = 1.0, np.nan  # two flat groups of bin 0, one mixed of each bin; 4 has no score
    bins, found = np.array([0, 1] * 8), []
    learner = make(model_path, tmp_path, replace(BASE, skip_flat_groups=skip))
    learner = replace(learner, bins=bins, cfg=replace(learner.cfg, log=LogConfig(snr_bins=True)))
    monkeypatch.setattr(snr, "gradient_snr", lambda squares, groups, norm, share: found.append(share) or 0.0)
    monkeypatch.setattr(snr, "bin_snr", lambda gradients, share: found.append(share) or 0.0)
    learner.update(responses, rewards, replace(KNOBS, entropy_coef=0.0, kl_coef=0.0), 1)
    groups = [b for g, b in enumerate(bins[:len(rewards)].tolist()) if g != 4]
    left = [b for g, b in enumerate(bins[:len(rewards)].tolist()) if g not in (0, 2, 4)]
    assert found == ([len(left) / len(groups), *(left.count(b) / groups.count(b) for b in (0, 1))] if skip else [1.0] * 3)


def test_flat_groups_are_skipped_by_default_where_they_can_never_have_a_gradient():
    may, zero = CoefficientConfig(0.0, 0.0, 0.1), CoefficientConfig()
    distilled = replace(BASE, skip_flat_groups=None, teacher="t", kl="none", distill=0.5)
    cases = [(zero, "rules", True), (may, "rules", False), (may, "constant", True), (CoefficientConfig(0.01, 0.0, 0.1), "constant", False)]
    for entropy, coefficients, expected in cases:
        scheduler = SchedulerConfig(entropy=entropy, coefficients=coefficients)
        assert Config(scheduler=scheduler).skips_flat_groups == expected
        assert not Config(scheduler=scheduler, learner=distilled).skips_flat_groups
    assert Config(scheduler=SchedulerConfig(entropy=may), learner=LearnerConfig(skip_flat_groups=True)).skips_flat_groups
    assert not Config(rollout=RolloutConfig(correction="token_tis", correction_divide=True)).skips_flat_groups


@pytest.mark.parametrize("updates", [1, 2])
def test_unsolved_groups_leave_the_gradient_and_the_denominators(model_path, tmp_path, updates):
    """algorithms.md 2.4: as if the all-wrong prompts had not been in the batch; all-correct ones stay, failed scores are neither."""
    cfg = replace(BASE, drop_unsolved=True, updates_per_batch=updates)
    responses, rewards = batch(1)
    rewards[3], rewards[4] = 0.0, [np.nan, 0.5, 0.5, 0.2]  # 0 and 2 are solved in full and in part; 3 not, nor 4, just up to the threshold
    keep = [0, 1, 2]
    dropping, plain = make(model_path, tmp_path, cfg), make(model_path, tmp_path, replace(BASE, updates_per_batch=updates))
    a = dropping.update(responses, rewards, KNOBS, 1)
    b = plain.update([r for p in keep for r in responses[p * G:(p + 1) * G]], rewards[keep], KNOBS, 1)
    assert distance(weights(dropping), weights(plain)) < ROUNDING and a.entropy == pytest.approx(b.entropy)
    assert a.kept_fraction < b.kept_fraction
    whole = make(model_path, tmp_path, replace(BASE, updates_per_batch=updates))
    whole.update(responses, rewards, KNOBS, 1)
    assert distance(weights(dropping), weights(whole)) > 1e-4
    lower = make(model_path, tmp_path, cfg)
    lower.update(responses, rewards, replace(KNOBS, r_threshold=0.4), 1)  # the fourth counts as solved now
    assert distance(weights(dropping), weights(lower)) > 1e-4


def test_a_batch_without_a_solved_group_is_a_step_without_gradient(model_path, tmp_path):
    learner = make(model_path, tmp_path, replace(BASE, drop_unsolved=True))
    responses, rewards = batch(1)
    before = weights(learner)
    stats = learner.update(responses, np.zeros_like(rewards), KNOBS, 1)
    assert stats.skipped == 0 and distance(before, weights(learner)) == 0
