import pytest
import torch

from fastsched.learn.rpg import rpg_weight

g = torch.Generator().manual_seed(0)
rand = lambda: torch.randn(200, generator=g, dtype=torch.float64)
LOGP, OLD, REF, A = rand() - 3, rand() * 0.4, rand() * 0.4, rand()
OLD, REF, BETA = LOGP + OLD, LOGP + REF, torch.rand(200, generator=g, dtype=torch.float64)


def surrogate(form, logp, old, ref):
    """What algorithms.md 4.1 minimises, negated; with a reference of its own, E under pi_ref becomes pi_ref / pi_old under pi_old."""
    w, c = (logp - old).exp(), (ref - old).exp()
    v = logp - ref
    return {"fkl": w * A + BETA * c * v, "ufkl": w * A - BETA * (w - c * v - 1), "rkl": w * A - BETA * w * v,
            "urkl": w * A - BETA * (w * v - w)}[form]


def gradient(value, logp):
    return torch.autograd.grad(value.sum(), logp)[0]


@pytest.mark.parametrize("form", ["fkl", "ufkl", "rkl", "urkl"])
@pytest.mark.parametrize("same", [True, False], ids=["ref=old", "own ref"])
def test_weight_is_the_gradient_of_the_surrogate(form, same):
    ref, logp = OLD if same else REF, LOGP.clone().requires_grad_()
    truth = gradient(surrogate(form, logp, OLD, ref), logp)
    weight, clipped = rpg_weight(form, A, LOGP - OLD, LOGP - ref, BETA, (float("inf"), float("inf")), None)
    assert not clipped.any()
    torch.testing.assert_close(weight, truth, rtol=1e-12, atol=1e-12)


def test_the_published_table_on_its_own_terms():
    """Section 4.1's gradient weights with pi_ref = pi_old, w R + beta; w R - beta (w - 1); w (R - beta (log w + 1)); w (R - beta log w)."""
    log_w = LOGP - OLD
    w = log_w.exp()
    table = {"fkl": w * A + BETA, "ufkl": w * A - BETA * (w - 1), "rkl": w * (A - BETA * (log_w + 1)), "urkl": w * (A - BETA * log_w)}
    for form, expected in table.items():
        torch.testing.assert_close(rpg_weight(form, A, log_w, log_w, BETA, (float("inf"), float("inf")), None)[0], expected)


@pytest.mark.parametrize("form", ["fkl", "ufkl", "rkl", "urkl"])
@pytest.mark.parametrize("dual", [None, 1.3])
def test_dual_clip_acts_on_the_regularised_advantage(form, dual):
    """Autograd through max(c A', min(w A', clip(w) A')) with A' constant, plus the forward term that has no w."""
    log_v = (LOGP - REF).detach()
    regularised = {"fkl": A, "ufkl": A - BETA, "rkl": A - BETA * (log_v + 1), "urkl": A - BETA * log_v}[form]
    logp = LOGP.clone().requires_grad_()
    w = (logp - OLD).exp()
    value = torch.minimum(w * regularised, w.clamp(0.8, 1.28) * regularised)
    if dual is not None:
        value = torch.where(regularised < 0, torch.maximum(value, dual * regularised), value)
    forward = BETA * (REF - OLD).exp() * logp if form in ("fkl", "ufkl") else 0.0
    truth = gradient(value + forward, logp)
    weight, clipped = rpg_weight(form, A, LOGP - OLD, LOGP - REF, BETA, (0.2, 0.28), dual)
    torch.testing.assert_close(weight, truth, rtol=1e-12, atol=1e-12)
    assert 0.05 < clipped.double().mean() < 0.9
    assert dual is None or clipped.sum() > rpg_weight(form, A, LOGP - OLD, LOGP - REF, BETA, (0.2, 0.28), None)[1].sum()


def test_extreme_ratios_stay_finite():
    log = torch.tensor([500.0, -500.0])
    for form in ("fkl", "ufkl", "rkl", "urkl"):
        weight, _ = rpg_weight(form, torch.ones(2), log, -log, 0.1, (0.2, 0.28), 3.0)
        assert weight.isfinite().all()
