"""Freed memory goes back to the system."""

import platform
import subprocess
import sys

import pytest

HOLES = """
import re, sys
from fastsched.loop.heap import give_back_freed_memory

def resident():
    return int(re.search(r"VmRSS:\\s+(\\d+) kB", open("/proc/self/status").read())[1]) // 1024

blocks = [bytearray(100_000) for _ in range(4000)]
del blocks[:-1]  # the last one holds the heap's end where it is
full = resident()
give_back_freed_memory(11)
kept = full - resident()
give_back_freed_memory(20)
print(kept, full - resident())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's heap")
def test_holes_go_back_to_the_system():
    """400 MB of them below the threshold of what is mapped by itself; in every tenth step."""
    printed = subprocess.run([sys.executable, "-c", HOLES], capture_output=True, text=True, check=True,
                             env={"PATH": "/usr/bin:/bin", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4194304"})
    before, after = map(int, printed.stdout.split())
    assert before < 100 and after > 300
