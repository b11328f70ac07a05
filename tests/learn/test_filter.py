"""learner.filter_eps: vocabulary columns without weight leave the backward products of the head, whichever way the loss takes."""

from dataclasses import replace

import pytest
from fastsched_kernels import chunks
from plain import BASE, KNOBS, batch, difference, gradient, make

from fastsched.config import ConfigError, LearnerConfig, SchedulerConfig


@pytest.mark.parametrize("loss", ["dapo", "gspo", "rpg"])
def test_filtered_columns_leave_the_gradient(model_path, tmp_path, monkeypatch, loss):
    """One pass, recomputed logits, a loss of its own: the gradient changes, by about the share of the dlogits that was left out."""
    cfg = replace(BASE, loss=loss, kl="k3" if loss == "rpg" else "none", reference="copy" if loss == "rpg" else "average")
    scheduler = SchedulerConfig(copy_every=100) if loss == "rpg" else None
    responses, rewards = batch(model_path)
    dropped, accumulate = [], chunks.accumulate_filtered
    monkeypatch.setattr(chunks, "accumulate_filtered", lambda *args: dropped.append(float(accumulate(*args))) or dropped[-1])
    learn = lambda eps: gradient(make(model_path, tmp_path, replace(cfg, filter_eps=eps), scheduler=scheduler), responses, rewards, KNOBS)
    (exact_stats, exact), none_dropped = learn(0.0), dropped.copy()
    stats, filtered = learn(0.004)  # of 256 columns with about 1/256 each
    assert none_dropped == [] and dropped and all(0 < share < 0.5 for share in dropped)
    assert 1e-4 < difference(filtered, exact) < 2 * max(dropped)
    assert stats.loss == exact_stats.loss and stats.entropy == exact_stats.entropy


@pytest.mark.parametrize("eps", [-0.001, 1.0])
def test_a_share_outside_its_range_is_refused(eps):
    with pytest.raises(ConfigError, match=r"learner.filter_eps: must lie in \[0, 1\)"):
        LearnerConfig(filter_eps=eps)
