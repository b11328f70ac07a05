"""Under which environment a command starts itself again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fastsched.commands import process

ON_A_CPU = sys.platform == "linux" and not Path("/proc/driver/nvidia").exists()
pytestmark = pytest.mark.skipif(not ON_A_CPU, reason="only on a CPU under Linux")


@pytest.fixture
def found(monkeypatch):
    def find(tcmalloc: str | None, openmp: str | None):
        monkeypatch.setattr(process, "_tcmalloc", lambda: tcmalloc)
        monkeypatch.setattr(process, "_intel_openmp", lambda: openmp)
    return find


def test_tcmalloc_and_intels_openmp_where_they_are(found):
    found("libtcmalloc_minimal.so.4", "/env/lib/libiomp5.so")
    assert process.better_environment({}) == {"LD_PRELOAD": "libtcmalloc_minimal.so.4:/env/lib/libiomp5.so", **process.FEW_PRIMITIVES}


def test_without_tcmalloc_glibc_gives_large_blocks_back(found):
    found(None, None)
    assert process.better_environment({}) == {"GLIBC_TUNABLES": process.LARGE_BLOCKS, **process.FEW_PRIMITIVES}


@pytest.mark.parametrize("tcmalloc", [None, "libtcmalloc.so.4"])
@pytest.mark.parametrize("openmp", [None, "/env/lib/libiomp5.so"])
def test_a_process_that_started_again_does_not_do_so_once_more(found, tcmalloc, openmp):
    found(tcmalloc, openmp)
    assert process.better_environment(process.better_environment({})) == {}


def test_what_the_user_set_is_kept(found):
    found("libtcmalloc.so.4", "/env/lib/libiomp5.so")
    chosen = {"LD_PRELOAD": "libmine.so", "GLIBC_TUNABLES": "glibc.malloc.check=1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "8"}
    assert process.better_environment(chosen) == {}


PROGRAM = """
import os, sys
from fastsched.commands.process import start_again_if_better
start_again_if_better()
print(os.getpid(), sys.argv[1:], sys.flags.dev_mode, os.environ.get("LD_PRELOAD"), bool(os.environ.get("GLIBC_TUNABLES")))
"""


def test_the_process_stays_the_same_and_so_do_its_arguments():
    chosen = ("LD_PRELOAD", "GLIBC_TUNABLES", *process.FEW_PRIMITIVES)
    environment = {name: value for name, value in os.environ.items() if name not in chosen}
    started = subprocess.Popen([sys.executable, "-X", "dev", "-c", PROGRAM, "train", "--a b"], stdout=subprocess.PIPE, text=True,
                               env=environment)
    printed = started.communicate(timeout=60)[0].split(maxsplit=1)
    assert int(printed[0]) == started.pid and printed[1].startswith("['train', '--a b'] True")
    better = process.better_environment(environment)
    assert printed[1].split()[-2:] == [str(better.get("LD_PRELOAD")), str("GLIBC_TUNABLES" in better)]
