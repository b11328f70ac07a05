"""One process of one side, its steps kept on disk once it has finished, so that an interrupted measurement goes on."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from bench.step.workload import Workload, arguments, config, drawn_rows, load_parts, make_job
from fastsched.config import ConfigError, default_cache_dir, require

ROOT = Path(__file__).parents[2]
OWN = ("job.py", "peers.py", "rounds.py", "trl.txt", "trl_process.py", "trl_trainer.py", "workload.py")
PATIENCE_S = 1800
"""Limit of one process."""


class Failed(ConfigError):
    """A process of one side did not end well."""


@dataclass(frozen=True)
class Bench:
    """Where the processes of one model run and what they have in common."""

    model: str
    work: Workload
    folder: Path
    peer_path: Path | None

    @classmethod
    def open(cls, model: str, work: Workload, peer_path: Path | None) -> "Bench":
        """The folder is that of this version of the code: what another one measured is not taken."""
        folder = default_cache_dir() / "step" / f"{model}-{source_digest()}"
        folder.mkdir(parents=True, exist_ok=True)
        return cls(model, work, folder.resolve(), peer_path)


def source_digest() -> str:
    """Of the code that either side runs; tables and arithmetic may change."""
    rooms = [ROOT / room for room in ("fastsched", "kernels", "csrc")]
    files = [file for room in rooms for file in room.rglob("*") if file.suffix in (".py", ".yaml", ".cpp", ".h")]
    digest = hashlib.sha256()
    for file in sorted([*files, *(ROOT / "bench/step" / name for name in OWN)]):
        digest.update(f"{file.relative_to(ROOT)}\0".encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def run_ours(bench: Bench, name: str, tokens: int, steps: int, seed: int = 0, curve: bool = False) -> dict:
    """{steps, before, after} of `fastsched train` in a process of its own."""
    file = bench.folder / f"{name}.json"
    if (found := kept(file)) is not None:
        return found
    run_dir = bench.folder / name
    shutil.rmtree(run_dir, ignore_errors=True)
    wanted = arguments(bench.work, tokens, steps, seed, curve)
    started(bench, name, ["fastsched.cli", "train", *wanted, "--run_dir", str(run_dir)], None)
    cfg = config(bench.work, tokens, steps, seed, curve)
    result = read_run(run_dir, drawn_rows(cfg, load_parts(cfg)[2]))
    shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
    return keep(file, result)


def run_peer(bench: Bench, name: str, candidate: dict, tokens: int, steps: int, seed: int = 0, curve: bool = False,
             faster: float = 1.0) -> dict:
    """The same of TRL's trainer, with `candidate`, a configuration of it, at `faster` times the learning rate."""
    file, job = bench.folder / f"{name}.json", bench.folder / f"{name}.job.json"
    if not file.exists():
        asked = make_job(config(bench.work, tokens, steps, seed, curve), candidate, curve)
        replace(asked, lr=faster * asked.lr).write(job)
        started(bench, name, ["bench.step.trl_process", str(job), str(file)], bench.peer_path)
    return kept(file)


def started(bench: Bench, name: str, module: list[str], path: Path | None) -> None:
    """`python -m module` to its end, its output in NAME.log; Failed with the last line of it."""
    log = bench.folder / f"{name}.log"
    paths = [str(path)] * (path is not None) + [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    with log.open("w") as out:
        try:
            done = subprocess.run([sys.executable, "-m", *module], stdout=out, stderr=subprocess.STDOUT, timeout=PATIENCE_S,
                                  env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "HF_HUB_OFFLINE": "1"})
        except subprocess.TimeoutExpired as late:
            raise Failed(f"bench.step: {name} took longer than {PATIENCE_S} s; its output is in {log}") from late
    if done.returncode:
        said = [line for line in log.read_text(errors="replace").splitlines() if line.strip()] or [""]
        raise Failed(f"bench.step: {name} ended with code {done.returncode}: {said[-1][:300]} (all of it in {log})")


def read_run(run_dir: Path, rows: list[list[int]]) -> dict:
    """Steps out of metrics.csv. ConfigError where the run drew other prompts than the peer gets, which are `rows` by step."""
    metrics = pd.read_csv(run_dir / "metrics.csv")
    samples = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    drawn = [[s["row"] for s in samples if s["step"] == step] for step in metrics["step"]]
    require(drawn == rows, f"bench.step: the run in {run_dir} drew other prompts than the peer is given")
    steps = [read_step(row) for row in metrics.to_dict("records")]
    evals = run_dir / "evals.jsonl"
    accuracy = [json.loads(line)["accuracy"] for line in evals.read_text().splitlines()] if evals.exists() else []
    return {"steps": steps, "before": accuracy[0] if accuracy else None, "after": accuracy[-1] if accuracy else None}


def read_step(row: dict) -> dict:
    named = {"sampling": row["t_rollout"], "scoring": row["t_reward"], "learning": row["t_learn"], "sync": row["t_sync"]}
    return {**named, "other": row["t_step"] - sum(named.values()), "total": row["t_step"], "memory_gb": row["peak_mem_gb"],
            "success": row["reward_mean"], "length": row["response_len_mean"], "grad_norm": row["grad_norm"],
            "deviation": row["ratio_deviation"]}


def kept(file: Path) -> dict | None:
    return json.loads(file.read_text()) if file.exists() else None


def keep(file: Path, result: dict) -> dict:
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(file)
    return result
