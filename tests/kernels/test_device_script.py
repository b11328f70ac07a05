"""The script for the machine with a GPU, as far as a machine without one can tell."""

import json
import os
import subprocess
import sys

import pytest
import torch
from fastsched_kernels.testing import peaked_head, seeded

from bench.device import checks as device_checks
from bench.device import grpo as device_grpo
from bench.device import peaked as device_peaked
from bench.device import rivals as device_rivals
from bench.device import rows as device_rows


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setattr(device_rows, "OUT", tmp_path)
    monkeypatch.setattr(device_grpo, "OUT", tmp_path)
    return tmp_path


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_device_script_rehearses_on_a_cpu(tmp_path):
    """SMALL=1: every part leaves its rows, none fails, the last thing printed is the table, and $OUT holds a few small files."""
    environment = {**os.environ, "SMALL": "1", "OUT": str(tmp_path), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "bench/device/device.sh"], env=environment, capture_output=True, text=True)
    lines = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert done.returncode == 0, done.stderr
    parts = {"build", "kernels", "peaked", "head_check", "head", "published", "head_odd", "compilations", "averaging", "grpo"}
    assert {x["part"] for x in lines} == parts | set(device_rivals.RIVALS)
    assert not [x for x in lines if "ended with code" in x.get("note", "")], done.stdout
    assert {x["part"] for x in lines if "ok" in x} == {"kernels", "peaked", "head_check", "averaging"}
    assert {"ours", "ours, bf16 logits"} <= {x["what"] for x in lines if x["part"] == "head" and "ms" in x}
    assert not [x for x in lines if not x.get("ok", True)]
    assert done.stdout.splitlines()[-1].startswith("grpo ") and "2 of 2 updates" in done.stdout.splitlines()[-1]
    assert {x.name for x in tmp_path.rglob("*")} <= {"device.jsonl", "table.txt", "grpo-metrics.jsonl", "errors.txt"}


