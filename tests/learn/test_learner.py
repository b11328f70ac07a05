"""The learner on real DeepSpeed, one rank: against plain PyTorch, and against itself under every split that must not matter."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import EPS, smooth

from fastsched.config import Config, LearnerConfig, ModelConfig, RolloutConfig, SchedulerConfig, TemporalConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.models.loading import load_policy
from fastsched.groups import group_advantages
from fastsched.learn.batching import mini_batches, scored_samples
from fastsched.learn.credit import Credit, token_credit
from fastsched.learn.learner import Learner, NonFiniteLimit, learning_rate
from fastsched.learn.objective import StepObjective
from fastsched.learn.scoring import old_logp, score_responses
from fastsched.types import Knobs, Response

MODEL = ModelConfig(dtype="float32")
KNOBS = Knobs(weights=(), r_threshold=0.5, entropy_coef=0.01, kl_coef=0.02, ema_alpha=0.9, lr_scale=1.0, temporal_s=0.0, rule="")
BASE = LearnerConfig(zero_stage=1, lr=1e-2, kl="exact", micro_batch_tokens=4096, share_prompts=False, grad_clip=0.5,
                     skip_flat_groups=False)  # the knobs of these tests are not those of their scheduler
P, G = 5, 4
ROUNDING = 2e-6
"""Of weights of about 1 after two updates in another order of sums."""


def batch(seed=0):
    rng = np.random.default_rng(seed)
    responses = []
    for row in range(P):
        prompt = (*range(10, 16), *rng.integers(5, 200, rng.integers(2, 9)).tolist())  # all begin alike
        for _ in range(G):
            n = int(rng.integers(1, 8))
            tokens, logp = tuple(rng.integers(5, 200, n).tolist()), rng.normal(-2, 1, n).astype(np.float32)
            responses.append(Response(row, prompt, tokens, logp, "stop", seed - 1))  # of the step of that number
    rewards = rng.integers(0, 2, (P, G)).astype(float)
    rewards[0], rewards[1, 2] = 1.0, np.nan  # a flat group and a failed score
    rewards[2] = [0, 1, 0, 0]
    return responses, rewards


def make(model_path, tmp_path, learner=BASE, rollout=None, proxy="suffix", **scheduler):
    cfg = Config(model=MODEL, learner=learner, rollout=rollout or RolloutConfig(responses=G, max_new_tokens=8),
                 scheduler=SchedulerConfig(temporal=TemporalConfig(mode="linear", proxy=proxy), **scheduler))
    return Learner(smooth(DeepSpeedLearner(load_policy(model_path, MODEL), cfg.learner, MODEL)), cfg, tmp_path)


def weights(learner):
    return {name: w.clone() for name, w in learner.engine.named_weights()}


def train(learner, knobs=KNOBS, steps=2):
    return [learner.update(*batch(step), knobs, step) for step in range(1, steps + 1)][-1]


def distance(a, b):
    return max(float((a[name] - b[name]).abs().max()) for name in a)


def plain_update(model_path, learner: LearnerConfig, knobs, steps=1):
    """The same objective in ordinary PyTorch: one padded-free forward for each response, full logits, autograd, AdamW."""
    model, reference = load_policy(model_path, MODEL), load_policy(model_path, MODEL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, eps=EPS)
    for step in range(1, steps + 1):
        responses, rewards = batch(step)
        advantages = group_advantages(rewards, normalise_std=learner.loss != "dr_grpo").reshape(-1)
        used = [i for i in range(len(responses)) if np.isfinite(rewards.flat[i])]
        cut = {i: min(int(np.floor(len(responses[i].token_ids) * knobs.temporal_s + 1e-6)), len(responses[i].token_ids) - 1) for i in used}
        total = sum(len(responses[i].token_ids) - cut[i] for i in used)
        loss = 0.0
        for i in used:
            r, keep = responses[i], slice(cut[i], None)
            ids = torch.tensor([[*r.prompt_ids, *r.token_ids]])
            at = slice(len(r.prompt_ids) - 1, ids.shape[1] - 1)
            logp = model(ids).logits[0, at].log_softmax(-1)[keep]
            with torch.no_grad():
                ref = reference(ids).logits[0, at].log_softmax(-1)[keep]
            chosen = logp.gather(1, torch.tensor(r.token_ids)[keep, None])[:, 0]
            entropy, kl = -(logp.exp() * logp).sum(-1), (logp.exp() * (logp - ref)).sum(-1)
            token = -(chosen - chosen.detach()).exp() * advantages[i] + knobs.kl_coef * kl - knobs.entropy_coef * entropy
            denominator = {"dapo": total, "grpo": len(used) * len(chosen), "dr_grpo": len(used) * 8}[learner.loss]
            loss = loss + token.sum() / denominator
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), learner.grad_clip)
        optimizer.step()
        optimizer.zero_grad()
    return {name: p.detach() for name, p in model.named_parameters()}


@pytest.mark.parametrize("loss", ["dapo", "grpo", "dr_grpo"])
@pytest.mark.parametrize("s", [0.0, 0.6])
def test_one_update_equals_plain_pytorch(model_path, tmp_path, loss, s):
    cfg, knobs = replace(BASE, loss=loss, share_prompts=True, micro_batch_tokens=64), replace(KNOBS, temporal_s=s)
    learner = make(model_path, tmp_path, cfg)
    before = weights(learner)
    learner.update(*batch(1), knobs, 1)
    truth = plain_update(model_path, cfg, knobs)
    assert distance(before, truth) > 1000 * ROUNDING > 1000 * distance(weights(learner), truth)


@pytest.mark.parametrize("change", [
    dict(micro_batch_tokens=40), dict(share_prompts=True), dict(share_prompts=True, micro_batch_tokens=48),
    dict(zero_stage=0), dict(zero_stage=2, micro_batch_tokens=40), dict(zero_stage=3, micro_batch_tokens=40), dict(chunk_rows=7),
], ids=str)
def test_what_must_not_matter(model_path, tmp_path, change):
    """pitfalls D1-D4: micro-batch split, packing, ZeRO stage and chunking leave weights, average and statistics alone."""
    plain, split = make(model_path, tmp_path), make(model_path, tmp_path, replace(BASE, **change))
    a, b = train(plain), train(split)
    assert distance(weights(plain), weights(split)) < ROUNDING
    assert distance(dict(plain.engine.average_weights()), dict(split.engine.average_weights())) < ROUNDING
    for name in ("loss", "entropy", "kl", "drift", "grad_norm", "ratio_deviation", "kept_fraction", "flat_groups"):
        assert getattr(a, name) == pytest.approx(getattr(b, name), rel=2e-3, abs=1e-6), name


@pytest.mark.parametrize("loss, base", [("gspo", "grpo"), ("cispo", "dapo")])
def test_gspo_and_cispo_differ_off_policy_only(model_path, tmp_path, loss, base):
    for updates, alike in ((1, True), (2, False)):
        options = dict(updates_per_batch=updates, clip=(0.01, 0.01))
        runs = [make(model_path, tmp_path, replace(BASE, loss=kind, **options)) for kind in (loss, base)]
        for run in runs:
            run.update(*batch(1), KNOBS, 1)
        assert (distance(*map(weights, runs)) < ROUNDING) == alike


@pytest.mark.parametrize("change", [
    dict(loss="grpo"), dict(loss="dr_grpo"), dict(kl="k3"), dict(kl="none"), dict(updates_per_batch=2), dict(weight_decay=0.5),
    dict(betas=(0.5, 0.9)), dict(lr=2e-3), dict(warmup_steps=10), dict(grad_clip=0.01),
], ids=str)
def test_every_option_changes_the_result(model_path, tmp_path, change):
    plain, changed = make(model_path, tmp_path), make(model_path, tmp_path, replace(BASE, **change))
    knobs = replace(KNOBS, kl_coef=0.0 if change.get("kl") == "none" else 0.5)
    train(plain, replace(KNOBS, kl_coef=0.5)), train(changed, knobs)
    assert distance(weights(plain), weights(changed)) > 10 * ROUNDING


@pytest.mark.parametrize("change", [
    dict(entropy_coef=0.5), dict(kl_coef=5.0), dict(lr_scale=0.1), dict(temporal_s=0.9), dict(ema_alpha=0.1),
], ids=str)
def test_every_knob_changes_the_result(model_path, tmp_path, change):
    plain, changed = make(model_path, tmp_path), make(model_path, tmp_path)
    train(plain), train(changed, replace(KNOBS, **change))
    assert distance(dict(plain.engine.average_weights()), dict(changed.engine.average_weights())) > 10 * ROUNDING


def test_clip_matters_once_the_policy_has_moved(model_path, tmp_path):
    wide = make(model_path, tmp_path, replace(BASE, updates_per_batch=2, lr=2e-2))
    tight = make(model_path, tmp_path, replace(BASE, updates_per_batch=2, lr=2e-2, clip=(1e-4, 1e-4)))
    a, b = train(wide, steps=1), train(tight, steps=1)
    assert b.clip_fraction > a.clip_fraction and distance(weights(wide), weights(tight)) > 10 * ROUNDING


def test_truncated_importance_sampling_weighs_tokens(model_path, tmp_path):
    rollout = RolloutConfig(responses=G, max_new_tokens=8)
    runs = [make(model_path, tmp_path, rollout=r) for r in (rollout, replace(rollout, correction="token_tis"),
                                                            replace(rollout, correction="token_tis", correction_cap=1e-3))]
    for run in runs:
        train(run)
    assert distance(weights(runs[0]), weights(runs[1])) > 10 * ROUNDING and distance(weights(runs[1]), weights(runs[2])) > 10 * ROUNDING


def test_average_and_drift_follow_their_formula(model_path, tmp_path):
    learner = make(model_path, tmp_path)
    start = weights(learner)
    stats = train(learner, steps=1)
    now, average = weights(learner), dict(learner.engine.average_weights())
    for name in start:
        torch.testing.assert_close(average[name], 0.9 * start[name] + 0.1 * now[name], rtol=1e-5, atol=1e-7)
    norm = lambda tensors: float(sum(t.double().square().sum() for t in tensors)) ** 0.5
    assert stats.drift == pytest.approx(norm([now[n] - average[n] for n in now]) / norm(average.values()), rel=1e-4)
    assert stats.kl < 1e-6 and train(learner, steps=2).kl > 1e-6  # the reference is the average, equal to the policy at first


def test_the_average_moves_after_every_optimizer_step(model_path, tmp_path, monkeypatch):
    """control_plane.md 4: two optimizer steps on a batch are two moves of the average."""
    learner = make(model_path, tmp_path, replace(BASE, updates_per_batch=2))
    expected, move = weights(learner), learner.engine.update_average

    def recorded(alpha):
        for name, now in weights(learner).items():
            expected[name] = alpha * expected[name] + (1 - alpha) * now
        return move(alpha)

    monkeypatch.setattr(learner.engine, "update_average", recorded)
    start = weights(learner)
    train(learner, steps=1)
    average, end = dict(learner.engine.average_weights()), weights(learner)
    for name in start:
        torch.testing.assert_close(average[name], expected[name], rtol=1e-5, atol=1e-7)
    assert distance(average, {name: 0.9 * start[name] + 0.1 * end[name] for name in start}) > 1e-6


def test_nonfinite_gradient_is_skipped_dumped_counted_and_stops(model_path, tmp_path):
    """The fault: one parameter's gradient turns NaN for as long as the hook stands."""
    learner = make(model_path, tmp_path, replace(BASE, nonfinite_limit=2))
    before = weights(learner)
    hook = next(learner.engine.policy.parameters()).register_hook(lambda g: torch.full_like(g, float("nan")))
    stats = learner.update(*batch(1), KNOBS, 1)
    assert stats.skipped == 1 and np.isnan(stats.grad_norm) and distance(before, weights(learner)) == 0
    saved = np.load(tmp_path / "nonfinite-step-1-rank-0.npz")
    assert saved["0.targets"].size == saved["0.rows"].size > 0
    with pytest.raises(NonFiniteLimit, match="nonfinite_limit"):
        learner.update(*batch(2), KNOBS, 2)
    hook.remove()
    assert learner.update(*batch(3), KNOBS, 3).skipped == 0 and distance(before, weights(learner)) > 1e-4
    assert learner.skipped_in_row == 0


