"""What the commands do below argument parsing, in this process: nothing is trained."""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import ROOT, environment
from one_array import OneArray
from processes import wait_until
from synthetic_run import write_run

from fastsched.cli import main
from fastsched.commands import run_folder
from fastsched.commands.train import train_and_report
from fastsched.config import Config, ConfigError
from fastsched.config.arguments import config_to_yaml, parse_config
from fastsched.engines.ranks import Ranks
from fastsched.loop.guards import Stop
from fastsched.loop.progress import Progress
from fastsched.record.checkpoint import checkpoints, save_checkpoint
from fastsched.types import StartError


def raising(error: BaseException):
    def stand_in(*_, **__):
        raise error
    return stand_in


def said(capsys) -> str:
    return capsys.readouterr().err.strip()


@pytest.mark.parametrize("rank, file", [("0", "log.txt"), ("1", "log-rank1.txt")])
@pytest.mark.parametrize("error", [ConfigError("model.name: gone"), StartError("rollout.engine vllm: model.name: gone")])
def test_what_refuses_a_run_is_in_the_log_of_its_rank(monkeypatch, capfd, tmp_path, rank, file, error):
    """The command line prints it on rank 0 only."""
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setattr("fastsched.train.train", raising(error))
    with capfd.disabled(), pytest.raises(type(error)):
        train_and_report(Config(), tmp_path, resume=False)
    assert "model.name: gone" in (tmp_path / file).read_text()


@pytest.mark.parametrize("code", [0, 3])
def test_a_run_without_a_complete_row_ends_with_its_own_code(monkeypatch, tmp_path, code):
    """There is nothing to report of it."""
    monkeypatch.setattr("fastsched.train.train", lambda *_: code)
    assert train_and_report(Config(), tmp_path, resume=False) == code
    assert "metrics.csv" not in (tmp_path / "log.txt").read_text()


@pytest.mark.parametrize("error", [ConfigError("odd"), ValueError("matplotlib"), OSError("gone"), KeyError("w_0"), KeyboardInterrupt()])
def test_a_report_that_fails_changes_no_exit_code(monkeypatch, tmp_path, error):
    monkeypatch.setattr("fastsched.train.train", lambda cfg, run_dir, *_: write_run(run_dir, steps=2) and 3)
    monkeypatch.setattr("fastsched.report.page.write_report", raising(error))
    assert train_and_report(Config(), tmp_path / "run", resume=False) == 3
    assert f"no report ({type(error).__name__}" in (tmp_path / "run/log.txt").read_text()


def test_a_run_folder_that_cannot_be_is_named(capsys, tmp_path):
    (tmp_path / "file").write_text("")
    for run_dir in (tmp_path / "file", tmp_path / "file/run", Path("/proc/run")):
        assert main(["train", "--run_dir", str(run_dir)]) == 2
        assert said(capsys).startswith(f"fastsched: --run_dir: {run_dir} cannot be made (")


@pytest.mark.parametrize("arguments", [["eval"], ["export"], ["export", "--quantize", "nf4"], ["serve-bench"]], ids=" ".join)
def test_a_folder_without_a_run_is_named_without_options_that_were_not_given(capsys, tmp_path, arguments):
    assert main([*arguments, str(tmp_path / "none")]) == 2
    message = said(capsys)
    assert str(tmp_path / "none") in message and "holds no run" in message and "--resume" not in message


@pytest.mark.parametrize("quantize", [[], ["--quantize", "nf4"]], ids=["plain", "nf4"])
def test_an_output_that_is_a_file_is_named(capsys, run_dir, tmp_path, quantize):
    (tmp_path / "file").write_text("")
    assert main(["export", str(run_dir), "--out", str(tmp_path / "file"), *quantize]) == 2
    assert f"--out: {tmp_path / 'file'} is a file; give a folder" in said(capsys)
    assert main(["export", str(run_dir), "--out", str(run_dir), *quantize]) == 2
    assert f"--out: {run_dir} is not empty" in said(capsys)


