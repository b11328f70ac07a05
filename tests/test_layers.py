"""The import graph is the architecture (CONTRIBUTING): imports run downwards, heavy libraries stay in engines."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = {"deepspeed", "vllm", "transformers"}
BASE = {"arrays", "config", "types", "groups"}
# What each room may import of fastsched beside itself. A file at the top is a room of its own.
BELOW = {
    "arrays": set(), "types": set(), "groups": set(), "config": set(),
    "record": BASE, "data": BASE, "engines": BASE, "control": BASE, "learn": BASE,
    "loop": BASE | {"record", "data", "engines", "control", "learn"},
    "report": BASE | {"record", "engines", "learn", "loop"},
    "train": BASE | {"record", "loop"},
    "commands": BASE | {"record", "data", "engines", "loop", "report", "train"},
    "cli": BASE | {"commands"},
}
WITHOUT_TORCH = BASE | {"control", "data"}


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
        room = path.relative_to(root / "fastsched").with_suffix("").parts[0]
        if room == "__init__":
            continue
        if room not in BELOW:
            bad.append(f"{path.relative_to(root)}: no floor is named for {room}")
        for name, line, typing_only in imports(path):
            top, *rest = name.split(".")
            where = f"{path.relative_to(root)}:{line} imports {name}"
            if top == "fastsched" and rest and rest[0] not in BELOW.get(room, set()) | {room}:
                bad.append(where)
            if top in HEAVY and room != "engines":
                bad.append(where)
            if top in ("torch", "fastsched_kernels") and not typing_only and room in WITHOUT_TORCH:
                bad.append(where)
            if top == "kernels":
                bad.append(where)
    for path in sorted((root / "kernels").rglob("*.py")):
        bad += [f"{path.relative_to(root)}:{line} imports {name}" for name, line, _ in imports(path)
                if name.split(".")[0] in HEAVY | {"fastsched", "kernels"}]
    return bad


def circles(root: Path) -> list[str]:
    """Files that import each other in a loop, imports inside functions included."""
    module = lambda path: ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
    files = {module(path): path for path in (root / "fastsched").rglob("*.py")}
    arrows = {name: {target for target, _, _ in imports(path) if target in files} for name, path in files.items()}
    while leaves := {name for name, targets in arrows.items() if not targets & arrows.keys()}:
        arrows = {name: targets for name, targets in arrows.items() if name not in leaves}
    return sorted(arrows)


def test_imports_run_downwards():
    assert violations(ROOT) == []


def test_no_files_import_each_other_in_a_circle():
    assert circles(ROOT) == []


@pytest.mark.parametrize("file, source", [
    ("fastsched/control/window.py", "import torch"),
    ("fastsched/learn/packing.py", "import vllm"),
    ("fastsched/data/tasks.py", "from fastsched.engines import models"),
    ("fastsched/config/run.py", "from fastsched.control.scheduler import Scheduler"),
    ("fastsched/loop/rollouts.py", "from fastsched.train import train"),
    ("fastsched/record/log.py", "from fastsched.loop.assemble import Training"),
    ("fastsched/helpers/misc.py", "import os"),
    ("kernels/fastsched_kernels/linear.py", "from fastsched.types import Knobs"),
])
def test_a_planted_violation_is_found(tmp_path, file, source):
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(f"def f():\n    {source}\n")
    assert len(violations(tmp_path)) == 1


def test_a_planted_circle_is_found(tmp_path):
    (tmp_path / "fastsched").mkdir()
    for one, other in (("a", "b"), ("b", "a"), ("c", "a")):
        (tmp_path / f"fastsched/{one}.py").write_text(f"def f():\n    import fastsched.{other}\n")
    assert circles(tmp_path) == ["fastsched.a", "fastsched.b", "fastsched.c"]


def test_kernels_folder_is_no_package():
    shadow = ROOT / "kernels" / "__init__.py"
    assert not shadow.exists(), "it would shadow the hub client `kernels` that transformers imports"


def test_transformers_imports_from_the_repository_root(tmp_path):
    """With a distribution `kernels` on the path our folder must not be taken for it; without one is how all other tests run."""
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "__init__.py").write_text("WHO = 'hub client'\n")
    code = (f"import sys; sys.path.append({str(tmp_path)!r})\nimport transformers.models.llama.modeling_llama\n"
            "import kernels; print(getattr(kernels, 'WHO', None))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "hub client"
