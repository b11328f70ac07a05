import shutil
import subprocess

import pytest
from torch.utils.cpp_extension import COMMON_NVCC_FLAGS, include_paths


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_sources_compile_for_hopper_without_spills(tmp_path):
    """Every .cu file is free of torch, so nvcc alone shows that it compiles with the flags of torch's builds (no implicit
    conversion of bf16), and with nothing in local memory.
    """
    command = ["nvcc", "-std=c++20", "-O3", *COMMON_NVCC_FLAGS, "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run([*command, "csrc/cuda/averaging.cu", "-o", str(tmp_path / "averaging.cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr and "ema_and_drift_kernel" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_op_compiles_against_torch(tmp_path):
    """Its host side needs torch's CUDA headers, which CPU wheels ship but for one file that only says how libraries are linked."""
    macros = tmp_path / "c10" / "cuda" / "impl" / "cuda_cmake_macros.h"
    macros.parent.mkdir(parents=True)
    macros.write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
    folders = [f"-I{folder}" for folder in (*include_paths(), tmp_path)]
    command = ["nvcc", "-std=c++20", "-c", *folders, "csrc/cuda/averaging_op.cpp", "-o", str(tmp_path / "averaging_op.o")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
