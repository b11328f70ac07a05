"""These tests are of tensors on the CPU, with or without a GPU: the Triton kernels run under Triton's interpreter, when they are
defined and while the tests run.
"""

import os
from unittest.mock import patch

import numpy as np
import pytest
import torch

INTERPRET = {"TRITON_INTERPRET": "1"}

with patch.dict(os.environ, INTERPRET):
    import fastsched_kernels.rows_triton  # noqa: F401


@pytest.fixture(autouse=True)
def interpreter():
    with patch.dict(os.environ, INTERPRET), np.errstate(all="ignore"):
        yield


@pytest.fixture(autouse=True)
def one_thread():
    """Tensors of a few kilobytes lose time to waiting threads; tests of threads set their own number."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
