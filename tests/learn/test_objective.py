"""The gradient of every loss on real DeepSpeed against autograd of its formula on the tokens that are left after deleting the others."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from fastsched_kernels import compiled_ops
from plain import BASE, KNOBS, MODEL, ROLLOUT, assert_same, batch, chosen, difference, gradient, logits_of, make, plain_gradient, suffix
from transformers import PhiConfig, PhiForCausalLM

from fastsched.config import CoefficientConfig, KlGateConfig, SchedulerConfig, TemporalConfig
from fastsched.engines.models.loading import load_policy
from fastsched.engines.models.tiny import random_tiny
from fastsched.groups import group_advantages
from fastsched.types import Response

KL = CoefficientConfig(0.0, 0.0, 1.0)  # of which the knobs take any


@pytest.fixture(scope="module")
def teacher_path(tmp_path_factory):
    return random_tiny(tmp_path_factory.mktemp("teacher") / "tiny", tied=False, seed=3)


def learner_config(loss, teacher_path):
    return replace(BASE, loss=loss, teacher=str(teacher_path) if loss == "opd" else None)


@pytest.mark.parametrize("loss", ["grpo", "dapo", "dr_grpo", "gspo", "cispo", "opd"])
def test_masked_tokens_are_as_if_deleted(model_path, teacher_path, tmp_path, loss):
    """Off policy (stale responses), half of every trajectory cut: gradient and denominators of the remaining tokens alone."""
    cfg, knobs = learner_config(loss, teacher_path), replace(KNOBS, temporal_s=0.5, entropy_coef=0.05)
    responses, rewards = batch(model_path, version=-1)
    learner = make(model_path, tmp_path, cfg, teacher_path=teacher_path if loss == "opd" else None)
    stats, ours = gradient(learner, responses, rewards, knobs)
    keep = suffix(responses, 0.5)
    truth = plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=keep, old="sampler", reference=teacher_path)
    assert_same(ours, truth)
    assert stats.clip_fraction > 0.02 and 0.4 < stats.kept_fraction < 0.65
    everything = [np.ones_like(k) for k in keep]
    unmasked = plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=everything, old="sampler", reference=teacher_path)
    assert difference(ours, unmasked) > 0.1  # the mask mattered


@pytest.mark.parametrize("distill", [0.0, 0.7])
def test_distillation_adds_to_the_advantage_of_any_loss(model_path, teacher_path, tmp_path, distill):
    """algorithms.md 5.2: A_t - lam (log pi - log pi_teacher); without a teacher the engine holds no reference network."""
    cfg = replace(BASE, loss="grpo", distill=distill, teacher=str(teacher_path) if distill else None)
    responses, rewards = batch(model_path)
    learner = make(model_path, tmp_path, cfg, teacher_path=teacher_path if distill else None)
    stats, ours = gradient(learner, responses, rewards, KNOBS)
    keep = suffix(responses, 0.0)
    assert_same(ours, plain_gradient(model_path, learner.cfg, KNOBS, responses, rewards, keep=keep, reference=teacher_path))
    assert (learner.engine.reference is None) == (distill == 0) and np.isfinite(stats.kl) == (distill > 0)


def test_a_teacher_stays_as_it_is_and_is_what_the_log_measures(model_path, teacher_path, tmp_path):
    learner = make(model_path, tmp_path, learner_config("opd", teacher_path), teacher_path=teacher_path)
    held = {n: p.clone() for n, p in learner.engine.reference.model.named_parameters()}
    responses, rewards = batch(model_path)
    stats = learner.update(responses, rewards, KNOBS, 1)
    assert all(torch.equal(p, held[n]) for n, p in learner.engine.reference.model.named_parameters())
    policy, teacher, gaps = load_policy(model_path, MODEL), load_policy(teacher_path, MODEL), []
    for r, reward in zip(responses, rewards.flat, strict=True):
        if np.isfinite(reward):
            with torch.no_grad():
                gaps.append(chosen(logits_of(policy, r).log_softmax(-1) - logits_of(teacher, r).log_softmax(-1), r))
    assert stats.kl == pytest.approx(float(torch.cat(gaps).mean()), abs=1e-5) and stats.kl_kind == "k1 to teacher"


def test_opd_lowers_the_exact_reverse_kl(model_path, tmp_path):
    """Responses of one token of the policy as it is, at evenly spaced quantiles of it: KL(pi || teacher) at the prompt falls."""
    path = random_tiny(tmp_path / "sharp", tied=True, seed=4)
    learner = make(model_path, tmp_path, replace(BASE, loss="opd", teacher=str(path), lr=3e-3), teacher_path=path, eps=1e-8)
    teacher, prompt, quantiles = learner.engine.reference.model, tuple(range(10, 16)), (torch.arange(64) + 0.5) / 64
    with torch.no_grad():
        next(p for n, p in teacher.named_parameters() if n == "model.norm.weight").mul_(6)  # a teacher that is sure of something
    at_prompt = lambda model: model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1)
    gaps = []
    for step in range(1, 26):
        with torch.no_grad():
            logp, q = at_prompt(learner.engine.policy.model), at_prompt(teacher)
        gaps.append(float((logp.exp() * (logp - q)).sum()))
        tokens = torch.searchsorted(logp.exp().cumsum(0), quantiles).clamp(max=len(logp) - 1).tolist()
        responses = [Response(0, prompt, (t,), np.array([float(logp[t])], np.float32), "stop", step - 1) for t in tokens]
        learner.update(responses, np.zeros((16, 4)), KNOBS, step)
    assert gaps[0] > 0.5 and gaps[-1] < 0.5 * gaps[0]


@pytest.mark.parametrize("form", ["fkl", "ufkl", "rkl", "urkl"])
@pytest.mark.parametrize("stale", [False, True])
def test_rpg_is_the_gradient_of_its_published_surrogate(model_path, tmp_path, form, stale):
    cfg = replace(BASE, loss="rpg", rpg=form, kl="k3", reference="copy", clip=(0.99, 10.0))  # wide: the surrogate without its clip
    responses, rewards = batch(model_path, version=-1 if stale else None)
    learner = make(model_path, tmp_path, cfg, scheduler=SchedulerConfig(copy_every=100))
    other = random_tiny(tmp_path / "other", tied=True, seed=5)
    learner.engine.reference.model.load_state_dict(load_policy(other, MODEL).state_dict())
    knobs = replace(KNOBS, kl_coef=0.3, temporal_s=0.5, entropy_coef=0.05)
    stats, ours = gradient(learner, responses, rewards, knobs)
    truth = plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=suffix(responses, 0.5),
                           old="sampler" if stale else "self", reference=other)
    assert_same(ours, truth)
    assert stats.kl > 0 and stats.kl_kind == "k3"
    without = plain_gradient(model_path, learner.cfg, replace(knobs, kl_coef=0.0), responses, rewards, keep=suffix(responses, 0.5),
                             old="sampler" if stale else "self", reference=other)
    assert difference(ours, without) > 1e-3  # the KL term mattered


def test_rpg_clips_as_configured(model_path, tmp_path):
    responses, rewards = batch(model_path, version=-1)
    found = []
    for change in (dict(clip=(0.99, 10.0)), dict(clip=(0.1, 0.15)), dict(clip=(0.1, 0.15), dual_clip=1.02)):
        learner = make(model_path, tmp_path, replace(BASE, loss="rpg", kl="k3", **change))
        found.append(gradient(learner, responses, rewards, replace(KNOBS, kl_coef=0.1)))
    shares = [stats.clip_fraction for stats, _ in found]
    assert shares[0] == 0 < shares[1] < shares[2]
    assert difference(found[0][1], found[1][1]) > 1e-2 < difference(found[1][1], found[2][1])


def test_stale_responses_take_their_ratio_against_the_sampler(model_path, tmp_path):
    """On policy the sampler's log-probabilities do not enter the loss; with one stale response they do for the whole batch, the clip
    acts, and a token the sampler gave no log-probability has ratio one."""
    fresh, rewards = batch(model_path)
    fresh[3].logp[1] = np.nan
    stale = [replace(r, weight_version=-1) if i == 5 else r for i, r in enumerate(fresh)]
    everything = [np.ones(len(r.token_ids), bool) for r in fresh]
    learner = make(model_path, tmp_path)
    stats, ours = gradient(learner, fresh, rewards, KNOBS)
    assert_same(ours, plain_gradient(model_path, learner.cfg, KNOBS, fresh, rewards, keep=everything))
    assert stats.stale == 0 and stats.clip_fraction == 0
    stats, ours = gradient(make(model_path, tmp_path), stale, rewards, KNOBS)
    assert_same(ours, plain_gradient(model_path, learner.cfg, KNOBS, stale, rewards, keep=everything, old="sampler"))
    assert stats.stale == 1 / 16 and stats.clip_fraction > 0.05 and np.isnan(stats.correction_mean)


def test_a_correction_of_stale_responses_is_decoupled_from_the_clip(model_path, tmp_path):
    """The ratio that is clipped is to the learner's own weights, one here; the way from there to the older sampler is the weight."""
    responses, rewards = batch(model_path, version=-1)
    model, everything = load_policy(model_path, MODEL), [np.ones(len(r.token_ids), bool) for r in responses]
    with torch.no_grad():
        rho = [(chosen(logits_of(model, r).log_softmax(-1), r) - torch.from_numpy(r.logp)).exp() for r in responses]
    learner = make(model_path, tmp_path, rollout=replace(ROLLOUT, correction="token_tis", correction_cap=1.1))
    stats, ours = gradient(learner, responses, rewards, KNOBS)
    assert_same(ours, plain_gradient(model_path, learner.cfg, KNOBS, responses, rewards, keep=everything,
                                     weights=[r.clamp(max=1.1) for r in rho]))
    used = torch.cat([rho[i] for i in np.flatnonzero(np.isfinite(rewards.flat))])
    assert stats.stale == 1 and stats.clip_fraction == 0 and stats.correction_mean == pytest.approx(float(used.mean()), rel=1e-5)
    assert stats.correction_capped > 0.05 and stats.correction_capped == pytest.approx(float((used > 1.1).float().mean()))


