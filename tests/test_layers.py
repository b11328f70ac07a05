"""The import graph is the architecture (CONTRIBUTING): imports run downwards, heavy libraries stay in engines."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("control", "data", "learn", "engines")
HEAVY = {"deepspeed", "vllm", "transformers"}
# What a module may import of fastsched: the layers below it. A room may import itself.
BASE = {"arrays", "config", "types", "groups"}
RECORDS = BASE | {"records", "environment", "console", "log", "runs", "plots", "report", "report_page", "report_text",
                  "trajectory_plots"}
ABOVE = {
    "prepare": BASE | {"data", "engines"},
    "features": BASE | {"data", "engines"},
    "cluster": BASE | {"data", "engines", "features", "prepare"},
    "ahead": {"types"},
    "assemble": BASE | set(ROOMS) | {"ahead", "buffers", "features", "log", "prepare"},
    "evaluate": BASE | set(ROOMS) | {"log", "assemble", "rollouts"},
    "rollouts": BASE | set(ROOMS) | {"ahead", "log", "assemble"},
    "batches": BASE | set(ROOMS) | {"assemble", "buffers", "rollouts"},
    "guards": BASE | set(ROOMS) | {"assemble", "checkpoint"},
    "train": BASE | set(ROOMS) | {"log", "assemble", "evaluate", "rollouts", "batches", "checkpoint", "arguments", "guards"},
    "dryrun": BASE | {"arguments", "data", "engines", "features", "prepare"},
    "tp_score": RECORDS | {"arguments", "checkpoint", "engines", "learn", "prepare"},
    "commands": RECORDS | {"arguments", "assemble", "evaluate", "prepare", "tp_score", "train", "checkpoint"},
    "quantized": RECORDS | {"arguments", "assemble", "checkpoint", "commands", "engines", "evaluate"},
    "serving": RECORDS | {"arguments", "commands", "prepare", "engines", "checkpoint"},
    "cli": RECORDS | {"arguments", "cluster", "dryrun", "commands", "quantized", "serving"},
    "arguments": BASE,
    "checkpoint": BASE,
    "arrays": set(),
    "config": set(),
    "types": set(),
    "groups": set(),
    "buffers": BASE,
}


def imports(path: Path) -> list[tuple[str, int, bool]]:
    """(dotted module, line, only for type checking) of every import in a file, those inside functions included."""
    tree = ast.parse(path.read_text())
    typing_only = {id(n) for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
                   for n in ast.walk(node)}
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno, id(node) in typing_only) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            found += [(f"{node.module}.{alias.name}" if node.module == "fastsched" else node.module, node.lineno, id(node) in typing_only)
                      for alias in node.names]
    return found


def violations(root: Path) -> list[str]:
    bad = []
    for path in sorted((root / "fastsched").rglob("*.py")):
        parts = path.relative_to(root / "fastsched").with_suffix("").parts
        room = parts[0]
        allowed = BASE | {room} if room in ROOMS else ABOVE.get(room, RECORDS)
        for name, line, typing_only in imports(path):
            top, *rest = name.split(".")
            where = f"{path.relative_to(root)}:{line} imports {name}"
            if top == "fastsched" and rest and rest[0] not in allowed | {room}:
                bad.append(where)
            if top in HEAVY and room != "engines":
                bad.append(where)
            if top in ("torch", "fastsched_kernels") and not typing_only and room in BASE | {"buffers", "control", "data"}:
                bad.append(where)
            if top == "kernels":
                bad.append(where)
    for path in sorted((root / "kernels").rglob("*.py")):
        bad += [f"{path.relative_to(root)}:{line} imports {name}" for name, line, _ in imports(path)
                if name.split(".")[0] in HEAVY | {"fastsched", "kernels"}]
    return bad


def test_imports_run_downwards():
    assert violations(ROOT) == []


@pytest.mark.parametrize("file, source", [
    ("fastsched/control/window.py", "import torch"),
    ("fastsched/learn/packing.py", "import vllm"),
    ("fastsched/data/tasks.py", "from fastsched.engines import models"),
    ("fastsched/config/run.py", "from fastsched.control.scheduler import Scheduler"),
    ("kernels/fastsched_kernels/linear.py", "from fastsched.types import Knobs"),
])
def test_a_planted_violation_is_found(tmp_path, file, source):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"def f():\n    {source}\n")
    assert len(violations(tmp_path)) == 1


def test_kernels_folder_is_no_package():
    shadow = ROOT / "kernels" / "__init__.py"
    assert not shadow.exists(), "it would shadow the hub client `kernels` that transformers imports"


@pytest.mark.parametrize("hub_client", [False, True])
def test_transformers_imports_from_the_repository_root(tmp_path, hub_client):
    """With and without a distribution `kernels` on the path: our folder must never be taken for it."""
    if hub_client:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "__init__.py").write_text("WHO = 'hub client'\n")
    code = (f"import sys; sys.path.append({str(tmp_path)!r})\nimport transformers.models.llama.modeling_llama\n"
            "import kernels; print(getattr(kernels, 'WHO', None))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == ("hub client" if hub_client else "None")
