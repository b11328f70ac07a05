"""`model.dtype: auto`."""

from dataclasses import replace

import pytest

from fastsched.cli import main
from fastsched.config import Config, ModelConfig
from fastsched.config.arguments import config_to_yaml, parse_config
from fastsched.engines.models import precision


@pytest.mark.parametrize("fast, dtype", [(True, "bfloat16"), (False, "float32")])
def test_auto_is_what_the_machine_multiplies_fast(monkeypatch, fast, dtype):
    monkeypatch.setattr(precision, "fast_bf16", lambda: fast)
    cfg = parse_config(["--model.dtype", "auto"])
    found = precision.settled(cfg)
    assert found == replace(cfg, model=replace(cfg.model, dtype=dtype))
    assert f"dtype: {dtype}" in config_to_yaml(found) and precision.settled(found) is found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_asked_for_stays(monkeypatch, dtype):
    monkeypatch.setattr(precision, "fast_bf16", lambda: pytest.fail("nothing to find out"))
    cfg = Config(model=ModelConfig(dtype=dtype))
    assert precision.settled(cfg) is cfg


def test_the_command_line_settles_it(monkeypatch, capsys):
    """The same estimate as with the dtype spelled out, and another than with the other one."""
    monkeypatch.setattr(precision, "fast_bf16", lambda: False)
    said = {}
    for dtype in ("auto", "float32", "bfloat16"):
        assert main(["train", "--preset", "tiny-cpu", "--data.size", "400", "--model.dtype", dtype, "--dry-run"]) == 0
        said[dtype] = capsys.readouterr().out
    assert said["auto"] == said["float32"] != said["bfloat16"]