@pytest.mark.parametrize("kind, divide", [("token_tis", False), ("sequence_tis", True), ("geometric", False), ("icepop", True)])
def test_corrections_weigh_the_surrogate_only(model_path, tmp_path, kind, divide):
    """The weights by hand from all kept tokens of a response; entropy keeps its full weight."""
    bounds = {"token_tis": (None, 1.1), "sequence_tis": (None, 1.3), "geometric": (0.95, 1.05), "icepop": (0.9, 1.2)}[kind]
    rollout = replace(ROLLOUT, correction=kind, correction_floor=bounds[0], correction_cap=bounds[1], correction_divide=divide)
    responses, rewards = batch(model_path)
    model, knobs, keep = load_policy(model_path, MODEL), replace(KNOBS, temporal_s=0.5, entropy_coef=0.05), suffix(responses, 0.5)
    weights, ratios = [], []
    for r, kept in zip(responses, keep, strict=True):
        with torch.no_grad():
            log = (chosen(logits_of(model, r).log_softmax(-1), r) - torch.from_numpy(r.logp))[torch.from_numpy(kept)]
        rho = log.exp()
        ratios.append(rho)
        weights.append({"token_tis": rho.clamp(max=1.1), "sequence_tis": rho.prod().clamp(max=1.3).expand_as(rho),
                        "geometric": ((log.mean().exp() >= 0.95) & (log.mean().exp() <= 1.05)).float().expand_as(rho),
                        "icepop": torch.where((rho >= 0.9) & (rho <= 1.2), rho, 0.0)}[kind])
    used = np.flatnonzero(np.isfinite(rewards.flat))
    flat = torch.cat([weights[i] for i in used])
    if divide:
        weights = [w / flat.mean() for w in weights]
    stats, ours = gradient(make(model_path, tmp_path, rollout=rollout), responses, rewards, knobs)
    learner_cfg = make(model_path, tmp_path, rollout=rollout).cfg
    assert_same(ours, plain_gradient(model_path, learner_cfg, knobs, responses, rewards, keep=keep, weights=weights), 5e-5)
    raw = torch.cat([ratios[i] for i in used])
    assert stats.correction_mean == pytest.approx(float(raw.mean()), rel=1e-5)
    assert stats.correction_max == pytest.approx(float(raw.max()), rel=1e-5)
    assert stats.correction_rejected == pytest.approx(float((flat == 0).float().mean()))
    capped = {"token_tis": raw > 1.1, "sequence_tis": flat == 1.3}.get(kind, torch.zeros_like(raw))
    assert stats.correction_capped == pytest.approx(float(capped.float().mean())) and (kind in ("geometric", "icepop") or capped.any())


