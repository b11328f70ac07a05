"""The implementations of the row contract, as parameters of tests. C++ is left out, with the reason, where the compiled ops were built
for more than this processor can or says that it can (ATEN_CPU_CAPABILITY); where they are missing its tests fail.
"""

import pytest
from fastsched_kernels import compiled_ops, rows_cpp, rows_pytorch, rows_triton

REFUSED = compiled_ops.load()
needs_compiled_ops = pytest.mark.skipif("were built for" in (REFUSED or ""), reason=str(REFUSED))

NAMES = ["pytorch", pytest.param("cpp", marks=needs_compiled_ops), "triton"]
_CPP = pytest.param(rows_cpp, marks=needs_compiled_ops, id="cpp")
_TRITON = pytest.param(rows_triton, id="triton")
each = pytest.mark.parametrize("implementation", [pytest.param(rows_pytorch, id="pytorch"), _CPP, _TRITON])
on_the_cpu = pytest.mark.parametrize("implementation", [pytest.param(rows_pytorch, id="pytorch"), _CPP])
compiled = pytest.mark.parametrize("implementation", [_CPP, _TRITON])
