import shutil
import subprocess

import pytest


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_cuda_sources_compile_for_hopper_without_spills(tmp_path):
    """Every .cu file is free of torch, so nvcc alone shows that it compiles, with vector loads and nothing in
    local memory.
    """
    command = ["nvcc", "-std=c++20", "-O3", "-gencode", "arch=compute_90a,code=sm_90a", "-Xptxas", "-v", "-cubin"]
    done = subprocess.run([*command, "csrc/cuda/averaging.cu", "-o", str(tmp_path / "averaging.cubin")], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr and "ema_and_drift_kernel" in done.stderr