def entropies(model_path, responses):
    model = load_policy(model_path, MODEL)
    with torch.no_grad():
        full = [logits_of(model, r).log_softmax(-1) for r in responses]
    return [(-(f.exp() * f).sum(-1)).numpy().astype(np.float64) for f in full]


@pytest.mark.parametrize("loss", ["dapo", "gspo"])
def test_entropy_weighted_advantage(model_path, tmp_path, loss):
    """algorithms.md 1.4: A + S min(0.4 H, |A| / 2) on every token, nothing masked, a constant for the gradient."""
    scheduler = SchedulerConfig(temporal=TemporalConfig(mode="linear", proxy="advantage"))
    knobs = replace(KNOBS, temporal_s=0.6)
    responses, rewards = batch(model_path)
    learner = make(model_path, tmp_path, replace(BASE, loss=loss), scheduler=scheduler)
    flat = group_advantages(rewards, normalise_std=True).reshape(-1)
    advantages = [a + 0.6 * np.minimum(0.4 * h, abs(a) / 2) for a, h in zip(flat, entropies(model_path, responses), strict=True)]
    keep = [np.ones(len(r.token_ids), bool) for r in responses]
    stats, ours = gradient(learner, responses, rewards, knobs)
    assert_same(ours, plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=keep, advantages=advantages))
    assert difference(ours, plain_gradient(model_path, learner.cfg, knobs, responses, rewards, keep=keep)) > 0.05
    assert stats.kept_fraction == pytest.approx(sum(len(r.token_ids) for i, r in enumerate(responses) if np.isfinite(rewards.flat[i]))
                                                / sum(len(r.token_ids) for r in responses))


