"""The learner's gradient by hooks, and the same objective in ordinary PyTorch: one forward a response, the masked tokens deleted."""

from dataclasses import replace

import numpy as np
import torch

from fastsched.config import Config, LearnerConfig, ModelConfig, RolloutConfig, SchedulerConfig
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.models.loading import load_policy
from fastsched.groups import group_advantages
from fastsched.learn.learner import Learner
from fastsched.types import Knobs, Response

MODEL = ModelConfig(dtype="float32")
KNOBS = Knobs(weights=(), r_threshold=0.5, entropy_coef=0.0, kl_coef=0.0, ema_alpha=0.9, lr_scale=1.0, temporal_s=0.0, rule="")
BASE = LearnerConfig(zero_stage=1, lr=1e-2, kl="none", micro_batch_tokens=96, share_prompts=True, clip=(0.1, 0.15),
                     skip_flat_groups=False)  # the knobs of these tests are not those of their scheduler
ROLLOUT = RolloutConfig(responses=4, max_new_tokens=16)
P, G = 4, 4
EPS = 1e-2
"""AdamW's, far above these gradients: with 1e-8 its step is the sign of the gradient, and rounding turns where that is nearly 0."""


def smooth(engine, eps=EPS):
    """The engine with another eps of AdamW."""
    for group in engine.engine.optimizer.param_groups:
        group["eps"] = eps
    return engine


def logits_of(model, response):
    """[L, V] logits that predict the response's tokens."""
    ids = torch.tensor([[*response.prompt_ids, *response.token_ids]])
    return model(ids).logits[0, len(response.prompt_ids) - 1:-1]


def chosen(logp, response):
    return logp.gather(1, torch.tensor(response.token_ids)[:, None])[:, 0]


def batch(model_path, seed=1, version=None, noise=0.2):
    """Responses whose sampler stood near the model: log-ratios of about `noise`, some tokens beyond the clip on both sides."""
    rng, model, responses = np.random.default_rng(seed), load_policy(model_path, MODEL), []
    for row in range(P):
        prompt = (*range(10, 16), *rng.integers(5, 200, 5).tolist())
        for _ in range(G):
            tokens = tuple(rng.integers(5, 200, int(rng.integers(3, 12))).tolist())
            response = Response(row, prompt, tokens, np.zeros(len(tokens), np.float32), "stop", seed - 1 if version is None else version)
            with torch.no_grad():
                logp = chosen(logits_of(model, response).log_softmax(-1), response).numpy()
            responses.append(replace(response, logp=(logp + noise * rng.normal(size=len(tokens))).astype(np.float32)))
    rewards = rng.integers(0, 2, (P, G)).astype(float)
    rewards[:, 0], rewards[:, 1], rewards[1, 2] = 1.0, 0.0, np.nan
    return responses, rewards


def make(model_path, tmp_path, learner=BASE, rollout=ROLLOUT, scheduler=None, teacher_path=None, eps=EPS, **log):
    cfg = Config(model=MODEL, learner=learner, rollout=rollout, scheduler=scheduler or SchedulerConfig())
    cfg = replace(cfg, log=replace(cfg.log, **log))
    teacher = load_policy(teacher_path, MODEL) if teacher_path else None
    engine = smooth(DeepSpeedLearner(load_policy(model_path, MODEL), cfg.learner, MODEL, teacher), eps)
    return Learner(engine, cfg, tmp_path, np.arange(P) % 2)


def gradient(learner, responses, rewards, knobs, step=1):
    """(statistics, summed gradient by parameter) of the first update of one step."""
    found = {}
    hooks = [p.register_hook(lambda g, n=n: found.__setitem__(n, found.get(n, 0) + g.detach().clone()))
             for n, p in learner.engine.policy.model.named_parameters()]
    stats = learner.update(responses, rewards, knobs, step)
    for hook in hooks:
        hook.remove()
    return stats, found


