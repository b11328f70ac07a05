"""Configurations of before: a removed key is named with what became of it; a run that had what holds now goes on."""

import importlib
import re

import pytest

from fastsched.cli import main
from fastsched.config import Config, ConfigError
from fastsched.config.arguments import config_to_yaml, known_keys, parse_config, run_config
from fastsched.config.removed import REMOVED

CONSTANTS = {
    "features.fit_rows": "data.feature_store.FIT_ROWS", "scheduler.adarft.alpha": "control.samplers.adarft.ALPHA",
    "scheduler.adarft.beta": "control.samplers.adarft.BETA", "scheduler.adarft.eta": "control.samplers.adarft.ETA",
    "scheduler.dead_band": "control.coefficients.DEAD_BAND", "scheduler.dots.reference": "control.samplers.dots.REFERENCES",
    "scheduler.dots.refresh": "control.samplers.dots.REFRESH", "scheduler.dots.temperature": "control.samplers.dots.TEMPERATURE",
    "scheduler.greso.flat_share": "control.samplers.greso.FLAT_SHARE", "scheduler.sec.rate": "control.samplers.sec.RATE",
    "scheduler.speed.rounds": "loop.batches.ROUNDS", "scheduler.temporal.alpha": "learn.credit.ALPHA",
    "scheduler.temporal.kappa": "learn.credit.KAPPA",
}


@pytest.mark.parametrize("key", CONSTANTS)
def test_what_is_said_to_be_the_constant_is_the_constant(key):
    module, _, name = CONSTANTS[key].rpartition(".")
    value, why = REMOVED[key]
    assert getattr(importlib.import_module(f"fastsched.{module}"), name) == value == float(re.search(r"constant (\S+) in", why)[1])
    assert f"in {module.replace('.', '/')}.py now" in why


def test_no_removed_key_is_one_of_today():
    assert set(CONSTANTS) | {"scheduler.kl_gate.tokens"} == set(REMOVED)
    assert not set(REMOVED) & set(known_keys())


def test_a_removed_key_is_bad_input_whatever_its_value(capsys, tmp_path):
    said = "scheduler.greso.flat_share: was removed; it is the constant 0.25 in control/samplers/greso.py now; "
    (tmp_path / "old.yaml").write_text("train: {steps: 3}\nscheduler:\n  kind: greso\n  greso: {flat_share: 0.25}\n")
    for arguments, end in ((["--config", str(tmp_path / "old.yaml")], "delete the line"),
                           ([f"--config={tmp_path / 'old.yaml'}"], "delete the line"),
                           (["--scheduler.greso.flat_share", "0.3"], "leave the option out"),
                           (["--scheduler.greso.flat_share=0.3"], "leave the option out")):
        assert main(["train", *arguments]) == 2
        assert capsys.readouterr().err == f"fastsched: {said}{end}\n"


def older_run(tmp_path, **scheduler):
    """config.yaml of a run from before: as written today, with the sections and keys that were removed."""
    text = config_to_yaml(Config()).replace("  kl_gate:\n", "  kl_gate:\n    tokens: 1\n")
    sections = {"greso": {"flat_share": 0.25}, "adarft": {"eta": 50.0, "alpha": 2.0, "beta": 0.5}, **scheduler}
    lines = "".join(f"  {name}: {value}\n" for name, value in sections.items())
    text = text.replace("\nscheduler:\n", f"\nscheduler:\n{lines}")
    (tmp_path / "config.yaml").write_text(text)
    return tmp_path


def test_an_older_run_that_had_the_constants_goes_on_and_says_so(tmp_path):
    lines = []
    assert run_config(older_run(tmp_path, dead_band=0.05), warn=lines.append) == Config()
    assert len(lines) == 6
    assert "scheduler.dead_band: was removed; it is the constant 0.05 in control/coefficients.py now, as the run had it" in lines
    assert parse_config(["--config", str(tmp_path / "config.yaml"), "--train.steps", "7"], warn=lines.append).train.steps == 7


def test_an_older_run_that_had_another_value_does_not_go_on(tmp_path, capsys):
    run = older_run(tmp_path, dead_band=0.2)
    with pytest.raises(ConfigError, match="scheduler.dead_band: was removed; .*, and the run had 0.2; start a new run, or delete the line"):
        run_config(run)
    assert main(["train", "--resume", "--run_dir", str(run)]) == 2 and "and the run had 0.2" in capsys.readouterr().err
    assert main(["eval", str(run)]) == 2


def test_resume_accepts_what_the_run_had(tmp_path, capsys, monkeypatch):
    """The line itself is the run's log's: commands/train.py says what differs from the run's own file."""
    seen = []
    monkeypatch.setattr("fastsched.commands.train.train_and_report", lambda cfg, run_dir, *, resume: seen.append((cfg, resume)) or 0)
    assert main(["train", "--resume", "--run_dir", str(older_run(tmp_path))]) == 0
    assert seen == [(Config(), True)] and capsys.readouterr().err == ""
