"""Rows as trained policies have them: the largest logit at 20 to 40, the target's probability up to 0.9999, logits rounded to bf16.

The truth is fp64 on what the logits were before rounding. To first order a statistic errs by its derivative times the rounding of the
logits, of which the target's own is none: that sum is what the bounds below are made of.
"""

from typing import NamedTuple

import pytest
import torch
from fastsched_kernels import reference, rows_pytorch
from fastsched_kernels.linear import linear_token_stats, policy_loss
from fastsched_kernels.logits import policy_loss_from_logits
from fastsched_kernels.reference import Objective
from fastsched_kernels.table import Coefficients
from fastsched_kernels.testing import peaked_head, seeded
from row_implementations import NAMES, each, on_the_cpu
from torch import Tensor

N, V = 12, 1000
BF16 = 2.0**-7
"""Relative rounding of bf16, twice as much as its nearest: Triton's interpreter cuts off."""
LIKELIEST = (0.5, 0.9, 0.99, 0.9999)
PLACES = ["argmax", "second"]


class Peaked(NamedTuple):
    """`true` [N, V] fp64; `rounded` what bf16 makes of it; `target` [N] is the likeliest token of each row or the second."""

    true: Tensor
    rounded: Tensor
    target: Tensor

    @property
    def fine(self) -> Tensor:
        return self.true.gather(1, self.target[:, None]).squeeze(1).float()

    @property
    def error(self) -> Tensor:
        """[N, V] what rounding does to the logits that are used: all but the target's."""
        delta = self.rounded.double() - self.true
        return delta.scatter(1, self.target[:, None], 0.0)


def peaked(likeliest: float, place: str, seed: int = 0) -> Peaked:
    """Rows of which one token has the probability `likeliest`, the others share the rest as a softmax of a normal."""
    g = seeded(seed)
    others = 2 * torch.randn(N, V, generator=g, dtype=torch.float64)
    top, height = torch.randint(V, (N, 1), generator=g), 20 + 20 * torch.rand(N, 1, generator=g, dtype=torch.float64)
    rest = others.scatter(1, top, -torch.inf).logsumexp(1, keepdim=True)
    true = (others - rest + height + torch.log(torch.tensor((1 - likeliest) / likeliest))).scatter(1, top, height)
    order = true.argsort(1, descending=True)
    target = order[:, 0 if place == "argmax" else 1].contiguous()
    rounded = true.bfloat16()
    exact = true.scatter(1, target[:, None], true.gather(1, target[:, None]).float().double())
    return Peaked(exact, rounded, target)


def each_row(values: Tensor, bound: Tensor, what: str) -> None:
    worst = (values.abs() - bound).max()
    assert worst <= 0, f"{what}: {worst:.2e} over its bound"


@each
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("likeliest", LIKELIEST)
def test_logp_errs_by_the_rounding_of_the_other_tokens_only(implementation, likeliest, place):
    p = peaked(likeliest, place)
    state = implementation.row_stats(p.rounded, p.target, None, 1.0, None, p.fine)
    truth = reference.token_stats(p.true, p.target)
    assert (state.logp <= 0).all()
    first_order = -(p.true.softmax(1) * p.error).sum(1)
    second_order = (p.true.softmax(1) * p.error.square()).sum(1)
    error = state.logp.double() - truth.logp
    each_row(error - first_order, second_order + 1e-5, "logp")
    if place == "argmax":  # better than rounded logits throughout, and than a fine target that does not enter the sum
        plain = implementation.row_stats(p.rounded, p.target, None, 1.0, None).logp.double() - truth.logp
        assert error.abs().mean() <= plain.abs().mean() + 1e-6
        half_mended = error - (p.rounded.double().softmax(1) * (p.rounded.double() - p.true)).gather(1, p.target[:, None]).squeeze(1)
        assert error.abs().mean() < (2.1 - 2 * likeliest) * half_mended.abs().mean()


@on_the_cpu
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("likeliest", LIKELIEST)
def test_no_bias(implementation, likeliest, place):
    """The mean signed error over 64 times as many rows is within four standard errors of zero, plus what is of second order."""
    errors, second_order = [], []
    for seed in range(1, 65):
        p = peaked(likeliest, place, seed)
        found = implementation.row_stats(p.rounded, p.target, None, 1.0, None, p.fine).logp.double()
        errors.append(found - reference.token_stats(p.true, p.target).logp)
        second_order.append((p.true.softmax(1) * p.error.square()).sum(1))
    errors, second_order = torch.cat(errors), torch.cat(second_order)
    assert errors.mean().abs() <= 4 * errors.std() / len(errors) ** 0.5 + second_order.mean() + 1e-6


