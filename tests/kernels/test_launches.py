"""Where Triton's kernels are launched, seen from stand-ins that launch nothing."""

from contextlib import contextmanager

import pytest
import torch
from fastsched_kernels import rows_triton
from fastsched_kernels.reference import Objective
from fastsched_kernels.table import Coefficients, RowState
from torch._subclasses.fake_tensor import FakeTensorMode

KERNELS = ("partial_kernel", "combine_kernel", "target_kernel", "gradient_kernel", "policy_kernel")


@pytest.fixture
def launches(monkeypatch):
    """[(kernel, grid, the tensor on whose device it is)] of every launch."""
    seen, entered = [], []

    @contextmanager
    def on_device_of(tensor):
        entered.append(tensor)
        yield
        entered.pop()

    class Kernel:
        def __init__(self, name):
            self.name = name

        def __getitem__(self, grid):
            return lambda *args, **kwargs: seen.append((self.name, grid, entered[-1] if entered else None))

    monkeypatch.setattr(rows_triton, "on_device_of", on_device_of)
    for name in KERNELS:
        monkeypatch.setattr(rows_triton, name, Kernel(name))
    return seen


def call_everything(n: int, v: int = 8192) -> torch.Tensor:
    x, target = torch.zeros(1, v).expand(n, v), torch.zeros(n, dtype=torch.long)
    rows_triton.row_stats(x, target, None, 1.0, None)
    rows_triton.row_dlogits_(x, target, None, RowState(*torch.zeros(8, n)), Coefficients(*torch.zeros(3, n)), 1.0, None)
    rows_triton.policy_rows_(x, target, None, Objective(1.0, 1.0), 1.0, None, None, True)
    return x


def test_every_launch_is_on_the_device_of_its_tensors(launches):
    call_everything(2)
    assert {name for name, _, _ in launches} == set(KERNELS)
    assert all(tensor is not None and len(tensor) == 2 for _, _, tensor in launches)


def test_the_device_of_a_tensor_becomes_the_current_one(monkeypatch):
    entered = []
    monkeypatch.setattr(torch.cuda, "device", entered.append)
    with FakeTensorMode():
        rows_triton.on_device_of(torch.empty(1, device="cuda:1"))
    with rows_triton.on_device_of(torch.empty(1)):
        pass
    assert entered == [torch.device("cuda:1")]


@pytest.mark.parametrize("n", [2, 65_537])
def test_rows_lie_on_the_first_grid_axis(launches, n):
    """It holds 2^31 - 1 programs, the others 65,535: those take the splits of few rows."""
    call_everything(n)
    assert {grid[0] for _, grid, _ in launches} == {n}
    assert max(grid[1] for _, grid, _ in launches if len(grid) > 1) == (2 if n == 2 else 1)


def test_no_rows_launch_nothing(launches):
    call_everything(0)
    assert launches == []
