"""Command line and YAML -> Config, by jsonargparse. Errors are ConfigErrors that name the key and the nearest known one."""

import dataclasses
import difflib
import functools
import re
import sys
from importlib import resources
from pathlib import Path
from typing import Any, Callable, Sequence, get_origin

import yaml
from jsonargparse import ArgumentError, ArgumentParser, set_parsing_settings

from fastsched.config import Config, ConfigError
from fastsched.config.removed import refuse_removed_option, without_removed

PRESETS = resources.files("fastsched") / "presets"


def preset_names() -> list[str]:
    return sorted(p.name.removesuffix(".yaml") for p in PRESETS.iterdir() if p.name.endswith(".yaml"))


def preset_path(name: str) -> Path:
    if name not in preset_names():
        raise ConfigError(f"--preset: no preset {name!r}{_nearest(name, preset_names())} (`fastsched presets` lists them)")
    return Path(str(PRESETS / f"{name}.yaml"))


@functools.cache
def config_parser() -> ArgumentParser:
    """Every field of Config as a dotted option, with the string below the field as its help."""
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(prog="fastsched train", exit_on_error=False, usage="fastsched train [--preset NAME | --config FILE.yaml] "
                            "[--run_dir DIR] [--resume] [--dry-run] [--section.key VALUE ...]")
    parser.add_class_arguments(Config, None)
    parser.add_argument("--config", action="config", help="YAML file with the same keys")
    return parser


def parse_config(arguments: Sequence[str], *, warn: Callable[[str], None] | None = None) -> Config:
    """`arguments` are --config FILE and dotted overrides. Raises ConfigError.

    `warn`, for what belongs to a run of before: takes a line for every key of the file that was removed since and had the value that
    holds now. Without it a removed key is an error.
    """
    parser, tuples = config_parser(), {k for k, t in _fields(Config).items() if "tuple" in str(t) or get_origin(t) is tuple}
    try:
        parsed = parser.parse_args(_join_tuples(_without_removed(arguments, warn), tuples))
        built = parser.instantiate_classes(parsed)
    except ArgumentError as error:
        raise ConfigError(_explain(str(error))) from error
    return Config(**{f.name: getattr(built, f.name) for f in dataclasses.fields(Config)})


def run_config(run_dir: Path, *, warn: Callable[[str], None] = lambda line: print(f"fastsched: {line}", file=sys.stderr)) -> Config:
    """The configuration that a run was started with. Raises ConfigError."""
    return parse_config(["--config", str(run_dir / "config.yaml")], warn=warn)


def _without_removed(arguments: Sequence[str], warn: Callable[[str], None] | None) -> list[str]:
    """`arguments`; a --config file that holds removed keys is replaced by its text without them."""
    out = [part for argument in arguments for part in (argument.split("=", 1) if argument.startswith("--config=") else [argument])]
    for place, (option, value) in enumerate(zip(out, out[1:], strict=False)):
        if option == "--config" and Path(value).is_file():
            tree = _read_yaml(value)
            if isinstance(tree, dict) and (kept := without_removed(tree, warn)) != tree:
                out[place + 1] = yaml.safe_dump(kept)
    for argument in out:
        refuse_removed_option(argument)
    return out


def _read_yaml(path: str) -> Any:
    """ConfigError with file and line for a file that is no YAML; the parser would not name the file."""
    try:
        return yaml.safe_load(Path(path).read_text())
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        line = f", line {where.line + 1}, column {where.column + 1}" if where else ""
        raise ConfigError(f"--config: {path}{line} is no YAML: {getattr(error, 'problem', None) or error}") from error


def config_to_yaml(cfg: Config) -> str:
    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return list(value) if isinstance(value, tuple) else value

    return yaml.safe_dump(plain(dataclasses.asdict(cfg)), sort_keys=False)


def known_keys() -> list[str]:
    """Every key, dotted."""
    return list(_fields(Config))


def _fields(cls: type, prefix: str = "") -> dict[str, Any]:
    """Dotted name -> type of every leaf field."""
    out: dict[str, Any] = {}
    for f in dataclasses.fields(cls):
        nested = dataclasses.is_dataclass(f.type)
        out.update(_fields(f.type, f"{prefix}{f.name}.") if nested else {prefix + f.name: f.type})
    return out


def _join_tuples(arguments: list[str], tuples: set[str]) -> list[str]:
    """`--scheduler.window 0.35 0.65` -> `--scheduler.window [0.35,0.65]`."""
    out, i = [], 0
    while i < len(arguments):
        out.append(arguments[i])
        i += 1
        if out[-1].removeprefix("--") in tuples:
            values = []
            while i < len(arguments) and not arguments[i].startswith("--"):
                values.append(arguments[i])
                i += 1
            out.append(values[0] if len(values) == 1 and values[0].startswith("[") else f"[{','.join(values)}]")
    return out


def _explain(message: str) -> str:
    """jsonargparse's message, with the nearest known key where a key was unknown."""
    keys = known_keys()
    if match := re.match(r"unrecognized arguments: --(\S+?)(=|\s|$)", message, re.IGNORECASE):
        return f"unknown option --{match[1]}{_nearest(match[1], keys)}"
    if match := re.match(r"Group '(\S+)' does not accept option '(\S+)'", message):
        key = f"{match[1]}.{match[2]}"
        return f"unknown key {key}{_nearest(key, keys)}"
    if match := re.search(r"(?:Key|Option) '(\S+)' is not (?:expected|accepted)", message):
        return f"unknown key {match[1]}{_nearest(match[1], keys)}"
    return re.sub(r"\s+", " ", message.replace("Parser key ", "")).strip()


def _nearest(word: str, known: Sequence[str]) -> str:
    found = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    return f"; did you mean {found[0]}?" if found else ""


def changed_keys(before: Config, after: Config) -> list[str]:
    """One line for every key whose value differs."""
    def value(cfg: Config, key: str) -> Any:
        for part in key.split("."):
            cfg = getattr(cfg, part)
        return cfg

    return [f"{key} was {value(before, key)!r} and is now {value(after, key)!r}" for key in known_keys()
            if value(before, key) != value(after, key)]