@each
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("likeliest", LIKELIEST)
def test_entropy_and_exact_kl(implementation, likeliest, place):
    p, q = peaked(likeliest, place), peaked(0.7, place, seed=0)
    ref = Peaked(q.true, q.rounded, p.target)
    ref = ref._replace(true=q.true.scatter(1, p.target[:, None], ref.fine.double()[:, None]))
    state = implementation.row_stats(p.rounded, p.target, ref.rounded, 1.0, None, p.fine, ref.fine)
    truth = reference.token_stats(p.true, p.target, ref_logits=ref.true)
    prob, log_p, log_q = p.true.softmax(1), p.true.log_softmax(1), ref.true.log_softmax(1)
    slope = prob * (log_p + truth.entropy[:, None]).abs()
    wide = 1.5 * (prob * (1 + log_p.abs() + log_q.abs()) * (p.error.square() + ref.error.square())).sum(1) + 2e-5 * (1 + truth.kl)
    each_row(state.entropy.double() - truth.entropy, (slope * p.error.abs()).sum(1) + wide, "entropy")
    slope_kl = prob * (log_p - log_q - truth.kl[:, None]).abs() * p.error.abs() + (prob - log_q.exp()).abs() * ref.error.abs()
    each_row(state.kl.double() - truth.kl, slope_kl.sum(1) + wide, "kl")
    same = implementation.row_stats(p.rounded, p.target, p.rounded, 1.0, None, p.fine, p.fine)
    assert same.kl.abs().max() < 1e-5


@each
@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("softcap", [None, 50.0])
def test_the_gradient_is_that_of_the_mended_row(implementation, out, softcap):
    """Autograd in fp64 on the rounded row with the fine target in its place; and a row adds up to the rounding of its entries."""
    p, q = peaked(0.9, "argmax"), peaked(0.7, "argmax", seed=0)
    c = Coefficients(*torch.randn(3, N, generator=seeded(3)))
    dtype = torch.bfloat16 if out == torch.bfloat16 else torch.float32
    x, ref = p.rounded.to(dtype), q.rounded.to(dtype)
    ref_fine = q.true.gather(1, p.target[:, None]).squeeze(1).float()
    args = x, p.target, ref, 0.8, softcap
    state = implementation.row_stats(*args, p.fine, ref_fine)
    mine = implementation.row_dlogits_(x.clone(), p.target, ref, state, c, 0.8, softcap, p.fine, ref_fine)
    leaf = p.rounded.double().scatter(1, p.target[:, None], p.fine.double()[:, None]).requires_grad_()
    r = q.rounded.double().scatter(1, p.target[:, None], ref_fine.double()[:, None])
    s = reference.token_stats(leaf, p.target, ref_logits=r, temperature=0.8, softcap=softcap)
    (c.logp * s.logp + c.entropy * s.entropy + c.kl * s.kl).sum().backward()
    step = BF16 if out == torch.bfloat16 else 1e-4
    each_row(mine.double() - leaf.grad, step * leaf.grad.abs() + 2e-5, "dlogits")
    if softcap is None:
        each_row(mine.double().sum(1), step * leaf.grad.abs().sum(1) + 1e-4, "the sum of a row")


@each
@pytest.mark.parametrize("kl", ["none", "k3", "exact"])
def test_the_policy_loss_of_a_row_uses_the_same(implementation, kl):
    """One launch against its parts, with dlogits in bf16 beside fp32 logits as well as in place."""
    p, q = peaked(0.99, "argmax"), peaked(0.7, "argmax", seed=0)
    ref_fine = q.true.gather(1, p.target[:, None]).squeeze(1).float()
    o = Objective(torch.linspace(-1, 1, N), 1 / N, torch.full((N,), -0.02), torch.full((N,), -0.3), kl, 0.2, 0.05, 0.2, 0.2)
    found, truth = [], []
    for module, kept in ((implementation, found), (rows_pytorch, truth)):
        for dtype, out in ((torch.bfloat16, None), (torch.float32, torch.empty(N, V, dtype=torch.bfloat16))):
            x, ref = p.rounded.to(dtype, copy=True), q.rounded.to(dtype) if kl == "exact" else None
            rows = module.policy_rows_(x, p.target, ref, o, 1.0, None, p.fine, True, ref_fine if kl == "exact" else None, out)
            assert out is None or (x == p.rounded.float()).all()
            kept.append((*rows, x if out is None else out))
    for mine, theirs in zip(found, truth, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=1e-2 if a.dtype == torch.bfloat16 else 1e-4, atol=2e-5, equal_nan=True)


