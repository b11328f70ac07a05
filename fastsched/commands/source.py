"""What the commands that read a configuration have in common: --preset, --config, overrides, and output that may be cut short."""

import argparse
import os
import sys

from fastsched.config import Config, ConfigError
from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.models.precision import settled


def source_parser(command: str) -> argparse.ArgumentParser:
    """Knows --preset and --config; what it does not know are overrides."""
    parser = argparse.ArgumentParser(prog=f"fastsched {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    return parser


def source_file(own: argparse.Namespace) -> str | None:
    """The YAML file of --preset or --config. ConfigError where both are given."""
    if own.preset and own.config:
        raise ConfigError("--preset and --config exclude each other: copy the preset's file and edit it, or override single keys")
    return str(preset_path(own.preset)) if own.preset else own.config


def config_of(source: str | None, overrides: list[str], *, resumed: bool = False) -> Config:
    """`resumed`: keys that were removed since and change nothing are left out; the log of the run names those of its own file."""
    return settled(parse_config((["--config", source] if source else []) + overrides, warn=(lambda line: None) if resumed else None))


def show(text: str) -> None:
    """To stdout; a reader that has seen enough (`| head`, `less`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more when it ends