def plain_gradient(model_path, cfg: Config, knobs, responses, rewards, *, keep, old="self", reference=None, advantages=None, weights=None,
                   kl_scale=None):
    """keep: bool [L] for each response; old: "self" or "sampler"; weights: factor of the surrogate [k] for each response."""
    model, learner = load_policy(model_path, MODEL), cfg.learner
    other = None if reference is None else load_policy(reference, MODEL)
    if advantages is None:
        flat = group_advantages(rewards, normalise_std=learner.loss != "dr_grpo").reshape(-1)
        advantages = [np.full(len(r.token_ids), a) for r, a in zip(responses, flat, strict=True)]
    used = [i for i in range(len(responses)) if np.isfinite(rewards.flat[i])]
    total, loss = sum(int(keep[i].sum()) for i in used), 0.0
    for i in used:
        r, at = responses[i], torch.from_numpy(np.flatnonzero(keep[i]))
        full = logits_of(model, r).log_softmax(-1)
        logp, a = chosen(full, r)[at], torch.tensor(advantages[i], dtype=torch.float32)[at]
        sampler = torch.from_numpy(r.logp)[at]
        before = torch.where(sampler.isfinite(), sampler, logp.detach()) if old == "sampler" else logp.detach()
        ref = None
        if other is not None:
            with torch.no_grad():
                ref = logits_of(other, r).log_softmax(-1)
        entropy = -(full.exp() * full).sum(-1)[at]
        beta = knobs.kl_coef * (1.0 if kl_scale is None else torch.from_numpy(kl_scale[i])[at])
        token = token_objective(learner, logp, before, a, None if ref is None else chosen(ref, r)[at], beta)
        token = token * (1.0 if weights is None else weights[i])
        if learner.kl == "exact":
            token = token - beta * (full.exp() * (full - ref)).sum(-1)[at]
        token = token + knobs.entropy_coef * entropy
        count = {"grpo": len(used) * len(at), "gspo": len(used) * len(at), "dr_grpo": len(used) * cfg.rollout.max_new_tokens}
        loss = loss - token.sum() / count.get(learner.loss, total)
    loss.backward()
    return {n: p.grad for n, p in model.named_parameters()}


def token_objective(cfg: LearnerConfig, logp, old, a, ref, beta):
    """What algorithms.md 4.1 and 5.2 maximise, for the tokens of one response."""
    low, high = 1 - cfg.clip[0], 1 + cfg.clip[1]
    ratio = (logp - old).exp()
    if cfg.loss == "rpg":
        v = logp - ref
        ref_over_old = (ref - old).exp()  # the sampled tokens come from pi_old
        return {"fkl": ratio * a + beta * ref_over_old * logp, "ufkl": ratio * a - beta * (ratio - ref_over_old * logp),
                "rkl": ratio * a - beta * ratio * v, "urkl": ratio * a - beta * (ratio * v - ratio)}[cfg.rpg]
    if cfg.loss == "opd":
        a = (ref - logp).detach()
    elif cfg.distill:
        a = a - cfg.distill * (logp - ref).detach()
    if cfg.loss == "cispo":
        return ratio.clamp(low, high).detach() * a * logp
    if cfg.loss in ("gspo", "gspo_over_tokens"):
        ratio = (logp - old).mean().exp().expand_as(logp)
    return torch.minimum(ratio * a, ratio.clamp(low, high) * a)


def assert_same(ours, truth, tolerance=2e-5):
    """Relative L2 error of every parameter's gradient."""
    assert set(ours) == set(truth)
    scale = float(sum(g.square().sum() for g in truth.values())) ** 0.5
    assert scale > 1e-3
    for name, g in truth.items():
        assert float((ours[name] - g).norm()) < tolerance * scale, name


def difference(a, b) -> float:
    return float(sum((a[n] - b[n]).square().sum() for n in a)) ** 0.5 / float(sum(g.square().sum() for g in b.values())) ** 0.5


def suffix(responses, s):
    cut = [min(int(np.floor(len(r.token_ids) * s + 1e-6)), len(r.token_ids) - 1) for r in responses]
    return [np.arange(len(r.token_ids)) >= c for r, c in zip(responses, cut, strict=True)]
