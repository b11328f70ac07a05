"""Rows of logits in every implementation: the regression table of the field's faults."""

import pytest
import torch
from fastsched_kernels import reference, rows_cpp, rows_pytorch
from fastsched_kernels.reference import Objective
from fastsched_kernels.rows_triton import block_size, merge_shards, shard_states, splits, target_logits
from fastsched_kernels.table import Coefficients
from fastsched_kernels.testing import assert_no_worse, poisoned_empty, seeded
from fastsched_kernels.triton_stats import Partial
from row_implementations import compiled, each, needs_compiled_ops

INF = float("inf")


def logits(n, v, dtype=torch.float32, seed=0, scale=2.0):
    return (torch.randn(n, v, generator=seeded(seed)) * scale).to(dtype)


def gradients(implementation, x, target, ref, coefficients, temperature=1.0, softcap=None):
    """dloss/dlogits of sum(c . (logp, entropy, kl)): ours, and by autograd in fp64 and in x's dtype."""
    c = Coefficients(*coefficients)
    state = implementation.row_stats(x, target, ref, temperature, softcap)
    ours = implementation.row_dlogits_(x.clone(), target, ref, state, c, temperature, softcap)
    by_autograd = []
    for dtype in (torch.float64, x.dtype):
        leaf = x.to(dtype).clone().requires_grad_()
        s = reference.token_stats(leaf, target, ref_logits=None if ref is None else ref.to(dtype), temperature=temperature, softcap=softcap)
        loss = (c.logp * s.logp + c.entropy * s.entropy).sum() + (0.0 if ref is None else (c.kl * s.kl).sum())
        by_autograd.append(torch.autograd.grad(loss, leaf)[0])
    return state, ours, *by_autograd


def check(implementation, x, target, ref=None, **scales):
    c = torch.randn(3, len(x), generator=seeded(7))
    with poisoned_empty():
        state, ours, truth, eager = gradients(implementation, x, target, ref, c, **scales)
    stats = reference.token_stats(x.double(), target, ref_logits=None if ref is None else ref.double(), **scales)
    for name in ("logp", "entropy", "kl"):
        torch.testing.assert_close(getattr(state, name).double(), getattr(stats, name), rtol=1e-5, atol=1e-5, equal_nan=True)
    for row in range(len(x)):
        assert_no_worse(ours[row], eager[row], truth[row], f"row {row}")
    rest = torch.ones_like(x, dtype=torch.bool).scatter_(-1, target[:, None], False)
    if x.shape[1] > 1 and truth[rest].isfinite().all():
        assert_no_worse(ours[rest], eager[rest], truth[rest], "all but the target column", factor=2)


