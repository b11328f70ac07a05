"""Rows of pitfalls.md that the learner answers for, on real DeepSpeed, one rank."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_learner import BASE, KNOBS, MODEL, G, batch, distance, make, weights

from fastsched.config import RolloutConfig
from fastsched.engines.models.loading import load_policy
from fastsched.learn import batching

SHORT = RolloutConfig(responses=G, max_new_tokens=8)


def measured(stats) -> str:
    """All statistics but the sampler's own surprisal, which is of every token."""
    return repr(replace(stats, deciles={k: v for k, v in stats.deciles.items() if k != "surprisal"}))


def after_one_update(model_path, tmp_path, change, *, knobs=KNOBS, rollout=SHORT, loss="dapo"):
    """(weights, statistics) after one update on the responses that `change` made of the batch's."""
    learner = make(model_path, tmp_path, replace(BASE, loss=loss), rollout)
    responses, rewards = batch(1)
    stats = learner.update([change(r) for r in responses], rewards, knobs, 1)
    return weights(learner), stats


@pytest.mark.parametrize("spoiled", [-1002.0, -np.inf, np.nan])
def test_a4_a_token_that_is_not_trained_may_have_any_sampler_logp(model_path, tmp_path, spoiled):
    """Masked before exp: the cut tokens' ratio would be infinite, and 0 * inf would poison weights and statistics."""
    cut = replace(KNOBS, temporal_s=0.6)
    rollout = replace(SHORT, correction="token_tis")

    def spoil(response):
        logp = response.logp.copy()
        logp[:min(int(np.floor(len(logp) * 0.6 + 1e-6)), len(logp) - 1)] = spoiled
        return replace(response, logp=logp)

    plain, a = after_one_update(model_path, tmp_path, lambda r: r, knobs=cut, rollout=rollout)
    other, b = after_one_update(model_path, tmp_path, spoil, knobs=cut, rollout=rollout)
    assert distance(plain, other) == 0 and measured(a) == measured(b) and a.kept_fraction < 1


def test_a4_a_trained_token_that_the_sampler_found_impossible_is_bounded(model_path, tmp_path):
    rollout = replace(SHORT, correction="token_tis", correction_cap=2.0)
    after, stats = after_one_update(model_path, tmp_path, lambda r: replace(r, logp=np.full_like(r.logp, -1002.0)), rollout=rollout)
    assert all(w.isfinite().all() for w in after.values()) and stats.skipped == 0 and np.isfinite(stats.grad_norm)


def test_a5_a_logp_that_never_came_counts_as_equal(model_path, tmp_path):
    """Its importance weight is exactly 1: as without any correction."""
    missing = lambda r: replace(r, logp=np.full_like(r.logp, np.nan))
    corrected, stats = after_one_update(model_path, tmp_path, missing, rollout=replace(SHORT, correction="token_tis"))
    plain, _ = after_one_update(model_path, tmp_path, missing)
    assert distance(corrected, plain) < 1e-7 and stats.ratio_deviation == 0 and stats.skipped == 0


def test_a7_temperature_stands_on_both_sides(model_path, tmp_path):
    """Responses scored at T = 0.6 by the model itself have ratio 1 at T = 0.6, and at T = 1 are as far off as its log-probabilities."""
    model, apart = load_policy(model_path, MODEL), []

    def scored(response):
        ids = torch.tensor([[*response.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logits = model(ids).logits[0, len(response.prompt_ids) - 1:-1].float()
        target = torch.tensor(response.token_ids)[:, None]
        cold, warm = ((logits / t).log_softmax(-1).gather(1, target)[:, 0] for t in (0.6, 1.0))
        apart.append((cold - warm).abs())
        return replace(response, logp=cold.numpy())

    _, same = after_one_update(model_path, tmp_path, scored, rollout=replace(SHORT, temperature=0.6))
    apart.clear()
    _, other = after_one_update(model_path, tmp_path, scored, rollout=SHORT)
    used = [a for a, reward in zip(apart, batch(1)[1].flat, strict=True) if np.isfinite(reward)]
    assert same.ratio_deviation < 1e-5 and other.ratio_deviation == pytest.approx(float(torch.cat(used).mean()), rel=1e-3)
    assert other.ratio_deviation > 1e-3


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo"])
def test_c8_what_stands_in_the_padding_does_not_matter(model_path, tmp_path, monkeypatch, loss):
    plain, a = after_one_update(model_path, tmp_path, lambda r: r, loss=loss)
    seen = []

    def padded_with_noise(*args, **options):
        out = []
        for micro in pack(*args, **options):
            ids = np.where(micro.group_ids == -1, 77, micro.input_ids)
            seen.append(int((ids != micro.input_ids).sum()))
            out.append(replace(micro, input_ids=ids))
        return out

    pack = batching.pack
    monkeypatch.setattr(batching, "pack", padded_with_noise)
    other, b = after_one_update(model_path, tmp_path, lambda r: r, loss=loss)
    assert sum(seen) > 0 and distance(plain, other) == 0 and repr(a) == repr(b)


def test_c12_a_truncated_response_counts_like_any_other(model_path, tmp_path):
    """The policy chosen here: it stays in its group's mean and in the loss; a reward may tell it apart, the learner does not."""
    plain, a = after_one_update(model_path, tmp_path, lambda r: r)
    other, b = after_one_update(model_path, tmp_path, lambda r: replace(r, finish_reason="length"))
    assert distance(plain, other) == 0 and repr(a) == repr(b)


def test_k3_the_mismatch_is_logged_as_it_is_and_not_as_corrected(model_path, tmp_path):
    _, raw = after_one_update(model_path, tmp_path, lambda r: r)
    _, corrected = after_one_update(model_path, tmp_path, lambda r: r,
                                    rollout=replace(SHORT, correction="token_tis", correction_cap=1e-3))
    assert raw.ratio_deviation == corrected.ratio_deviation > 0.1
