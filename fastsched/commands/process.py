"""How the process of a command is started on a CPU: with a heap that stays flat and a fast OpenMP, which only its environment can choose.

Tensors of changing size make glibc's heap grow for as long as a run lasts. vLLM asks its users to preload tcmalloc and Intel's OpenMP;
here the command starts itself again with what the machine has of them, and without tcmalloc glibc gives large blocks back.
"""

import ctypes.util
import os
import platform
import sys
from pathlib import Path
from typing import Mapping

LARGE_BLOCKS = "glibc.malloc.mmap_threshold=4194304:glibc.malloc.mmap_max=1000000:glibc.malloc.hugetlb=1"
"""Of 4 MiB and more: each is a mapping of its own, in huge pages, and goes back to the system when it is freed."""


FEW_PRIMITIVES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256"}
"""oneDNN keeps the machine code of 1024 products, and packed rows bring some sixty new shapes a step: half a gigabyte for few hits."""


def start_again_if_better() -> None:
    """Replace this process by the same command under `better_environment`; does nothing where that is empty."""
    if better := better_environment(os.environ):
        os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**os.environ, **better})


def better_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What to set beside `environ`; nothing that is set there already is touched, so a second call finds nothing."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc" or Path("/proc/driver/nvidia").exists():
        return {}
    libraries = [library for library in (_tcmalloc(), _intel_openmp()) if library]
    better = {name: value for name, value in FEW_PRIMITIVES.items() if name not in environ}
    if libraries and not environ.get("LD_PRELOAD"):
        better["LD_PRELOAD"] = ":".join(libraries)
    if "tcmalloc" not in {**environ, **better}.get("LD_PRELOAD", "") and not environ.get("GLIBC_TUNABLES"):
        better["GLIBC_TUNABLES"] = LARGE_BLOCKS
    return better


def _tcmalloc() -> str | None:
    return ctypes.util.find_library("tcmalloc_minimal") or ctypes.util.find_library("tcmalloc")


def _intel_openmp() -> str | None:
    library = Path(sys.prefix, "lib", "libiomp5.so")
    return str(library) if library.exists() else None