def test_all_scores_failed_is_a_step_without_gradient(model_path, tmp_path):
    """pitfalls C2, A12: nothing to train on is finite, moves nothing, and still takes part in every collective."""
    learner = make(model_path, tmp_path)
    responses, rewards = batch(1)
    before = weights(learner)
    stats = learner.update(responses, np.full_like(rewards, np.nan), KNOBS, 1)
    assert stats.skipped == 0 and distance(before, weights(learner)) == 0 and stats.flat_groups == 1.0


@pytest.mark.parametrize("stage", [0, 1, 3])
def test_save_and_load_continue_bit_for_bit(model_path, tmp_path, stage):
    straight, stopped = (make(model_path, tmp_path, replace(BASE, zero_stage=stage)) for _ in range(2))
    train(stopped)
    stopped.engine.save(tmp_path)
    train(straight)
    resumed = make(model_path, tmp_path, replace(BASE, zero_stage=stage))
    resumed.engine.load(tmp_path)
    a, b = straight.update(*batch(9), KNOBS, 9), resumed.update(*batch(9), KNOBS, 9)
    assert repr(a) == repr(b) and distance(weights(straight), weights(resumed)) == 0


def test_logp_is_the_models(model_path, tmp_path):
    learner, ids = make(model_path, tmp_path), [7, 30, 41, 9, 120]
    with torch.no_grad():
        truth = load_policy(model_path, MODEL)(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    np.testing.assert_allclose(learner.logp(ids), truth[range(4), ids[1:]].numpy(), atol=2e-6)


def test_learning_rate_warms_up_holds_and_cools_down():
    cfg = Config(learner=replace(BASE, lr=1.0, warmup_steps=2, cooldown=0.3))  # of 100 steps
    rates = [learning_rate(cfg, step, KNOBS) for step in (1, 2, 70, 71, 86, 100)]
    assert rates == pytest.approx([0.5, 1.0, 1.0, 30 / 31, 15 / 31, 1 / 31])


@pytest.mark.parametrize("share", [False, True])
def test_the_entropy_proxy_keeps_the_most_uncertain_tokens(model_path, tmp_path, share):
    """algorithms.md 1.4: ceil((1 - S) L) tokens of each response, by the entropy of the policy before the update."""
    learner = make(model_path, tmp_path, replace(BASE, share_prompts=share, micro_batch_tokens=64), proxy="entropy")
    responses, _ = batch(1)
    knobs, lengths = replace(KNOBS, temporal_s=0.6), np.array([len(r.token_ids) for r in responses])
    scores = score_responses(learner.engine, learner.cfg, StepObjective(learner.cfg.learner, learner.cfg.rollout, knobs), responses)
    kept = token_credit(learner.cfg.scheduler, knobs, lengths, np.zeros(len(lengths)), entropy=scores.entropy, tp_score=None, seeds=[]).keep
    model = load_policy(model_path, MODEL)
    for response, keep in zip(responses, np.split(kept, np.cumsum(lengths)[:-1]), strict=True):
        ids = torch.tensor([[*response.prompt_ids, *response.token_ids]])
        with torch.no_grad():
            logp = model(ids).logits[0, len(response.prompt_ids) - 1:-1].log_softmax(-1)
        entropy = -(logp.exp() * logp).sum(-1).numpy()
        assert keep.sum() == int(np.ceil(0.4 * len(keep) - 1e-6))
        assert entropy[keep].min() > entropy[~keep].max(initial=0) - 1e-5  # whichever of two that rounding alone tells apart


def test_every_proxy_trains_other_tokens_and_none_matters_at_the_end_of_the_schedule(model_path, tmp_path):
    after = {}
    for proxy in ("suffix", "prefix", "entropy", "random"):
        learner = make(model_path, tmp_path, proxy=proxy)
        cut, rest = (learner.update(*batch(step), replace(KNOBS, temporal_s=s), step) for step, s in ((1, 0.6), (2, 0.0)))
        assert 0.2 < cut.kept_fraction < 0.75 < rest.kept_fraction
        after[proxy] = weights(learner)
    pairs = [(a, b) for a in after for b in after if a < b]
    assert min(distance(after[a], after[b]) for a, b in pairs) > 10 * ROUNDING


def test_e8_a_rank_without_a_response_goes_through_every_pass(model_path, tmp_path):
    """What other ranks do at the same time it must do too: a scoring pass, old log-probabilities of its own or of the sampler, as many
    optimizer steps and micro-batches."""
    learner = make(model_path, tmp_path, replace(BASE, updates_per_batch=2, balance=False))
    engine, cfg, credit = learner.engine, learner.cfg, Credit(np.zeros(0, bool), np.zeros(0), None)
    for bypass in (False, True):
        objective = StepObjective(cfg.learner, cfg.rollout, KNOBS, bypass=bypass)
        assert score_responses(engine, cfg, objective, []).entropy.shape == (0,)
        assert old_logp(engine, cfg, objective, [], None, credit.keep).shape == (0,)
    assert scored_samples([], np.zeros((0, G)), credit, np.zeros(0, np.float32), None) == []
    other = SimpleNamespace(rank=1, world_size=2, all_reduce=lambda own, op="sum": own + 3, all_gather=lambda own: [[0], own])
    assert [[micro.groups for micro in part] for part in mini_batches([], [], cfg, other, KNOBS, 1)] == [[()] * 3] * 2
    assert learner.positions.score_tokens([]).shape == (0,)
