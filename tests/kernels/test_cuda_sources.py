import runpy
import shutil
import subprocess
from pathlib import Path

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


def toolkit(folder: Path, said: str) -> str:
    """A CUDA toolkit whose compiler says so."""
    compiler = folder / "bin" / "nvcc"
    compiler.parent.mkdir(parents=True)
    compiler.write_text(f"#!/bin/sh\n{said}\n")
    compiler.chmod(0o755)
    return str(folder)


RELEASE = "echo 'Cuda compilation tools, release {0}, V{0}.88'"


@pytest.mark.parametrize("torch_cuda, said, builds, reason", [
    ("13.0", RELEASE.format("13.0"), True, None),
    ("13.2", RELEASE.format("13.0"), True, None),
    ("12.8", RELEASE.format("13.0"), False, "is 13.0 and torch was built with CUDA 12.8"),
    ("13.0", RELEASE.format("12.9"), False, "is 12.9 and torch was built with CUDA 13.0"),
    ("13.0", "exit 1", False, "has no CUDA compiler that runs and torch was built with CUDA 13.0"),
    (None, RELEASE.format("13.0"), False, None),
])
def test_a_build_with_another_cuda_goes_on_without_it(tmp_path, capfd, torch_cuda, said, builds, reason):
    """torch's own build would fail the install; a torch without CUDA needs no word."""
    builds_cuda = runpy.run_path("setup.py")["builds_cuda"]
    assert builds_cuda(torch_cuda, toolkit(tmp_path / "cuda", said)) is builds
    message = capfd.readouterr().err
    assert reason in message and "WITHOUT the CUDA op" in message if reason else message == ""


def test_no_toolkit_needs_no_word(tmp_path, capfd):
    builds_cuda = runpy.run_path("setup.py")["builds_cuda"]
    assert builds_cuda("13.0", None) is False and capfd.readouterr().err == ""
    assert builds_cuda("13.0", str(tmp_path)) is False and "has no CUDA compiler that runs" in capfd.readouterr().err
