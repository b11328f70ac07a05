"""Layouts and devices that a kernel would misread are put right in the entry points and refused below them."""

import pytest
import torch
from fastsched_kernels.averaging import ema_and_drift_
from fastsched_kernels.linear import linear_token_loss, linear_token_stats, policy_loss
from fastsched_kernels.logits import policy_loss_from_logits
from fastsched_kernels.reference import Objective
from fastsched_kernels.table import Coefficients
from fastsched_kernels.testing import seeded
from row_implementations import NAMES, compiled

N, H, V = 6, 8, 50
IDS = torch.randint(V, (N, 2), generator=seeded(0))
ADVANTAGE = torch.randn(N, generator=seeded(3))


def matrix(*shape, seed=0):
    return torch.randn(*shape, generator=seeded(seed))


ENTRIES = {
    "policy_loss": lambda x, w, y, i: policy_loss(x, w, y, advantage=ADVANTAGE, token_weight=1.0, implementation=i).loss,
    "recompute": lambda x, w, y, i: policy_loss(
        x, w, y, advantage=ADVANTAGE, token_weight=1.0, compute="recompute", implementation=i).loss,
    "linear_token_loss": lambda x, w, y, i: linear_token_loss(
        x, w, y, lambda logp, *_: ADVANTAGE * logp.square(), implementation=i).loss,
    "linear_token_stats": lambda x, w, y, i: (linear_token_stats(x, w, y, implementation=i).logp * ADVANTAGE).sum(),
    "policy_loss_from_logits": lambda x, w, y, i: policy_loss_from_logits(
        x @ w.t(), y, advantage=ADVANTAGE, token_weight=1.0, implementation=i).loss,
}


@pytest.mark.parametrize("implementation", NAMES)
@pytest.mark.parametrize("entry", ENTRIES)
def test_a_strided_target_is_read_as_it_is(entry, implementation):
    results = []
    for target in (IDS[:, 1], IDS[:, 1].contiguous()):
        x, w = matrix(N, H).requires_grad_(), matrix(V, H, seed=1).requires_grad_()
        loss = ENTRIES[entry](x, w, target, implementation)
        loss.backward()
        results.append((loss.detach(), x.grad, w.grad))
    torch.testing.assert_close(*results, rtol=0, atol=0)


STRIDED = {
    "target": dict(target=IDS[:, 1]),
    "logits": dict(logits=matrix(V, N).t()),
    "ref_logits": dict(ref_logits=matrix(V, N).t()),
    "of another dtype": dict(ref_logits=matrix(N, V).bfloat16()),
    "of another shape": dict(ref_logits=matrix(N, V + 1)),
    "too short": dict(target=IDS[:-1, 1].contiguous()),
}


@compiled
@pytest.mark.parametrize("what", STRIDED)
def test_rows_refuse_what_they_would_misread(implementation, what):
    given = {"logits": matrix(N, V), "target": IDS[:, 1].contiguous(), "ref_logits": matrix(N, V, seed=1), **STRIDED[what]}
    x, target, ref = given["logits"], given["target"], given["ref_logits"]
    state = implementation.row_stats(matrix(N, V), IDS[:, 1].contiguous(), matrix(N, V, seed=1), 1.0, None)
    o = Objective(1.0, 1.0, kl="exact", kl_coef=0.1)
    for call in (
        lambda: implementation.row_stats(x, target, ref, 1.0, None),
        lambda: implementation.row_dlogits_(x, target, ref, state, Coefficients(*torch.ones(3, N)), 1.0, None),
        lambda: implementation.policy_rows_(x, target, ref, o, 1.0, None, None, True),
    ):
        with pytest.raises(ValueError, match="contiguous|int64"):
            call()


def test_averages_and_parameters_lie_on_one_device():
    a = torch.zeros(3)
    for avg, params in (([a], [torch.zeros(3, device="meta")]), ([a, torch.zeros(3, device="meta")], [a, torch.zeros(3, device="meta")])):
        with pytest.raises(ValueError, match="device"):
            ema_and_drift_(avg, params, 0.5)