def test_a_file_that_is_no_yaml_is_named_with_its_line(capsys, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("train:\n  steps: [1\nlearner: {}\n")
    for option in (["--config", str(file)], [f"--config={file}"]):
        assert main(["train", *option]) == 2
        message = said(capsys)
        assert f"--config: {file}, line 3" in message and "<unicode string>" not in message


@pytest.mark.parametrize("arguments, called", [
    (["eval", "r"], "fastsched.commands.evaluate.evaluate_run"), (["export", "r"], "fastsched.commands.export.export_run"),
    (["cluster"], "fastsched.commands.cluster.cluster"), (["train", "--dry-run"], "fastsched.commands.dry_run.dry_run"),
    (["serve-bench", "r"], "fastsched.commands.serve_bench.serve_bench"), (["report", "r"], "fastsched.commands.report.report")])
def test_ctrl_c_is_no_traceback(monkeypatch, capsys, arguments, called):
    monkeypatch.setattr(called, raising(KeyboardInterrupt()))
    assert main(arguments) == 130 and said(capsys) == "fastsched: interrupted"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("when", ["before the loop", "while the engines close"])
def test_a_run_that_is_ended_outside_of_the_loop_says_so(command, tmp_path, monkeypatch, number, when):
    """The fault: SIGTERM there ended the process without a word and without its exit code."""
    import fastsched.train

    @contextmanager
    def parts(*_):
        if when == "before the loop":
            signal.raise_signal(number)
        yield SimpleNamespace(ranks=None, cfg=Config())
        signal.raise_signal(number)

    monkeypatch.setattr(fastsched.train, "assemble_training", parts)
    monkeypatch.setattr(fastsched.train, "start", lambda *_: Progress())
    monkeypatch.setattr(fastsched.train, "Stop", lambda *_: nullcontext(SimpleNamespace(reason="", code=0)))
    monkeypatch.setattr(fastsched.train, "take_steps", lambda *_: None)
    monkeypatch.setattr(fastsched.train, "due", lambda *_: True)
    former = signal.getsignal(signal.SIGTERM)
    assert command(["train", "--preset", "tiny-cpu", "--run_dir", str(tmp_path / "run")]) == 130
    assert "interrupted; the last checkpoint is untouched" in (tmp_path / "run/log.txt").read_text()
    assert signal.getsignal(signal.SIGTERM) == former


def test_outside_of_the_loop_interrupts_do_what_they_did_before():
    former = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    with Stop(Config(), Ranks()) as stopped:
        signal.raise_signal(signal.SIGINT)  # the step goes on
        stopped.reason = "interrupted"
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == former
    with pytest.raises(KeyboardInterrupt), Stop(Config(), Ranks()):
        signal.raise_signal(signal.SIGINT)  # after the last check: it must not be lost


@pytest.fixture
def run_dir(tmp_path, random_model):
    """Configuration and two checkpoints, as far as `export` needs them."""
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(config_to_yaml(parse_config(["--model.name", str(random_model)])))
    learner = OneArray()
    learner.save = lambda folder: [(folder / f"{name}.safetensors").write_bytes((random_model / "model.safetensors").read_bytes())
                                   for name in ("policy", "average")]
    for step in (7, 8):
        save_checkpoint(run, step, learner, {}, keep=2)
    return run


def test_a_checkpoint_is_looked_up_once(monkeypatch, run_dir):
    """Training goes on beside `eval`: the label must be that of the weights."""
    looked_up, steps = [], []

    def newest(run, say):
        looked_up.append(run)
        return checkpoints(run)[-len(looked_up)]

    monkeypatch.setattr(run_folder, "newest_intact", newest)
    monkeypatch.setattr("fastsched.loop.assemble.assemble_evaluation", lambda cfg, *_: nullcontext(Exported(cfg.model.name, steps)))
    assert main(["eval", str(run_dir)]) == 0
    assert len(looked_up) == 1 and steps == [8]


class Exported:
    """In an evaluator's place: needs the weights to be there."""

    def __init__(self, model: str, steps: list[int]):
        self.model, self.steps = Path(model), steps

    def evaluate(self, step: int) -> None:
        assert (self.model / "model.safetensors").stat().st_size
        self.steps.append(step)


WAITING = """
import sys, time, types
sys.modules["fastsched.loop.assemble"] = types.SimpleNamespace(assemble_evaluation=lambda *_: time.sleep(600))
from fastsched.cli import main
sys.exit(main(["eval", sys.argv[1]]))
"""


def test_sigterm_leaves_no_copy_of_the_model(run_dir, tmp_path):
    folder = tmp_path / "temporary"
    folder.mkdir()
    process = subprocess.Popen([sys.executable, "-c", WAITING, str(run_dir)], cwd=ROOT, env=environment() | {"TMPDIR": str(folder)})
    try:
        wait_until(lambda: any(folder.glob("*/log/log.txt")), 120)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 143
    finally:
        process.kill()
    assert [p.name for p in folder.iterdir() if p.name.startswith(tempfile.gettempprefix())] == []


def test_a_command_in_this_process_gives_sigterm_back(run_dir, tmp_path):
    former = signal.getsignal(signal.SIGTERM)
    assert main(["export", str(run_dir), "--out", str(tmp_path / "out")]) == 0
    assert signal.getsignal(signal.SIGTERM) == former and os.listdir(tmp_path / "out")
