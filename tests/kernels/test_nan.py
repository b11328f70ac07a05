"""A NaN reaches every number of its row and none of another, in every implementation; only a coefficient of 0 stops it."""

import pytest
import torch
from fastsched_kernels import rows_pytorch
from fastsched_kernels.reference import Objective
from fastsched_kernels.table import Coefficients
from fastsched_kernels.testing import seeded
from row_implementations import each

NAN, TARGET = float("nan"), torch.tensor([0, 3, 4999])
ONES = Coefficients(*torch.ones(3, 3))


def logits(seed=0, v=5000):
    return torch.randn(3, v, generator=seeded(seed)) * 2


def only_second(values):
    """Of [3] or [3, V]: the second row is NaN throughout, the others not at all."""
    bad = values.isnan() if values.dim() == 1 else values.isnan().any(-1)
    return bad.tolist() == [False, True, False]


@each
@pytest.mark.filterwarnings("ignore:All-NaN slice")  # Triton's interpreter, of its own maximum
@pytest.mark.parametrize("where", [5, 2500, 4999, slice(None)], ids=["first block", "second block", "tail", "whole row"])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_of_a_logit_stays_in_the_row(implementation, where, softcap):
    x = logits()
    x[1, where] = NAN
    state = implementation.row_stats(x, TARGET, None, 1.0, softcap)
    assert only_second(state.logp) and only_second(state.entropy), state
    gradient = implementation.row_dlogits_(x.clone(), TARGET, None, state, ONES._replace(kl=torch.zeros(3)), 1.0, softcap)
    assert only_second(gradient) and gradient[1].isnan().all()


@each
@pytest.mark.parametrize("where", [5, 4999])
def test_of_a_reference_logit_reaches_the_kl_and_its_gradient(implementation, where):
    x, ref = logits(), logits(1)
    ref[1, where] = NAN
    state = implementation.row_stats(x, TARGET, ref, 1.0, None)
    assert only_second(state.kl) and state.logp.isfinite().all() and state.entropy.isfinite().all()
    assert only_second(implementation.row_dlogits_(x.clone(), TARGET, ref, state, ONES, 1.0, None))
    off = ONES._replace(kl=torch.zeros(3))
    assert implementation.row_dlogits_(x.clone(), TARGET, ref, state, off, 1.0, None).isfinite().all()


def number(value):
    return torch.tensor([-5.0, value, -6.0])


@each
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
@pytest.mark.parametrize("change", ["old_logp", "ref_logp", "advantage", "kl_coef", "entropy_coef"])
@pytest.mark.parametrize("kl", ["k1", "k2", "k3"])
def test_of_a_number_of_the_loss(implementation, surrogate, change, kl):
    x = logits(v=300)
    numbers = {"advantage": 1.0, "old_logp": number(-5.5), "ref_logp": number(-5.5), "kl_coef": 0.1, "entropy_coef": 0.1}
    o = Objective(token_weight=1.0, kl=kl, clip_low=0.2, clip_high=0.2, surrogate=surrogate, **{**numbers, change: number(NAN)})
    gradient, target = x.clone(), torch.tensor([0, 3, 299])
    out = implementation.policy_rows_(gradient, target, None, o, 1.0, None, None, True)
    assert only_second(out.loss), out
    constant = change == "ref_logp" and kl == "k1"  # the slope of k1 is 1 whatever the reference says
    clamped = implementation is rows_pytorch and change in ("old_logp", "ref_logp")  # autograd's clamp has the slope 0 at NaN
    assert only_second(gradient) or (constant or clamped) and gradient.isfinite().all(), out


@each
@pytest.mark.parametrize("on_policy", [False, True])
@pytest.mark.parametrize("surrogate", ["clip", "cispo"])
def test_of_a_logit_reaches_the_loss(implementation, on_policy, surrogate):
    x = logits(v=300)
    x[1, 7] = NAN
    o = Objective(1.0, 1.0, None if on_policy else number(-5.5), clip_low=0.2, clip_high=0.2, surrogate=surrogate)
    out = implementation.policy_rows_(x, torch.tensor([0, 3, 299]), None, o, 1.0, None, None, True)
    assert only_second(out.loss) and only_second(out.ratio) and only_second(x), out
    assert not out.clipped[1]


@each
def test_infinite_kl_in_a_block_of_no_weight_is_no_nan(implementation):
    """The first block is so far below the second that its weight underflows, and the reference has no support in it."""
    x, ref = logits(), logits(1)
    x[:, :4096] -= 300.0
    ref[:, :4096] = -float("inf")
    state = implementation.row_stats(x, torch.full((3,), 4999), ref, 1.0, None)
    assert not state.kl.isnan().any()
    assert implementation.row_dlogits_(x, torch.full((3,), 4999), ref, state, ONES, 1.0, None).isfinite().all()
