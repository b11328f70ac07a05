"""Triton kernels compiled for sm_90 on this machine: how often, and whether the report sees what it must refuse."""

import json
import os
import subprocess
import sys

import pytest

ENVIRONMENT = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}

PLANTED = """
import json, torch
from bench.kernels import compile_report as report
report.compile_only()
x, n = torch.zeros(2, 50257, dtype=torch.bfloat16), 2  # rows that start at odd addresses
report.rows_triton.row_stats(x, torch.zeros(n, dtype=torch.long), None, 1.0, None, torch.zeros(n))
print(json.dumps([report.inspect(name, "unpadded", kernel).faults for name, kernel in report.compiled_kernels()]))
"""


def run(*args):
    done = subprocess.run([sys.executable, *args], env=ENVIRONMENT, capture_output=True, text=True)
    return done.returncode, done.stdout + done.stderr


def test_lengths_and_coefficients_compile_nothing():
    code, out = run("-m", "bench.kernels.compile_report", "--compilations")
    assert code == 0, out
    counts = json.loads(next(line for line in out.splitlines() if line.startswith("{")))
    assert len(counts) == 6 and set(counts.values()) == {1}, counts


def test_report_refuses_narrow_loads():
    code, out = run("-c", PLANTED)
    assert code == 0, out
    assert any("2-byte loads" in faults for faults in json.loads(out.splitlines()[0])), out


@pytest.mark.slow
def test_no_kernel_spills_and_every_row_loop_loads_16_bytes():
    code, out = run("-m", "bench.kernels.compile_report")
    assert code == 0, out
