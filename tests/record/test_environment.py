"""What a run folder says of its configuration and of the processes that wrote it."""

import json
import subprocess

import pytest

from fastsched.record import environment
from fastsched.record.environment import record_start


def about(run_dir):
    return json.loads((run_dir / "environment.json").read_text())


def names(run_dir):
    return sorted(p.name for p in run_dir.iterdir())


def test_a_resume_keeps_its_configuration_and_the_former_one_beside_it(tmp_path):
    """The fault: what was overridden with --resume was lost on the next one, and in eval and export."""
    record_start(tmp_path, "lr: 1\n", None)
    started = about(tmp_path)["started"]
    for step, text in ((3, "lr: 1\n"), (5, "lr: 2\n"), (5, "lr: 3\n"), (8, "lr: 3\n")):
        record_start(tmp_path, text, step)
        assert (tmp_path / "config.yaml").read_text() == text
    assert (tmp_path / "config-until-step-5.yaml").read_text() == "lr: 1\n"  # with lr 2 no step was taken
    assert names(tmp_path) == ["config-until-step-5.yaml", "config.yaml", "environment.json"]
    found = about(tmp_path)
    assert [resume["step"] for resume in found["resumed"]] == [3, 5, 5, 8] and found["started"] == started
    assert set(found["resumed"][0]) == {"step", "started", "command", "packages", "git"} and "cpu" in found


def test_a_start_from_the_beginning_begins_the_record_anew(tmp_path):
    for step in (None, 2, None):
        record_start(tmp_path, "lr: 1\n", step)
    assert "resumed" not in about(tmp_path)


@pytest.mark.parametrize("error", [FileNotFoundError("git"), subprocess.TimeoutExpired("git", 30)])
def test_a_git_that_is_not_there_or_hangs_costs_nothing(monkeypatch, tmp_path, error):
    def run(*_, **__):
        raise error

    monkeypatch.setattr(environment.subprocess, "run", run)
    record_start(tmp_path, "", None)
    assert about(tmp_path)["git"] is None
