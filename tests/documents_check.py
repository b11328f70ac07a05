"""Commands, keys, files and links out of Markdown pages, and how each is checked without training anything."""

import ast
import contextlib
import dataclasses
import os
import re
import runpy
import shlex
import sys
import tomllib
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from command_line import ROOT

from fastsched.cli import main
from fastsched.config import Config
from fastsched.config.arguments import config_parser, preset_names, preset_path

PROGRAMS = ("fastsched", "python", "make", "deepspeed", "torchrun", "pytest", "pip", "apt-get")
SECTIONS = tuple(field.name for field in dataclasses.fields(Config))
KEYS = set(config_parser().get_defaults().as_flat().__dict__) - {"config"}
GROUPS = {key.rsplit(".", depth)[0] for key in KEYS for depth in range(1, key.count(".") + 1)}
SOURCES = (".py", ".sh", ".md", ".cpp", ".cu", ".h")
FOLDERS = ("fastsched", "kernels", "csrc", "bench", "tests", "docs", ".ci")
OF_A_RUN = ("my_rewards.py", "utils.py")  # a file of the reader's, and one that there must not be
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def pages() -> list[Path]:
    return [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def blocks(text: str, language: str) -> list[str]:
    return [body for name, body in FENCE.findall(text) if name == language]


def python_blocks(text: str) -> list[str]:
    return blocks(text, "python")


def yaml_blocks(text: str) -> list[str]:
    return blocks(text, "yaml")


def spans(text: str) -> list[str]:
    """Inline code outside fences."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text))


def commands(text: str) -> list[str]:
    """Lines of bash blocks, comments cut and continued lines joined, and inline code that calls one of PROGRAMS with something."""
    shown = "".join(blocks(text, "bash")).replace("\\\n", " ").splitlines()
    inline = [span for span in spans(text) if span.split()[0] in PROGRAMS and len(span.split()) > 1]
    return [shlex.join(words) for line in [*shown, *inline] if (words := shlex.split(line, comments=True))]


def check_command(command: str, model: Path, capsys) -> None:
    """AssertionError that says what is wrong with it."""
    program, *words = [word for word in shlex.split(command) if not re.fullmatch(r"[A-Z_]+=\S*", word)]
    if program == "fastsched":
        _fastsched(words, model, capsys)
    elif program in ("deepspeed", "torchrun"):
        _fastsched(words[words.index("fastsched.cli") + 1:], model, capsys)
    elif program == "python":
        _module(words[1:], capsys)
    elif program == "make":
        for target in words:
            assert re.search(rf"^{re.escape(target)}:", (ROOT / "Makefile").read_text(), re.MULTILINE), f"no target {target}"
    elif program == "pytest":
        _exist([word for word in words if not word.startswith("-")])
    elif program == "pip":
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        for extra in re.findall(r"\.\[([\w,-]+)\]", command):
            assert extra in extras, f"no extra {extra}"
    elif "/" in program:
        _exist([program])
    else:
        assert program == "apt-get", f"nobody checks {program}"


def _exist(paths: list[str]) -> None:
    for path in paths:
        assert (ROOT / path).exists(), f"{path} does not exist"


def _fastsched(words: list[str], model: Path, capsys) -> None:
    if words[0] in ("train", "cluster") and "--help" not in words:  # cluster takes what train takes
        code, seen = _run(["train", *_dry(words[1:], model)], capsys)
        assert code == 0, seen
    elif words[0] in ("eval", "report", "export", "serve-bench"):  # past their parsers they ask for the run
        code, seen = _run(words, capsys)
        assert code == 2 and "usage:" not in seen and re.search(r"runs/\w+ (holds no|does not exist)", seen), seen
    else:
        code, seen = _run(words, capsys)
        assert code == 0, seen


def _dry(words: list[str], model: Path) -> list[str]:
    """The arguments of `train` with what makes them quick: --dry-run, few generated rows, a random model for a tiny or an unnamed one."""
    words = [str(model) if word == "MODEL" else word for word in words if word != "--resume"]
    if "--preset" not in words and "--data.task" not in words:
        words = ["--preset", "tiny-cpu", *words]  # of the run that is resumed
    name = words[words.index("--model.name") + 1] if "--model.name" in words else _model_of(words)
    words += ["--data.size", "400", "--data.eval_per_bin", "2", *(["--model.name", str(model)] if name.startswith("builtin:") else [])]
    return [*words, "--dry-run"]


def _model_of(words: list[str]) -> str:
    preset = words[words.index("--preset") + 1] if "--preset" in words else ""
    return yaml.safe_load(preset_path(preset).read_text())["model"]["name"] if preset in preset_names() else "builtin:tiny"


def _run(words: list[str], capsys) -> tuple[int, str]:
    capsys.readouterr()
    try:
        code = main(words)
    except SystemExit as end:  # argparse
        code = int(end.code or 0)
    return code, "".join(capsys.readouterr())


def _module(words: list[str], capsys) -> None:
    """`python -m` of ours: the module exists, it knows its options, and what it passes on are keys."""
    module, *words = words
    try:
        assert find_spec(module), f"no module {module}"
    except ModuleNotFoundError as error:
        raise AssertionError(f"no module {module}") from error
    options = [word.removeprefix("--") for word in words if word.startswith("--")]
    assert not (unknown := [option for option in options if "." in option and missing_key(option)]), unknown
    if own := [option for option in options if "." not in option and module.startswith("bench.")]:
        text = _help(module, capsys)
        for option in own:
            assert re.search(rf"--{option}\b", text), f"{module} has no --{option}"


def _help(module: str, capsys) -> str:
    capsys.readouterr()
    before = sys.argv
    sys.argv = [module, "--help"]
    try:
        with pytest.raises(SystemExit):
            runpy.run_module(module, run_name="__main__", alter_sys=False)
    finally:
        sys.argv = before
    return capsys.readouterr().out


def keys(text: str) -> list[str]:
    """Dotted keys in inline code: `rollout.ahead`, `--scheduler.kind fixed`."""
    found = []
    for span in spans(text):
        found += re.findall(r"--([a-z_]+(?:\.[a-z_]+)+)", span)
        if re.fullmatch(rf"({'|'.join(SECTIONS)})(\.[a-z_]+)+", span) and not span.endswith((*SOURCES, ".txt")):
            found.append(span)
    return found


def missing_key(key: str) -> bool:
    return key not in KEYS | GROUPS


def missing_path(page: Path) -> list[str]:
    """Files and modules of ours in inline code that do not exist; a file may be named by the end of its path."""
    ours = [str(path.relative_to(ROOT)) for top in FOLDERS for path in (ROOT / top).rglob("*")]
    known = lambda span: any(path == span or path.endswith(f"/{span}") for path in [*ours, *os.listdir(ROOT)])
    missing = []
    for span in spans(page.read_text()):
        if re.fullmatch(r"(fastsched|fastsched_kernels|bench)(\.\w+)+", span):
            missing += [span] * (not _module_or_attribute(span))
        elif re.fullmatch(rf"({'|'.join(map(re.escape, FOLDERS))})/[\w./*-]*|[\w./-]+({'|'.join(map(re.escape, SOURCES))})", span):
            there = any(ROOT.glob(span)) if "*" in span else known(span.rstrip("/"))
            missing += [span] * (span not in OF_A_RUN and not there)
    return missing


def _module_or_attribute(name: str) -> bool:
    with contextlib.suppress(ModuleNotFoundError):
        if find_spec(name):
            return True
    parent, _, attribute = name.rpartition(".")
    with contextlib.suppress(ModuleNotFoundError):
        if spec := find_spec(parent):
            return any(getattr(node, "name", None) == attribute for node in ast.parse(Path(spec.origin).read_text()).body)
    return False


def links(text: str) -> list[str]:
    """Relative targets of links and images."""
    return [target for target in re.findall(r"\]\(([^)\s]+)\)", FENCE.sub("", text)) if "://" not in target]


def missing_link(page: Path, target: str) -> bool:
    path, _, anchor = target.partition("#")
    file = page.parent / path if path else page
    return not file.exists() or bool(anchor) and anchor not in _anchors(file)


def _anchors(page: Path) -> set[str]:
    """Headings as GitHub names them."""
    headings = re.findall(r"^#+ (.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
