"""Runs that end early or go on with another configuration, through the command line, on transformers `generate` with a random model."""

import json
import re

import pytest
from whole_run import rows, small

from fastsched.config import Config, RewardConfig, TrainConfig
from fastsched.config.arguments import parse_config
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.ranks import Ranks
from fastsched.loop.guards import UNSCORED_STEPS, Stop
from fastsched.types import EngineError


@pytest.mark.parametrize("unscored, flat, code, words", [
    (UNSCORED_STEPS - 1, 9, 0, ""), (UNSCORED_STEPS, 9, 3, "no reward: in 3 steps in a row .*my:score; raised: response 0 of 4: KeyError"),
    (UNSCORED_STEPS - 1, 10, 3, "no signal: in 10 steps")])
def test_what_the_guard_counts(unscored, flat, code, words):
    stopped = Stop(Config(train=TrainConfig(no_signal_limit=10), reward=RewardConfig(kind="my:score")), Ranks())
    stopped.check(flat, unscored, "raised: response 0 of 4: KeyError")
    assert stopped.code == code and re.match(words, stopped.reason) and bool(stopped.reason) == bool(code)


def test_a_reward_that_always_fails_stops_the_run_and_says_why(fastsched, tmp_path, random_model):
    """The fault: a run to its last step that trains nothing."""
    (tmp_path / "broken.py").write_text("def score(**_):\n    raise KeyError('no such column')\n")
    run = tmp_path / "run"
    done = fastsched(*small(random_model, run, "--reward.kind", "broken:score", "--train.steps", "9"), PYTHONPATH=str(tmp_path))
    assert done.returncode == 3 and re.search("no reward: in 3 steps in a row.*no such column", done.stdout), done.stdout + done.stderr
    assert len(rows(run)) == 3 and done.stdout.count("WARNING: reward failed (raised)") == 1
    assert json.loads((run / "checkpoints/step-3/state.json").read_text())["progress"]["unscored_in_row"] == 3
    assert "evaluation of step 0: 16 of 16 responses could not be scored (16 raised)" in done.stdout


def test_why_a_run_ends_is_said_before_its_engines_are_closed(fastsched, tmp_path, random_model, monkeypatch):
    """The fault: a launcher sends SIGTERM the moment a rank is gone, and the others died of it while they closed, without a word."""
    run, logs, close = tmp_path / "run", [], DeepSpeedLearner.close

    def closed(engine):
        logs.append((run / "log.txt").read_text())
        close(engine)

    def lost(*_):
        raise EngineError("planted: the rank is gone")

    monkeypatch.setattr(DeepSpeedLearner, "close", closed)
    monkeypatch.setattr("fastsched.train.take_step", lost)
    done = fastsched(*small(random_model, run, "--train.eval_at_ends", "false"))
    assert done.returncode == 3 and done.stdout.count("planted: the rank is gone; the checkpoints are untouched") == 1, done.stdout
    assert len(logs) == 1 and "planted: the rank is gone" in logs[0]


def test_what_a_resume_overrides_holds_for_the_next_one(fastsched, tmp_path, random_model):
    run = tmp_path / "run"
    first = fastsched(*small(random_model, run, "--train.steps", "1", "--train.eval_at_ends", "false"))
    assert first.returncode == 0, first.stdout + first.stderr
    more = fastsched("train", "--run_dir", str(run), "--resume", "--train.steps", "2", "--learner.grad_clip", "0.5")
    assert more.returncode == 0 and "learner.grad_clip was" in more.stdout, more.stdout + more.stderr
    again = fastsched("train", "--run_dir", str(run), "--resume")
    assert again.returncode == 0 and " was " not in again.stdout, again.stdout + again.stderr
    assert parse_config(["--config", str(run / "config.yaml")]).learner.grad_clip == 0.5 != Config().learner.grad_clip
    former = parse_config(["--config", str(run / "config-until-step-1.yaml")])
    assert former.train.steps == 1 and len(rows(run)) == 2
    resumed = json.loads((run / "environment.json").read_text())["resumed"]
    assert [(entry["step"], "--learner.grad_clip" in entry["command"]) for entry in resumed] == [(1, True), (2, False)]
