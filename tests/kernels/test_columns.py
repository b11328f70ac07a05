"""The column filter: which columns stay, and the head with and without it."""

import pytest
import torch
from fastsched_kernels.columns import active_columns
from fastsched_kernels.linear import linear_token_stats
from fastsched_kernels.testing import relative_error, seeded
from head_problem import ours, per_token, problem
from row_implementations import needs_compiled_ops


def logits(n, v, dtype=torch.float32, seed=0):
    return (torch.randn(n, v, generator=seeded(seed)) * 2).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_active_columns(dtype):
    """C++ for bf16 and fp32, PyTorch for fp64."""
    dz = (logits(50, 5003, torch.bfloat16) * 1e-3).to(dtype)
    threshold = torch.rand(50, generator=seeded(1)) * 0.02
    active, sums = active_columns(dz, threshold)
    assert torch.equal(active, (dz.float().abs() > threshold[:, None]).any(0)) and 0 < active.sum() < 5003
    torch.testing.assert_close(sums, dz.float().abs().sum(0))
    dz[3, 4999] = torch.nan
    assert active_columns(dz, torch.full((50,), 1e9))[0].nonzero().tolist() == [[4999]]


@needs_compiled_ops
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_gather_columns_and_add_rows(dtype):
    dz, columns = logits(7, 301, dtype), torch.tensor([0, 5, 6, 299, 300])
    assert torch.equal(torch.ops.fastsched_kernels.gather_columns(dz, columns), dz[:, columns])
    total, part = logits(301, 13), logits(5, 13, dtype, seed=1)
    expected = total.index_add(0, columns, part.float())
    torch.ops.fastsched_kernels.add_rows_(total, columns, part)
    assert torch.equal(total, expected)
    with pytest.raises(IndexError, match="outside"):
        torch.ops.fastsched_kernels.gather_columns(dz, columns + 1)


def test_column_filter_is_exact_at_zero_and_drops_by_gradient_not_probability():
    tensors, numbers, target, old, ref = problem(torch.float32)
    options = {**numbers, "old_logp": old, "ref_logp": ref, "kl": "exact", "kl_coef": 0.2, "entropy_coef": 0.1}
    exact = ours(tensors, target, options)
    tiny = ours(tensors, target, options, filter_eps=1e-9)
    torch.testing.assert_close(exact[2], tiny[2])
    assert exact[1].dropped == 0 and tiny[1].dropped < 1e-6
    coarse = ours(tensors, target, options, filter_eps=0.05)
    assert 0 < coarse[1].dropped < 0.5
    torch.testing.assert_close(coarse[0], exact[0])
    torch.testing.assert_close(coarse[2]["bias"], exact[2]["bias"])
    assert relative_error(coarse[2]["weight"], exact[2]["weight"]) < 0.5
    assert not torch.equal(coarse[2]["weight"], exact[2]["weight"])
    again = ours(tensors, target, options, filter_eps=0.05, compute="recompute")
    torch.testing.assert_close(again[2], coarse[2])
    assert again[1].dropped.isnan() and ours(tensors, target, options, compute="recompute")[1].dropped == 0


def test_column_filter_of_the_statistics_acts_in_backward():
    tensors, _, target, _, _ = problem(torch.float32)
    found = []
    for eps in (0.0, 0.05):
        x, w = (tensors[k].clone().requires_grad_() for k in ("hidden", "weight"))
        stats = linear_token_stats(x, w, target, filter_eps=eps)
        (stats.logp * per_token).sum().backward()
        found.append((stats.logp.detach(), x.grad, w.grad))
    (logp, *exact), (same, *filtered) = found
    assert torch.equal(logp, same) and all(0 < relative_error(f, e) < 0.5 for f, e in zip(filtered, exact, strict=True))
