"""Squared norms against fp64, sums of words against Python's integers."""

import pytest
import torch
from fastsched_kernels import compiled_ops
from fastsched_kernels.sums import squared_norm, weighted_row_sums


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (1,), (7,), (1023,), (33, 1025), (3, 1 << 15), (0,)])
def test_squared_norm_is_that_of_fp64(dtype, shape):
    values = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    out = squared_norm(values)
    assert out.dtype == torch.float64 and out.shape == ()
    torch.testing.assert_close(out, values.double().square().sum(), rtol=1e-5, atol=0.0)


def test_transposed_gradients_count_as_well():
    values = torch.randn(40, 30).T
    torch.testing.assert_close(squared_norm(values), values.double().square().sum(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_shows(bad):
    values = torch.ones(5000, dtype=torch.bfloat16)
    values[4321] = bad
    assert not torch.isfinite(squared_norm(values))


def test_the_sum_is_the_same_whatever_the_number_of_threads():
    values, threads = torch.randn(1 << 18), torch.get_num_threads()
    sums = []
    for n in (1, 2):
        torch.set_num_threads(n)
        sums.append(squared_norm(values).item())
    torch.set_num_threads(threads)
    assert sums[0] == sums[1]


def test_the_compiled_op_takes_only_what_it_can_read():
    if compiled_ops.load():
        pytest.skip("compiled ops cannot be used here")
    with pytest.raises(ValueError, match="contiguous"):
        torch.ops.fastsched_kernels.squared_norm(torch.ones(4, 3).T)
    with pytest.raises(NotImplementedError, match="fp32 or bf16"):
        torch.ops.fastsched_kernels.squared_norm(torch.ones(4, dtype=torch.float64))


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("rows, width", [(0, 4), (1, 1), (5, 7), (3, 1000), (2000, 72)])
def test_sums_of_words_are_exact_modulo_2_64(monkeypatch, compiled, rows, width):
    if compiled and compiled_ops.load():
        pytest.skip("compiled ops cannot be used here")
    if not compiled:
        monkeypatch.setattr(compiled_ops, "load", lambda: "left out")
    generator = torch.Generator().manual_seed(0)
    words, factors = (torch.randint(-2**63, 2**63 - 1, shape, generator=generator) for shape in ((rows, width), (width,)))
    expected = [sum(a * b for a, b in zip(row, factors.tolist(), strict=True)) % 2**64 for row in words.tolist()]
    assert [value % 2**64 for value in weighted_row_sums(words, factors).tolist()] == expected
