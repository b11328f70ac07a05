"""Entry points for those who hold logits, and the ways in which an in-place gradient could go wrong."""

import pytest
import torch
from fastsched_kernels import reference
from fastsched_kernels.logits import policy_loss_from_logits, token_stats
from fastsched_kernels.reference import Objective
from fastsched_kernels.testing import seeded
from row_implementations import NAMES


def rows(seed=0, n=5, v=300):
    return torch.randn(n, v, generator=seeded(seed)) * 2


@pytest.mark.parametrize("implementation", NAMES)
def test_any_loss_on_the_statistics(implementation):
    ref, target = rows(1), torch.tensor([0, 299, 5, 5, 7])
    grads = []
    for stats_of in (
        lambda x: token_stats(x, target, ref, 0.7, 9.0, implementation),
        lambda x: reference.token_stats(x, target, ref_logits=ref, temperature=0.7, softcap=9.0),
    ):
        x = rows().requires_grad_()
        s = stats_of(x)
        (s.logp.sigmoid() * s.entropy.square() + s.kl.sqrt()).sum().mul(-3.0).backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("implementation", NAMES)
def test_sum_of_squared_probabilities(implementation):
    x, target, temperature = rows(), torch.tensor([0, 299, 5, 5, 7]), torch.tensor([0.5, 1.0, 0.7, 2.0, 1.0])
    x[1, 299] = -torch.inf  # a target without probability leaves the sum defined
    grads, sums = [], []
    for sums_of in (
        lambda x: token_stats(x, target, None, temperature, 9.0, implementation, sum_p2=True).sum_p2,
        lambda x: reference.token_stats(x.double(), target, temperature=temperature, softcap=9.0).sum_p2,
    ):
        y = x.clone().requires_grad_()
        sums.append(sums_of(y))
        (sums[-1] * torch.tensor([1.0, -2.0, 3.0, 0.5, 1.0])).sum().backward()
        grads.append(y.grad)
    torch.testing.assert_close(*(s.double() for s in sums), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-6)
    assert token_stats(x, target, implementation=implementation).sum_p2 is None


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kl", ["none", "k2", "exact"])
def test_policy_loss_from_logits_is_the_reference(implementation, kl):
    ref, target, a, old = rows(1), torch.tensor([0, 299, 5, 5, 7]), rows(2)[:, 0], rows(3)[:, 0] - 6
    x, y = rows().requires_grad_(), rows().double().requires_grad_()
    options = {"kl": kl, "kl_coef": 0.3, "entropy_coef": 0.1, "rollout_weight": 0.5, "dual_clip": 1.5}
    out = policy_loss_from_logits(
        x,
        target,
        advantage=a,
        token_weight=0.2,
        old_logp=old,
        ref_logits=ref,
        clip=(0.1, 0.3),
        implementation=implementation,
        **options,
    )
    o = Objective(a.double(), 0.2, old.double(), clip_low=0.1, clip_high=0.3, **options)
    true = reference.policy_loss(y, target, o, ref_logits=ref.double())
    (2 * out.loss).backward()
    (2 * true.loss.sum()).backward()
    torch.testing.assert_close(out.loss.double(), true.loss.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(x.grad.double(), y.grad, rtol=1e-4, atol=1e-7)
    assert torch.equal(out.clipped, true.clipped)


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("kl", ["none", "k3", "exact"])
def test_rows_without_weight_hold_anything(implementation, kl):
    """NaN logits, target -100, infinite old_logp: no loss, no gradient, and the other rows are as if they were alone."""
    keep, ref, target, a, old = torch.tensor([0, 2, 4]), rows(1), torch.tensor([0, 299, 5, 5, 7]), rows(2)[:, 0], rows(3)[:, 0] - 6
    weight, temperature = torch.tensor([0.2, 0.0, 0.3, 0.0, 0.1]), torch.tensor([0.7, torch.nan, 1.0, 0.0, 1.5])
    options = {"kl": kl, "kl_coef": 0.3, "entropy_coef": 0.1, "implementation": implementation}
    alone = rows()[keep].requires_grad_()
    expected = policy_loss_from_logits(alone, target[keep], advantage=a[keep], token_weight=weight[keep], old_logp=old[keep],
                                       ref_logits=ref[keep], temperature=temperature[keep], **options)
    expected.loss.backward()
    x = rows()
    x[1], x[3], ref[1], target[1], old[3] = torch.nan, torch.inf, torch.nan, -100, torch.inf
    x.requires_grad_()
    out = policy_loss_from_logits(x, target, advantage=a, token_weight=weight, old_logp=old, ref_logits=ref, temperature=temperature,
                                  **options)
    out.loss.backward()
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(x.grad[keep], alone.grad)
    assert (x.grad[[1, 3]] == 0).all() and out.logp[[1, 3]].isnan().all() and not out.clipped[[1, 3]].any()
    for name in ("logp", "entropy", "kl", "ratio", "clipped"):
        torch.testing.assert_close(getattr(out, name)[keep], getattr(expected, name), equal_nan=True)


def test_logits_may_be_used_elsewhere_and_changing_them_is_an_error():
    x = rows().requires_grad_()
    z = x * 1.0
    before = z.detach().clone()
    stats = token_stats(z, torch.zeros(5, dtype=torch.long))
    (stats.logp.sum() + z.square().sum()).backward(retain_graph=True)
    assert torch.equal(z.detach(), before)
    first = x.grad.clone()
    (stats.logp.sum() + z.square().sum()).backward()
    torch.testing.assert_close(x.grad, 2 * first)
    stats = token_stats(z, torch.zeros(5, dtype=torch.long))
    with torch.no_grad():
        z.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        stats.logp.sum().backward()


def test_second_derivatives_are_refused():
    x = rows().requires_grad_()
    gradient = torch.autograd.grad(token_stats(x, torch.zeros(5, dtype=torch.long)).logp.sum(), x, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="once_differentiable|does not require grad"):
        gradient.sum().backward()


@pytest.mark.parametrize(
    "arguments, words",
    [
        ({"kl": "exact"}, "needs ref_logits"),
        ({"kl": "k3"}, "or ref_logp"),
        ({"ref_logits": rows(n=4), "kl": "exact"}, "do not fit"),
    ],
)
def test_bad_input_is_named(arguments, words):
    with pytest.raises(ValueError, match=words):
        policy_loss_from_logits(rows(), torch.zeros(5, dtype=torch.long), advantage=1.0, token_weight=1.0, **arguments)


@pytest.mark.parametrize("implementation", NAMES)
def test_a3_the_k3_penalty_pulls_harder_the_further_the_policy_has_drifted(implementation):
    """pitfalls A3: a clamp of the estimate would make its gradient exactly 0 from pi_ref / pi = 14 on; here it grows all the way."""
    ratios = torch.tensor([1.5, 2, 4, 8, 12, 13, 14, 16, 20, 100, 1000])
    x = (rows(n=1, v=50).repeat(len(ratios), 1)).requires_grad_()
    target = torch.full((len(ratios),), 7)
    logp = x.detach().log_softmax(-1)[:, 7]
    out = policy_loss_from_logits(x, target, advantage=torch.zeros(len(ratios)), token_weight=1.0, ref_logp=logp + ratios.log(), kl="k3",
                                  kl_coef=1.0, implementation=implementation)
    out.loss.backward()
    pull = -x.grad[:, 7]  # towards the reference, which finds the token likelier
    torch.testing.assert_close(pull, (ratios - 1) * (1 - logp.exp()), rtol=1e-3, atol=1e-5)
    assert (pull.diff() > 0).all() and pull[0] > 0
