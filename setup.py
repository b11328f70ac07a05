"""Packages and the compiled ops of fastsched_kernels; everything else is in pyproject.toml.

The ops are built where torch and a C++ compiler are present (`pip install --no-build-isolation -e .`). Where they are
not, the build says so and goes on without them: the package then computes with its PyTorch implementation, and the log
of every run names it. Likewise the one CUDA op, where the CUDA compiler is of another major version than torch.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup

CPU_FLAGS = {
    "AVX512": ["-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mfma", "-DCPU_CAPABILITY_AVX512"],
    "AVX2": ["-mavx2", "-mfma", "-mf16c", "-DCPU_CAPABILITY_AVX2"],
    "DEFAULT": [],
}


def without(reason):
    print(
        f"fastsched: building WITHOUT compiled kernels, {reason}; the PyTorch implementation will be used",
        file=sys.stderr,
    )
    return {}


def cuda_compiler(home):
    """Version of the CUDA compiler of a toolkit, "13.0"; None if it says none."""
    try:
        said = subprocess.run([Path(home) / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return None
    release = re.search(r"release (\d+\.\d+)", said)
    return release and release[1]


def builds_cuda(torch_cuda, home):
    """Whether the CUDA op is built: by a compiler of the major version that torch was built with (torch.version.cuda). Where
    both are there and do not fit, says so.
    """
    if not (torch_cuda and home):
        return False
    found = cuda_compiler(home)
    if found and found.split(".")[0] == torch_cuda.split(".")[0]:
        return True
    compiler = f"the CUDA compiler in {home} is {found}" if found else f"{home} has no CUDA compiler that runs"
    print(
        f"fastsched: building WITHOUT the CUDA op, {compiler} and torch was built with CUDA {torch_cuda}: install the toolkit of that "
        "major version or set CUDA_HOME to it; on a GPU the average will be computed by PyTorch, the other kernels are Triton's",
        file=sys.stderr,
    )
    return False


def extension():
    try:
        import torch
        from torch.utils import cpp_extension
    except ImportError:
        return without("torch is not importable here: install torch, then use pip install --no-build-isolation")
    compiler = os.environ.get("CXX", "c++")
    if shutil.which(compiler) is None:
        return without(f"no C++ compiler ({compiler!r}) found: install g++ or set CXX")
    capability = torch.backends.cpu.get_cpu_capability()
    capability = capability if capability in CPU_FLAGS else "DEFAULT"
    flags = [
        "-O3",
        "-std=c++20",
        "-fopenmp",
        "-Wno-uninitialized",
        "-Wno-maybe-uninitialized",
        f"-DCPU_CAPABILITY={capability}",
        *CPU_FLAGS[capability],
    ]
    sources = ["csrc/ops.cpp", *sorted(map(str, Path("csrc/cpu").glob("*.cpp")))]
    kind, compile_args = cpp_extension.CppExtension, {"cxx": flags}
    if builds_cuda(torch.version.cuda, cpp_extension.CUDA_HOME):
        kind, sources = cpp_extension.CUDAExtension, sources + sorted(map(str, Path("csrc/cuda").glob("*.c*")))
        compile_args["nvcc"] = ["-O3", "-std=c++20"]
    ops = kind(
        "fastsched_kernels._C",
        sources,
        depends=["csrc/ops.h", "csrc/table.h", "csrc/cpu/row.h", "csrc/cpu/blocks.h", "csrc/cuda/averaging.h"],
        extra_compile_args=compile_args,
        define_macros=[("FASTSCHED_CAPABILITY", f'"{capability}"')],
    )
    return {
        "ext_modules": [ops],
        "cmdclass": {"build_ext": cpp_extension.BuildExtension.with_options(no_python_abi_suffix=True)},
    }


if __name__ == "__main__":
    setup(
        packages=find_packages(include=["fastsched", "fastsched.*"]) + ["fastsched_kernels"],
        package_dir={"fastsched_kernels": "kernels/fastsched_kernels"},  # no kernels/__init__.py: that name is the hub client's
        package_data={"fastsched": ["presets/*.yaml", "engines/models/policies/*"]},
        **extension(),
    )