@each
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("v", [1, 15, 17, 1000, 2049, 32003])
def test_any_vocabulary_first_and_last_target(implementation, dtype, v):
    """Spans a row shorter than a vector, tails of a vector and of a block, the target in the tail."""
    for ref in (None, logits(4, v, dtype, 1)):
        check(implementation, logits(4, v, dtype), torch.tensor([0, v - 1, v // 2, v - 1]), ref)
        assert (implementation.row_stats(logits(4, v, dtype), torch.tensor([0, v - 1, v // 2, v - 1]), ref, 1.0, None).logp <= 0).all()


@each
@pytest.mark.slow
@pytest.mark.parametrize("v", [50257, 128257, 151936])
def test_real_vocabularies(implementation, v):
    check(implementation, logits(3, v), torch.tensor([0, v - 1, v // 3]), logits(3, v, seed=1))


@each
@pytest.mark.parametrize("where", [slice(0, 2048), slice(2048, 4096), slice(4096, 5000)], ids=["first", "middle", "last"])
def test_masked_block(implementation, where):
    x, ref = logits(2, 5000), logits(2, 5000, seed=1)
    x[:, where] = -INF
    target = torch.tensor([0 if where.start else 4999, 2047 if where.start else 2048])
    check(implementation, x, target)
    check(implementation, x, target, ref)
    ref[:, where] = -INF
    check(implementation, x, target, ref)


@each
def test_masked_target(implementation):
    """logp is -inf; its gradient is that of the probabilities, with entropy and KL in it, and no NaN."""
    x, ref, target = logits(3, 100), logits(3, 100, seed=1), torch.tensor([0, 50, 99])
    x[torch.arange(3), target] = -INF
    check(implementation, x, target)
    check(implementation, x, target, ref)


@each
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_empty_row_is_defined(implementation, softcap):
    x = torch.full((1, 40), -INF) if softcap is None else logits(1, 40)
    state = implementation.row_stats(x, torch.tensor([3]), None, 1.0, softcap)
    c = Coefficients(*torch.ones(3, 1))
    gradient = implementation.row_dlogits_(x.clone(), torch.tensor([3]), None, state, c, 1.0, softcap)
    assert gradient.isfinite().all()
    if softcap is None:
        assert state.logp == -INF and state.entropy == 0 and (gradient == 0).all()


@each
def test_reference_without_support_gives_infinite_kl_and_no_nan(implementation):
    x, ref = logits(1, 40), logits(1, 40, seed=1)
    ref[0, 5] = -INF
    state = implementation.row_stats(x, torch.tensor([3]), ref, 1.0, None)
    gradient = implementation.row_dlogits_(x.clone(), torch.tensor([3]), ref, state, Coefficients(*torch.ones(3, 1)), 1.0, None)
    assert state.kl == INF and gradient.isfinite().all()


@each
@pytest.mark.parametrize("offset, ref_offset", [(-200.0, 0.0), (1e4, 1e4), (4096.0, -4096.0), (64.0, -64.0)])
def test_common_offset_costs_no_precision(implementation, offset, ref_offset):
    """Offsets that are exact in fp32 on a grid of 1/1024, so that the truth is that of the unshifted rows."""
    x, ref = ((logits(3, 5000, seed=s) * 1024).round() / 1024 for s in (0, 1))
    target = torch.tensor([0, 17, 4999])
    truth = reference.token_stats(x.double(), target, ref_logits=ref.double())
    state = implementation.row_stats(x + offset, target, ref + ref_offset, 1.0, None)
    for name in ("logp", "entropy", "kl"):
        assert (getattr(state, name).double() - getattr(truth, name)).abs().max() < 1e-5, name


@each
@pytest.mark.parametrize("scales", [{"temperature": 0.3}, {"softcap": 4.0}, {"temperature": torch.tensor([0.3, 1.0, 2.5]), "softcap": 4.0}])
def test_scales_with_reference(implementation, scales):
    check(implementation, logits(3, 777), torch.tensor([0, 5, 776]), logits(3, 777, seed=1), **scales)


@each
def test_nan_in_a_row_stays_in_the_row(implementation):
    x = logits(3, 100)
    x[1, 50] = torch.nan
    state = implementation.row_stats(x, torch.zeros(3, dtype=torch.long), None, 1.0, None)
    assert state.logp.isfinite().tolist() == [True, False, True]


@compiled
def test_infinite_kl_with_zero_coefficient_costs_nothing(implementation):
    x, ref = logits(1, 40), logits(1, 40, seed=1)
    ref[0, 5] = -INF
    o = Objective(advantage=1.0, token_weight=1.0, kl="exact", kl_coef=0.0)
    for module in (implementation, rows_pytorch):
        out = module.policy_rows_(x.clone(), torch.tensor([3]), ref, o, 1.0, None, None, True)
        assert out.loss.isfinite() and out.kl == INF


@needs_compiled_ops
def test_ops_work_under_fake_tensors_and_refuse_other_dtypes():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        state = rows_cpp.row_stats(torch.empty(3, 7), torch.zeros(3, dtype=torch.long), None, 1.0, None)
        assert state.logp.shape == (3,)
    with pytest.raises(NotImplementedError, match="fp32 or bf16"):
        rows_cpp.row_stats(torch.zeros(1, 4).half(), torch.tensor([0]), None, 1.0, None)


@each
def test_offsets_beyond_two_to_the_31_elements(implementation):
    """Two rows of a buffer whose second one starts past 2^31 elements; untouched pages cost no memory."""
    n = 2**31 + 4096
    buffer = torch.empty(n + 300, dtype=torch.bfloat16).as_strided((2, 300), (n, 1))
    buffer.copy_(logits(2, 300, torch.bfloat16))
    target, o = torch.tensor([0, 299]), Objective(advantage=1.0, token_weight=1.0)
    far = implementation.policy_rows_(buffer, target, None, o, 1.0, None, None, True)
    near_buffer = logits(2, 300, torch.bfloat16)
    near = implementation.policy_rows_(near_buffer, target, None, o, 1.0, None, None, True)
    torch.testing.assert_close(far.loss, near.loss)
    assert torch.equal(buffer.contiguous(), near_buffer)


@needs_compiled_ops
def test_more_rows_than_a_grid_dimension():
    """The C++ rows have no grid; test_launches has Triton's."""
    n = 65_537
    state = rows_cpp.row_stats(logits(1, 3).expand(n, 3), torch.zeros(n, dtype=torch.long), None, 1.0, None)
    assert state.logp.unique().numel() == 1 and len(state.logp) == n


def test_vocabulary_shards_of_two_ranks_merge_to_the_whole():
    x, ref, target = logits(5, 1000), logits(5, 1000, seed=1), torch.tensor([0, 499, 500, 999, 700])
    x[2, :500] = -INF
    parts = [shard_states(x[:, s].contiguous(), ref[:, s].contiguous(), 0.7, None) for s in (slice(0, 500), slice(500, 1000))]
    merged = merge_shards(torch.cat(parts, 1), target_logits(x, target, 0.7, None), True)
    torch.testing.assert_close(merged, rows_pytorch.row_stats(x, target, ref, 0.7, None), rtol=1e-5, atol=1e-5)


def test_few_rows_are_split_over_the_vocabulary():
    assert shard_states(logits(2, 40_000), None, 1.0, None).shape == (2, 10, len(Partial))
    for n, v in ((1, 151936), (100, 151936), (264, 50257), (4096, 151936), (3, 17)):
        block = block_size(v)
        count, size = splits(n, v, block)
        assert (count - 1) * size < v <= count * size and size % block == 0 and (n < 264 or count == 1)
