import json
import os
import subprocess
import sys

import pytest


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_device_script_rehearses_on_a_cpu(tmp_path):
    """SMALL=1: every part leaves its rows, none fails, and the last thing printed is the table."""
    environment = {**os.environ, "SMALL": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "bench/device.sh"], env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert done.returncode == 0, done.stderr
    assert {x["part"] for x in lines} == {"kernels", "head", "head_odd", "compilations", "averaging", "grpo"}
    assert not [x for x in lines if "ended with code" in x.get("note", "")], done.stdout
    assert all(x["ok"] for x in lines if x["part"] == "kernels")
    assert done.stdout.splitlines()[-1].startswith("grpo ")