def head(likeliest: float, place: str) -> tuple[Tensor, Tensor, Tensor]:
    """(hidden [N, 64], weight [V, 64], target [N]): bf16, with logits of that kind."""
    return peaked_head(N, 64, V, likeliest, place, seeded(5))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("likeliest", LIKELIEST)
def test_from_hidden_states(name, likeliest, place):
    """Against fp64 and against PyTorch's own log_softmax of the bf16 product; fp32 logits leave nothing of the rounding."""
    hidden, weight, target = head(likeliest, place)
    z = hidden.double() @ weight.double().t()
    truth = z.log_softmax(1).gather(1, target[:, None]).squeeze(1)
    eager = (hidden @ weight.t()).float().log_softmax(1).gather(1, target[:, None]).squeeze(1)
    rounded, exact = (linear_token_stats(hidden, weight, target, ref_hidden=hidden, ref_weight=weight, implementation=name, chunk_rows=5,
                                         logits_dtype=dtype) for dtype in (torch.bfloat16, torch.float32))
    for stats in (rounded, exact):
        assert (stats.logp <= 0).all() and torch.equal(stats.logp, stats.ref_logp) and stats.kl.abs().max() < 1e-5
    each_row(exact.logp.double() - truth, 2e-6 * z.abs().max(1).values + 1e-5, "logp of fp32 logits")
    delta = ((hidden @ weight.t()).double() - z).scatter(1, target[:, None], 0.0)
    size = (z.softmax(1) * (delta.abs() + delta.square())).sum(1)
    each_row(rounded.logp.double() - truth, size + 2e-6 * z.abs().max(1).values + 1e-5, "logp of bf16 logits")
    if place == "argmax":
        assert (rounded.logp - truth).abs().mean() <= (eager - truth).abs().mean() + 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("compute", ["forward", "recompute"])
def test_gradients_of_the_head(name, compute):
    """fp32 logits bring the gradient to what rounding dlogits once costs; rounded logits do no worse than autograd in bf16."""
    hidden, weight, target = head(0.99, "argmax")
    numbers = dict(advantage=torch.linspace(-1, 1, N), token_weight=1 / N, clip=None, entropy_coef=0.1)

    def gradients(dtype, logits_dtype):
        x, w = hidden.to(dtype).requires_grad_(), weight.to(dtype).requires_grad_()
        out = policy_loss(x, w, target, **numbers, compute=compute, implementation=name if dtype == torch.bfloat16 else "pytorch",
                          logits_dtype=logits_dtype, chunk_rows=5)
        return torch.autograd.grad(out.loss, (x, w))

    def eager():
        x, w = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        o = Objective(numbers["advantage"], 1 / N, entropy_coef=0.1)
        return torch.autograd.grad(reference.policy_loss(x @ w.t(), target, o).loss.sum(), (x, w))

    def distance(found):
        return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, truth, strict=True)]

    truth = gradients(torch.float64, None)
    exact, rounded, plain = (distance(g) for g in (gradients(torch.bfloat16, torch.float32), gradients(torch.bfloat16, torch.bfloat16),
                                                   eager()))
    assert max(exact) < BF16
    assert all(a <= 1.2 * b for a, b in zip(rounded, plain, strict=True))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kl", ["k3", "exact"])
def test_logits_with_a_fine_target(name, kl):
    """`policy_loss_from_logits` with both fine logits is the head's loss."""
    hidden, weight, target = head(0.9, "argmax")
    ref_hidden = (hidden.float() * 0.98).bfloat16()
    fine, ref_fine = ((h.float() * weight[target].float()).sum(1) for h in (hidden, ref_hidden))
    options = dict(advantage=torch.linspace(-1, 1, N), token_weight=1 / N, kl=kl, kl_coef=0.2, entropy_coef=0.1, implementation=name)
    a = policy_loss_from_logits(hidden @ weight.t(), target, ref_logits=ref_hidden @ weight.t(), target_logit=fine,
                                ref_target_logit=ref_fine, **options)
    b = policy_loss(hidden, weight, target, ref_hidden=ref_hidden, ref_weight=weight, logits_dtype=torch.bfloat16, **options)
    for x, y in ((a.logp, b.logp), (a.kl, b.kl), (a.entropy, b.entropy), (a.loss, b.loss)):
        torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match=r"target_logit and ref_target_logit must be \[12\]"):
        policy_loss_from_logits(hidden @ weight.t(), target, target_logit=fine[:1], **(options | {"kl": "none"}))