def test_a_part_without_time_says_so(tmp_path):
    environment = {**os.environ, "SMALL": "1", "OUT": str(tmp_path), "PYTHON": sys.executable, "BUDGET": "0"}
    done = subprocess.run(["bash", "bench/device/device.sh"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in (tmp_path / "device.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {x["note"] for x in rows} == {"not begun: out of time"}


def test_a_part_that_ends_says_why(tmp_path):
    """Whatever ends it, the next one begins, and what it said last stands in its row."""
    broken = tmp_path / "python"
    broken.write_text(r"""#!/bin/sh
printf '%s\n\n' 'error: "CUDA" said \no\' >&2
exit 3
""")
    broken.chmod(0o755)
    environment = {**os.environ, "SMALL": "1", "OUT": str(tmp_path / "out"), "PYTHON": str(broken)}
    subprocess.run(["bash", "bench/device/device.sh"], env=environment, capture_output=True, text=True)
    rows = [json.loads(line) for line in (tmp_path / "out" / "device.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and {x["note"] for x in rows} == {"ended with code 3: error: CUDA said no"}


def test_a_rival_that_is_missing_or_fails_is_named_with_its_reason(out, monkeypatch):
    def missing():
        import no_such_rival  # noqa: F401

    def fails(head):
        if len(head.hidden) == 16:
            raise ValueError("rows must be a multiple of 128\nand more")
        (head.hidden.sum() + head.weight.sum()).backward()

    for name, make in (("missing", missing), ("fails", lambda: fails)):
        monkeypatch.setitem(device_rivals.RIVALS, name, (make, 3))
    monkeypatch.setattr(device_rivals, "MAIN", device_rows.Shape(48, 8, 32))
    monkeypatch.setattr(device_rivals, "PUBLISHED", (device_rows.Shape(16, 8, 32),))
    monkeypatch.setattr(device_rivals, "ODD", device_rows.Shape(48, 8, 33))
    device_rivals.rival("missing")
    device_rivals.rival("fails")
    absent, first, second, third = device_rows.rows()
    assert "No module named 'no_such_rival'" in absent["note"] and "$WHEELS" in absent["note"]
    assert second == {"part": "fails", "what": "16 x 8 x 32", "note": "ValueError: rows must be a multiple of 128"}
    assert first["ms"] > 0 and third["what"] == "48 x 8 x 33" and third["ms"] > 0


def test_missing_packages_are_named_before_anything_is_made(out, monkeypatch):
    monkeypatch.setattr(device_grpo, "NEEDS", ("json", "no_such_package", "nor_this"))
    monkeypatch.setattr(device_grpo, "make_model", lambda folder: pytest.fail("made a model"))
    device_grpo.grpo()
    assert "no_such_package, nor_this;" in device_rows.rows()[0]["note"]


def test_updates_are_reported_whatever_became_of_the_run(out, tmp_path):
    def line(t):
        return json.dumps({"t_step": t, "t_learn": t / 2, "tokens_per_s": 10.0, "peak_mem_gb": t})

    metrics = tmp_path / "metrics.jsonl"
    device_grpo.report(metrics, "exit code 1", 3.0)
    metrics.write_text("\n".join([line(9.0), line(8.0), line(1.0), line(2.0), line(3.0), line(4.0)[:7]]))
    device_grpo.report(metrics, "out of time", 30.0)
    nothing, some = device_rows.rows()
    assert nothing["note"] == "exit code 1" and "no update" in nothing["what"]
    assert some["what"].startswith("5 of ") and some["ms"] == 2000.0 and some["peak_gib"] == 9.0
    assert (out / "grpo-metrics.jsonl").exists()


def test_a_run_that_ends_no_more_is_ended_with_its_children(monkeypatch):
    process = subprocess.Popen(["bash", "-c", "sleep 600 & echo $!; wait"], stdout=subprocess.PIPE, text=True, start_new_session=True)
    assert int(process.stdout.readline())
    device_grpo.end_session(process)
    assert process.returncode == -9
    assert process.stdout.read() == ""  # the child held the other end of the pipe


@pytest.mark.parametrize("fault, ok", [(1.0, True), (1.05, False)], ids=["right", "5 % off"])
def test_the_check_of_the_head_fails_where_it_should(out, monkeypatch, fault, ok):
    loss = lambda *args: (lambda total, dropped: (total * fault, dropped))(*device_checks.built_in(*args))
    monkeypatch.setitem(device_checks.CASES, "planted", (loss, "exact"))
    for dtype, logits in ((torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)):
        device_checks.check_head("planted", device_checks.Problem(40, 32, 129, dtype), 16, logits)
    rows = device_rows.rows()
    assert len(rows) == 12 and all(x["ok"] is ok for x in rows), rows


def half_mended(hidden, weight, target, logits):
    """A fine target over a sum of rounded logits, itself among them."""
    fine = (hidden.float() * weight[target].float()).sum(1)
    return fine - (hidden @ weight.t()).float().logsumexp(1)


def of_bf16_logits(hidden, weight, target, logits):
    return (hidden @ weight.t()).float().log_softmax(1).gather(1, target[:, None]).squeeze(1)


@pytest.mark.parametrize("way", [half_mended, of_bf16_logits])
def test_the_check_of_peaked_rows_fails_where_it_should(out, monkeypatch, way):
    for name, value in {"N": 64, "H": 64, "V": 1000, "CHUNK": 64, "WAYS": {"planted": way}}.items():
        monkeypatch.setattr(device_peaked, name, value)
    device_peaked.check_logp(0.9, "argmax", *peaked_head(64, 64, 1000, 0.9, "argmax", seeded(0)))
    plain, *rows = device_rows.rows()
    assert "ok" not in plain and [x["ok"] for x in rows] == [False, False], rows


def test_padded_rows_stay_padded():
    x = torch.randn(3, 1009)
    y = device_rows.padded(x)
    assert torch.equal(x, y) and y.stride() == (1024, 1)


def test_gradients_are_gone_before_memory_is_read():
    calls = []
    device_rows.measure(lambda: calls.append("run"), lambda: calls.append("clear"), repeats=1)
    assert calls == ["run", "clear", "clear", "run"]
