import pytest
import torch
from fastsched_kernels import reference
from fastsched_kernels.averaging import ema_and_drift_, implementation
from fastsched_kernels.testing import seeded
from row_implementations import needs_compiled_ops
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("alpha", [0.0, 0.9, 1.0])
def test_matches_fp64(dtype, alpha):
    """fp32 and bf16 take the compiled op, fp16 PyTorch; sizes below, at and beyond a vector, a block and a piece."""
    g = seeded(0)
    shapes = [(3, 5), (1,), (0,), (16,), (1024,), (1000, 77)]
    avg = [torch.randn(s, generator=g) for s in shapes]
    params = [a.to(dtype) + (0.1 * torch.randn(a.shape, generator=g)).to(dtype) for a in avg]
    new, drift, norm = reference.ema_and_drift(avg, params, alpha)
    out = ema_and_drift_(avg, params, alpha)
    for a, n in zip(avg, new, strict=True):
        torch.testing.assert_close(a.double(), n, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(out.squared_drift.double(), drift, rtol=1e-5, atol=1e-9)
    torch.testing.assert_close(out.squared_norm.double(), norm, rtol=1e-6, atol=0)


@needs_compiled_ops
def test_the_implementation_is_named():
    """What the record of a run says; a float16 parameter is the one that only PyTorch takes."""
    a = [torch.zeros(4)]
    assert implementation(a, a) == implementation(a, [torch.zeros(4).bfloat16()]) == "compiled"
    assert implementation(a, [torch.zeros(4).half()]) == "pytorch (no kernel for torch.float16)"
    assert implementation([torch.zeros(4, 2)[:, 0]], a) == "pytorch (not contiguous)"
    if torch.version.cuda is None:
        with FakeTensorMode():
            elsewhere = [torch.zeros(4, device="cuda")]
            assert implementation(elsewhere, elsewhere) == "pytorch (compiled ops were built without cuda)"


def test_shards_add_up():
    a, p = torch.randn(100, generator=seeded(1)), torch.randn(100, generator=seeded(2))
    whole = ema_and_drift_([a.clone()], [p], 0.5)
    halves = [ema_and_drift_([a[i].clone()], [p[i]], 0.5) for i in (slice(0, 30), slice(30, 100))]
    torch.testing.assert_close(whole.squared_drift, sum(h.squared_drift for h in halves))


def test_bad_input_is_named():
    a = torch.zeros(3)
    for args, words in (
        (([a], [a, a], 0.5), "1 averages"),
        (([a], [a], 1.5), "alpha"),
        (([a.half()], [a], 0.5), "tensor 0"),
        (([a], [torch.zeros(4)], 0.5), "tensor 0"),
    ):
        with pytest.raises(ValueError, match=words):
            ema_and_drift_(*args)
    assert ema_and_drift_([], [], 0.5).squared_norm == 0


def test_result_does_not_depend_on_the_thread_count():
    a, p = torch.randn(200_000, generator=seeded(1)), torch.randn(200_000, generator=seeded(2))
    before = torch.get_num_threads()
    results = []
    for threads in (1, 2):
        torch.set_num_threads(threads)
        results.append(ema_and_drift_([a.clone()], [p], 0.9))
    torch.set_num_threads(before)
    assert results[0] == results[1]
