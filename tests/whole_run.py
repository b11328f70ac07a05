"""Whole runs through the command line, as tests start them and read what they left."""

import csv
import subprocess
import time
from pathlib import Path

UNREPEATABLE = ("t_", "tokens_per_s", "peak_mem_gb")


def rows(run_dir: Path) -> list[dict]:
    """metrics.csv without what a clock or the operating system measured."""
    with (run_dir / "metrics.csv").open() as f:
        return [{k: v for k, v in row.items() if not k.startswith(UNREPEATABLE)} for row in csv.DictReader(f)]


def small(model, run_dir, *more):
    """The loop on transformers `generate` with a random model: seconds."""
    return ["train", "--preset", "tiny-cpu", "--run_dir", str(run_dir), "--model.name", str(model), "--rollout.engine", "transformers",
            "--data.size", "400", "--data.eval_per_bin", "4", "--train.prompts_per_step", "8", "--rollout.responses", "4",
            "--train.steps", "2", "--log.plots", "false", *more]


def graded(tmp_path) -> dict:
    """A reward between 0 and 1 that differs wherever two responses do, so that no group of a random model is flat: the environment
    in which `--reward.kind graded:score` finds it."""
    (tmp_path / "graded.py").write_text("import zlib\ndef score(response, **_):\n    return zlib.crc32(response.encode()) / 2**32\n")
    return {"PYTHONPATH": str(tmp_path)}


def wait_for_row(run_dir: Path, step: int, process: subprocess.Popen, limit: float = 240) -> None:
    end = time.monotonic() + limit
    while time.monotonic() < end:
        if (run_dir / "metrics.csv").exists() and any(r["step"] == str(step) for r in rows(run_dir)):
            return
        assert process.poll() is None, f"the run ended early with {process.returncode}: {process.communicate()[1]}"
        time.sleep(0.05)
    raise AssertionError(f"no row of step {step} in {limit} s")
