"""`train --help` is a page of what people set, `--help all` is every key."""

import re

from fastsched.cli import main
from fastsched.config import Config
from fastsched.config.arguments import known_keys, parse_config
from fastsched.config.help import COMMON, default


def test_help_is_a_page_of_keys_that_exist(capsys):
    assert main(["train", "--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) <= 45 and max(map(len, lines)) <= 130 and "--help all" in lines[-1]
    shown = re.findall(r"^  --(\w+\.\w+) (.+?)  +(.+)$", "\n".join(lines), re.MULTILINE)
    assert len(shown) == 20 and {key: meaning for key, _, meaning in shown} == COMMON
    assert set(COMMON) <= set(known_keys())


def test_the_defaults_shown_are_those_of_the_configuration():
    cfg = Config()
    for key in COMMON:
        if default(cfg, key) != "-":
            assert parse_config([f"--{key}", *default(cfg, key).split()]) == cfg


def test_help_all_explains_every_key(capsys):
    assert main(["train", "--help", "all"]) == 0
    out = capsys.readouterr().out
    assert all(f"--{key}" in out for key in known_keys())
    assert "Band in which mean success is held." in " ".join(out.split())
