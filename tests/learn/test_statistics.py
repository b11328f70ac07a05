"""What an update reports: deciles, quantiles, and the state that goes on after a resume."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from plain import BASE, KNOBS, MODEL, P, batch, chosen, logits_of, make, suffix

from fastsched.config import CoefficientConfig, KlGateConfig, SchedulerConfig, TemporalConfig
from fastsched.engines.models.loading import load_policy
from fastsched.engines.models.tiny import random_tiny
from fastsched.learn.statistics import decile_columns, token_quantile
from fastsched.types import Response

TP = SchedulerConfig(temporal=TemporalConfig(mode="linear", proxy="tp_score"))


def test_deciles_are_means_over_the_tokens_of_each_tenth(model_path, tmp_path):
    other = random_tiny(tmp_path / "other", tied=True, seed=5)
    learner = make(model_path, tmp_path, replace(BASE, kl="exact"))
    learner.engine.reference.model.load_state_dict(load_policy(other, MODEL).state_dict())
    responses, rewards = batch(model_path)
    responses[0].logp[0] = np.nan
    found = learner.update(responses, rewards, replace(KNOBS, temporal_s=0.5), 1).deciles
    policy, reference = load_policy(model_path, MODEL), load_policy(other, MODEL)
    tokens = []
    for i, (r, keep) in enumerate(zip(responses, suffix(responses, 0.5), strict=True)):
        with torch.no_grad():
            p, q = logits_of(policy, r).log_softmax(-1), logits_of(reference, r).log_softmax(-1)
        entropy, kl = -(p.exp() * p).sum(-1), (p.exp() * (p - q)).sum(-1)
        for t in range(len(keep)):
            kept = keep[t] and np.isfinite(rewards.flat[i])
            tokens.append((t * 10 // len(keep), kept, float(entropy[t]), float(kl[t]), -float(r.logp[t])))
    for d in range(10):
        mine = [x for x in tokens if x[0] == d]
        kept, known = [x for x in mine if x[1]], [x[4] for x in mine if np.isfinite(x[4])]
        assert found["kept"][d] == pytest.approx(len(kept) / len(mine))
        assert found["surprisal"][d] == pytest.approx(np.mean(known), rel=1e-5)
        for place, name in ((2, "entropy"), (3, "kl")):
            truth = np.mean([x[place] for x in kept]) if kept else np.nan
            assert found[name][d] == pytest.approx(truth, rel=1e-4, nan_ok=True), (name, d)
    assert found["kept"][0] == 0 and np.isnan(found["entropy"][0]) and found["kept"][9] > 0.8


def test_deciles_without_a_token_are_unknown():
    columns = decile_columns(np.zeros((6, 10)))
    assert all(np.isnan(values).all() for values in columns.values()) and list(columns) == ["kept", "entropy", "kl", "surprisal"]


@pytest.mark.parametrize("q", [0.05, 0.2, 0.8])
def test_quantile_of_all_ranks_from_one_histogram(q):
    values = np.random.default_rng(0).gamma(0.5, 1.0, 5000)
    parts = [values[:100], values[100:]]  # two ranks: what one adds up is what all have
    total = sum(np.histogram(part, 4096, (0, 16.0))[0] for part in parts)
    assert token_quantile(parts[0], q, lambda own: total.astype(float)) == pytest.approx(np.quantile(values, q), abs=1 / 128)
    assert np.isnan(token_quantile(np.zeros(0), q, lambda own: own)) and token_quantile(np.full(9, 99.0), q, lambda own: own) <= 16


def responses_of(tokens, version=0):
    return [Response(i // 4, (10, 11, 12 + i // 4), t, np.full(len(t), -2.0, np.float32), "stop", version) for i, t in enumerate(tokens)]


def test_tp_score_credit_counts_over_the_run_and_resumes(model_path, tmp_path):
    """30 always stands first and 40 last: at S = 0.5 the late one is kept wherever it stands; the state goes on after JSON."""
    rewards = np.tile([1.0, 0.0, 1.0, 0.0], (P, 1))
    learner = make(model_path, tmp_path, scheduler=TP)
    knobs = replace(KNOBS, temporal_s=0.5)
    for step in (1, 2):
        learner.update(responses_of([(30, 50 + i, 40) for i in range(16)], step - 1), rewards, knobs, step)
    assert learner.positions.scores().tokens.tolist() == [30, 40]
    odd = responses_of([(40, 30, 30)] * 16, 2)
    resumed = make(model_path, tmp_path, scheduler=TP)
    resumed.load_state_dict(json.loads(json.dumps(learner.state_dict())))
    fresh = make(model_path, tmp_path, scheduler=TP)
    kept = []
    for one in (learner, resumed, fresh):
        stats = one.update(odd, rewards, replace(knobs, temporal_s=0.55), 3)
        kept.append(np.nan_to_num(stats.deciles["kept"], nan=-1.0).tolist())
    assert kept[0] == kept[1] and kept[0][0] == 1.0 and kept[0][6] == 0.0  # 40 first is kept, 30 at the end is not
    assert kept[2] != kept[0]  # without the counts of the run the order of this batch rules
    assert json.dumps(learner.state_dict()) == json.dumps(resumed.state_dict()) != json.dumps(fresh.state_dict())


def test_counting_is_an_option(model_path, tmp_path):
    learner = make(model_path, tmp_path, tp_score=False)
    learner.update(*batch(model_path), KNOBS, 1)
    assert not len(learner.positions.keys)


def test_copy_holds_the_policy_of_the_last_renewal_and_resumes(model_path, tmp_path):
    scheduler = SchedulerConfig(copy_every=2)
    cfg = replace(BASE, kl="exact", reference="copy")
    learner = make(model_path, tmp_path, cfg, scheduler=scheduler)
    weights = lambda model: {n: p.detach().clone() for n, p in model.named_parameters()}
    same = lambda a, b: all(torch.equal(a[n], b[n]) for n in a)
    start = weights(learner.engine.policy.model)
    learner.update(*batch(model_path, 1), KNOBS, 1)
    assert same(weights(learner.engine.reference.model), start) and not same(weights(learner.engine.policy.model), start)
    before = weights(learner.engine.policy.model)
    stats = learner.update(*batch(model_path, 2), replace(KNOBS, copy_reference=True), 2)
    assert same(weights(learner.engine.reference.model), before) and stats.kl < 1e-6
    learner.engine.save(tmp_path)
    resumed = make(model_path, tmp_path, cfg, scheduler=scheduler)
    resumed.engine.load(tmp_path)
    assert same(weights(resumed.engine.reference.model), before)
    a, b = (one.update(*batch(model_path, 3), KNOBS, 3) for one in (learner, resumed))
    assert repr(a) == repr(b) and a.kl > 1e-7


def test_a_gated_update_follows_its_window_over_the_whole_response(model_path, tmp_path):
    scheduler = SchedulerConfig(kl=CoefficientConfig(0.0, 0.0, 1.0), kl_gate=KlGateConfig(enabled=True, quantile=0.5))
    learner = make(model_path, tmp_path, replace(BASE, kl="exact"), scheduler=scheduler)
    responses, rewards = batch(model_path)
    stats = learner.update(responses, rewards, replace(KNOBS, temporal_s=0.9), 1)
    model, entropies = load_policy(model_path, MODEL), []
    for r in responses:
        with torch.no_grad():
            p = logits_of(model, r).log_softmax(-1)
        entropies.append(-(p.exp() * p).sum(-1))
        assert chosen(p, r).shape == entropies[-1].shape
    assert stats.entropy_quantile == pytest.approx(float(torch.cat(entropies).quantile(0.5)), abs=2 / 256)