def test_kl_gate_holds_the_tokens_of_low_entropy(model_path, tmp_path):
    """control_plane.md 5: beta_t = lambda_KL sigmoid((h0 - H_t) / width), also over tokens that are masked."""
    scheduler = SchedulerConfig(kl=KL, kl_gate=KlGateConfig(enabled=True, quantile=0.3, width=0.02))
    responses, rewards = batch(model_path)
    learner = make(model_path, tmp_path, replace(BASE, kl="exact"), scheduler=scheduler)
    other = random_tiny(tmp_path / "other", tied=True, seed=5)
    learner.engine.reference.model.load_state_dict(load_policy(other, MODEL).state_dict())
    entropy = entropies(model_path, responses)
    h0 = float(np.quantile(np.concatenate(entropy), 0.5))
    knobs = replace(KNOBS, kl_coef=0.5, kl_gate=h0, temporal_s=0.5)
    scale = [(1 / (1 + np.exp(-(h0 - h) / 0.02))).astype(np.float32) for h in entropy]
    stats, ours = gradient(learner, responses, rewards, knobs)
    truth = dict(keep=suffix(responses, 0.5), reference=other)
    assert_same(ours, plain_gradient(model_path, learner.cfg, knobs, responses, rewards, kl_scale=scale, **truth), 1e-4)
    assert difference(ours, plain_gradient(model_path, learner.cfg, knobs, responses, rewards, **truth)) > 1e-2
    assert stats.entropy_quantile == pytest.approx(float(np.quantile(np.concatenate(entropy), 0.3)), abs=2 / 256)


OPTIONS = {
    "opd": dict(learner=dict(loss="opd", teacher="t"), knobs={}),
    "rpg": dict(learner=dict(loss="rpg", rpg="ufkl", kl="k2", dual_clip=1.05), knobs=dict(kl_coef=0.3)),
    "gate": dict(learner=dict(kl="exact"), knobs=dict(kl_coef=0.3, kl_gate=5.0), scheduler=dict(kl=KL, kl_gate=KlGateConfig(enabled=True))),
    "sequence_mis": dict(learner={}, rollout=dict(correction="sequence_mis"), knobs={}, version=0),
    "advantage": dict(learner={}, knobs=dict(temporal_s=0.5), scheduler=dict(temporal=TemporalConfig(mode="linear", proxy="advantage"))),
}


REFUSED = compiled_ops.load()


@pytest.mark.skipif("were built for" in (REFUSED or ""), reason=str(REFUSED))
@pytest.mark.parametrize("name", OPTIONS)
def test_fused_and_reference_heads_agree(model_path, teacher_path, tmp_path, name):
    case = OPTIONS[name]
    responses, rewards = batch(model_path, version=case.get("version", -1))
    found = []
    for head in ("cpp", "pytorch"):
        cfg = replace(BASE, head=head, **case["learner"])
        learner = make(model_path, tmp_path, cfg, replace(ROLLOUT, **case.get("rollout", {})),
                       SchedulerConfig(**case.get("scheduler", {})), teacher_path=teacher_path if cfg.teacher else None)
        stats, g = gradient(learner, responses, rewards, replace(KNOBS, **case["knobs"]))
        found.append((stats, g))
    (a, ours), (b, truth) = found
    assert_same(ours, truth)
    for field in ("loss", "entropy", "kl", "clip_fraction", "correction_mean", "entropy_quantile"):
        assert getattr(a, field) == pytest.approx(getattr(b, field), rel=1e-4, abs=1e-5, nan_ok=True), field


def test_a_head_with_bias_has_no_kl_to_its_own_copy(tmp_path, model_path):
    """The averaged policy's logits take its bias as well: before the first update it is the policy itself."""
    config = PhiConfig(vocab_size=256, hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2,
                       max_position_embeddings=64)
    model = PhiForCausalLM(config)
    torch.nn.init.normal_(model.lm_head.bias)
    model.save_pretrained(tmp_path / "phi")
    responses, rewards = batch(tmp_path / "phi")
    stats = make(tmp_path / "phi", tmp_path, replace(BASE, kl="exact")).update(responses, rewards, replace(KNOBS, kl_coef=0.1), 1)
    assert stats.kl == pytest.approx(0.0, abs=1e-6) and stats.entropy > 1
