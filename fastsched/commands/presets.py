"""`fastsched presets`: their names, each with the first line of its file."""

from fastsched.commands.source import show
from fastsched.config import DONE
from fastsched.config.arguments import preset_names, preset_path


def run(arguments: list[str]) -> int:
    show("\n".join(f"{name:28} {_first_line(name)}" for name in preset_names()))
    return DONE


def _first_line(name: str) -> str:
    return preset_path(name).read_text().splitlines()[0].removeprefix("#").strip()
