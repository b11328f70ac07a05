"""Where chunks begin, and what a step copies from the host."""

import pytest
import torch
from fastsched_kernels.chunks import chunk_slices
from fastsched_kernels.reference import Objective, token_loss
from fastsched_kernels.selection import active_rows
from fastsched_kernels.table import number_vector, objective_table
from fastsched_kernels.trajectory import trajectory_keep
from hypothesis import given
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode


def check_chunks(n: int, size: int) -> None:
    """The rows of [R] tensors begin at 16-byte addresses, so that a chunk's kernel is the one that the first chunk compiled."""
    slices = chunk_slices(n, size)
    assert all(0 < s.stop - s.start <= size for s in slices)
    assert [s.start for s in slices] == [0, *(s.stop for s in slices)][: len(slices)] and sum(s.stop - s.start for s in slices) == n
    assert len(slices) <= 1 if n <= size else size < 16 or all(s.start % 16 == 0 for s in slices)
    assert size < 16 or len(slices) <= -(-n // (size // 16 * 16))


def test_chunks_cover_the_rows_begin_at_multiples_of_16_and_hold_no_more_than_was_asked_for():
    for n in (*range(100), 4095, 4096, 4097, 16_384, 65_535, 70_000):
        for size in (1, 2, 7, 15, 16, 17, 31, 32, 33, 48, 64, 65, 100, 4095, 4096, 4097, 9000):
            check_chunks(n, size)


@pytest.mark.slow
@given(n=st.integers(0, 70_000), size=st.integers(1, 9000))
def test_chunks_of_any_numbers(n, size):
    check_chunks(n, size)


class HostCopies(TorchDispatchMode):
    """Counts what moves between devices; nothing has values."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += function is torch.ops.aten._to_copy.default and "device" in (kwargs or {})
        return function(*args, **(kwargs or {}))


CUDA = torch.device("cuda:0")
HOST_NUMBERS = Objective(0.5, 1.0, kl="k3", kl_coef=0.1, entropy_coef=0.01, clip_low=0.2, clip_high=0.2, distill=0.1)
CALLS = {
    "table": lambda v: objective_table(HOST_NUMBERS._replace(old_logp=v, ref_logp=v), 4, 0.7, v, v, CUDA),
    "temperature": lambda v: number_vector(0.7, 4, CUDA),
    "reference": lambda v: token_loss(v, v, v, HOST_NUMBERS._replace(old_logp=v, ref_logp=v, dual_clip=3.0)),
    "selection": lambda v: active_rows(HOST_NUMBERS, 4, CUDA, True),
    "trajectory": lambda v: trajectory_keep(v.long(), 0.5, total=9),
}


@pytest.mark.parametrize("call", CALLS)
def test_numbers_of_the_host_are_filled_in_on_the_device_and_not_copied_to_it(call):
    """A copy from pageable memory waits for everything that the device has been given."""
    with FakeTensorMode(), HostCopies() as seen:
        vector = torch.empty(4, device=CUDA)
        vector.cpu().to(CUDA)
        assert seen.count == 2  # it counts what it should
        CALLS[call](vector)
    assert seen.count == 2


def test_rows_known_on_the_host():
    assert active_rows(HOST_NUMBERS, 4, torch.device("cpu"), True) is None
    assert active_rows(HOST_NUMBERS._replace(token_weight=0.0), 4, torch.device("cpu"), False).numel() == 0
    flat = Objective(0.0, torch.tensor([1.0, 0.0, 1.0]), kl="none", kl_coef=1.0)
    assert active_rows(flat, 3, torch.device("cpu"), True).numel() == 0
    assert active_rows(flat._replace(kl="k1"), 3, torch.device("cpu"), True).tolist() == [0, 2]
