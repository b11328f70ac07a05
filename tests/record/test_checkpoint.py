"""Checkpoints on a disk that fills, a writer that dies and files that rot. The learner here is one array; the files are real."""

import json
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from command_line import ROOT, environment
from one_array import OneArray

from fastsched.config import ConfigError, TrainConfig
from fastsched.record import checkpoint
from fastsched.record.checkpoint import (
    CheckpointError,
    agree_on,
    best_checkpoint,
    checkpoints,
    damage,
    newest_intact,
    restore,
    save_checkpoint,
    set_aside_newer,
)


def names(run_dir: Path) -> list[str]:
    return sorted(p.name for p in (run_dir / "checkpoints").iterdir())


@pytest.fixture
def run_dir(tmp_path):
    """Checkpoints 9, 10 and 11, whose array holds the step."""
    for step in (9, 10, 11):
        save_checkpoint(tmp_path, step, OneArray(step), {"note": step / 3}, keep=3)
    return tmp_path


def flip(path: Path) -> None:
    body = bytearray(path.read_bytes())
    body[len(body) // 2] ^= 1
    path.write_bytes(body)


DAMAGE = {
    "a flipped bit": lambda folder: flip(folder / "shards-0.safetensors"),
    "a truncated file": lambda folder: (folder / "shards-0.safetensors").write_bytes(b"short"),
    "a missing shard": lambda folder: (folder / "shards-0.safetensors").unlink(),
    "a changed state": lambda folder: (folder / "state.json").write_text((folder / "state.json").read_text().replace("3.6", "3.7")),
    "a torn marker": lambda folder: (folder / "COMPLETE").write_text('{"files"'),
    "an empty marker": lambda folder: (folder / "COMPLETE").write_text(""),
    "no marker": lambda folder: (folder / "COMPLETE").unlink(),
}


@pytest.mark.parametrize("spoil", DAMAGE, ids=str)
def test_j2_a_damaged_checkpoint_is_named_and_the_one_before_is_used(run_dir, spoil):
    DAMAGE[spoil](run_dir / "checkpoints/step-11")
    said: list[str] = []
    folder = newest_intact(run_dir, said.append)
    assert folder.name == "step-10"
    assert spoil == "no marker" or (len(said) == 1 and "step-11 is damaged" in said[0])
    learner = OneArray()
    state, _ = restore(folder, learner)
    assert state["note"] == 10 / 3 and torch.all(learner.array == 10)


def test_all_damaged_is_no_checkpoint(run_dir):
    for folder in checkpoints(run_dir):
        flip(folder / "state.json")
    said: list[str] = []
    assert newest_intact(run_dir, said.append) is None and len(said) == 3


def test_an_intact_one_is_taken_in_numeric_order(run_dir):
    assert newest_intact(run_dir, pytest.fail).name == "step-11"
    assert [folder.name for folder in checkpoints(run_dir)] == ["step-9", "step-10", "step-11"]


def test_only_the_last_ones_are_kept_and_leavings_are_swept(run_dir):
    (run_dir / "checkpoints/.partial-step-7").mkdir()
    (run_dir / "checkpoints/step-8").mkdir()  # its marker went first, then the run was killed
    save_checkpoint(run_dir, 100, OneArray(), {}, keep=2)
    assert names(run_dir) == ["step-100", "step-11"]


def test_only_intact_ones_count_as_kept_and_damaged_ones_stay_under_another_name(run_dir):
    """The fault: after a resume from step 10 the damaged step 11 was kept, and the new ones were deleted."""
    (run_dir / "checkpoints/step-11/shards-0.safetensors").write_bytes(b"torn")
    save_checkpoint(run_dir, 12, OneArray(), {}, keep=2)
    assert names(run_dir) == ["step-10", "step-11.damaged", "step-12"]
    assert newest_intact(run_dir, pytest.fail).name == "step-12"


def test_what_lies_after_the_checkpoint_that_is_resumed_is_set_aside(run_dir):
    flip(run_dir / "checkpoints/step-11/state.json")
    assert [p.name for p in set_aside_newer(run_dir, run_dir / "checkpoints/step-10")] == ["step-11.damaged"]
    save_checkpoint(run_dir, 11, OneArray(), {}, keep=3)
    flip(run_dir / "checkpoints/step-11/state.json")
    assert [p.name for p in set_aside_newer(run_dir, run_dir / "checkpoints/step-10")] == ["step-11.damaged1"]


@pytest.mark.parametrize("name", ["step-11 copy", "step-11.bak", "step-best", "step-", "notes"])
def test_what_a_person_keeps_beside_the_checkpoints_is_left_alone(run_dir, name):
    """The fault: a traceback in resume, eval, export and pruning, or the folder was swept away."""
    shutil.copytree(run_dir / "checkpoints/step-11", run_dir / "checkpoints" / name)
    assert newest_intact(run_dir, pytest.fail).name == "step-11" and best_checkpoint(run_dir) is None
    save_checkpoint(run_dir, 12, OneArray(), {}, keep=1)
    assert names(run_dir) == sorted(["step-12", name])


def test_a_missing_marker_is_said(run_dir):
    (run_dir / "checkpoints/step-11/COMPLETE").unlink()
    said: list[str] = []
    assert newest_intact(run_dir, said.append).name == "step-10"
    assert said == ["checkpoint step-11 has no COMPLETE: it was never finished, or its deletion was not; it is ignored"]


def test_the_best_is_kept_beside_the_last(tmp_path):
    for step, score in enumerate([0.2, 0.7, 0.7, None, 0.1], start=1):
        save_checkpoint(tmp_path, step, OneArray(), {}, keep=1, score=score)
    assert names(tmp_path) == ["step-3", "step-5"] and best_checkpoint(tmp_path).name == "step-3"
    save_checkpoint(tmp_path, 6, OneArray(), {}, keep=1, score=0.9)
    assert names(tmp_path) == ["step-6"]


def test_accuracy_is_not_the_best_of_runs_that_never_evaluate():
    with pytest.raises(ConfigError, match="train.keep_best.*train.eval_every"):
        TrainConfig(keep_best="accuracy")


def test_a_checkpoint_is_written_anew_over_a_damaged_one(run_dir):
    flip(run_dir / "checkpoints/step-11/state.json")
    save_checkpoint(run_dir, 11, OneArray(5), {}, keep=3)
    assert not damage(run_dir / "checkpoints/step-11") and names(run_dir) == ["step-10", "step-11", "step-9"]


def test_a_full_disk_costs_the_checkpoint_that_did_not_fit_and_nothing_else(run_dir):
    """The fault: no file may grow beyond 8 KiB; the array needs 40."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, hard))
    try:
        with pytest.raises(CheckpointError, match=r"step-12 could not be written \(rank 0: .*untouched.*--resume"):
            save_checkpoint(run_dir, 12, Failing(7), {}, keep=3)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names(run_dir) == ["step-10", "step-11", "step-9"] and not damage(run_dir / "checkpoints/step-11")
    save_checkpoint(run_dir, 12, Failing(7), {}, keep=3)


class Failing(OneArray):
    """Writes as the engine does: what a library reports in its own exception arrives as an OSError."""

    def save(self, folder: Path) -> None:
        (folder / "shards-0.safetensors").write_bytes(self.array.numpy().tobytes() * 3)


KILLED = """
import os, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from one_array import OneArray
from fastsched.record.checkpoint import save_checkpoint

class Dying(OneArray):
    def save(self, folder):
        super().save(folder)
        if {where!r} == "after the shards":
            os.kill(os.getpid(), 9)

if {where!r} == "before the rename":
    real = os.fsync
    os.fsync = lambda fd: os.kill(os.getpid(), 9) if os.readlink(f"/proc/self/fd/{{fd}}").endswith("COMPLETE") else real(fd)
save_checkpoint(Path({run!r}), 12, Dying(12), {{}}, keep=3)
"""


@pytest.mark.parametrize("where", ["after the shards", "before the rename"])
def test_a_killed_writer_leaves_the_checkpoint_before(run_dir, where):
    program = KILLED.format(tests=str(ROOT / "tests"), where=where, run=str(run_dir))
    done = subprocess.run([sys.executable, "-c", program], env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    assert ".partial-step-12" in names(run_dir) and newest_intact(run_dir, pytest.fail).name == "step-11"
    save_checkpoint(run_dir, 12, OneArray(12), {}, keep=3)
    assert names(run_dir) == ["step-10", "step-11", "step-12"]


def test_f8_every_generator_resumes(run_dir):
    import random

    random.seed(3), np.random.seed(4), torch.manual_seed(5)
    folder = save_checkpoint(run_dir, 20, OneArray(), {}, keep=1)
    straight = random.random(), np.random.rand(), float(torch.rand(()))
    restore(folder, OneArray())
    assert (random.random(), np.random.rand(), float(torch.rand(()))) == straight


@pytest.mark.parametrize("saved, current, taken", [(["00", "01", "02"], 1, 1), (["00", "01"], 3, 0), (["05"], 3, 5)])
def test_only_this_devices_generator_is_saved_and_set(monkeypatch, saved, current, taken):
    """The fault: a run resumed with fewer GPUs than wrote the checkpoint. The devices are faked."""
    done = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda: torch.tensor([7], dtype=torch.uint8))
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda state: done.append(state.tolist()))
    now = checkpoint._generators()
    assert now["cuda"] == ["07"]
    checkpoint._set_generators({**now, "cuda": saved})
    assert done == [[taken]]


def test_ranks_agree_before_any_of_them_loads(run_dir):
    """The second rank is faked: it sees another run folder, or another checkpoint."""
    class TwoRanks(OneArray):
        world_size = 2
        other: object = None

        def all_gather(self, value):
            return [value, self.other if isinstance(value, str) else None]

    ranks, newest = TwoRanks(), checkpoints(run_dir)[-1]
    ranks.other = "state.json is missing"
    with pytest.raises(ConfigError, match="rank 1 does not see .*step-11.*state.json is missing.*shared"):
        agree_on(newest, ranks)
    ranks.other = ""
    assert agree_on(newest, ranks) == newest and agree_on(None, ranks) is None


def test_nothing_in_a_checkpoint_is_pickled(run_dir):
    """Item 7: loading runs no code of whoever wrote the folder; a pickle in it is not opened, and one that is listed is no shard."""
    folder = checkpoints(run_dir)[-1]
    (folder / "mp_rank_00_model_states.pt").write_bytes(b"cos\nsystem\n(S'touch pwned'\ntR.")
    restore(folder, OneArray())
    assert not (ROOT / "pwned").exists()
    sources = "".join(path.read_text() for path in (ROOT / "fastsched").rglob("*.py"))
    for call in ("torch.load(", "pickle.", "load_checkpoint(", "allow_pickle"):
        assert call not in sources, call


def test_another_version_is_refused_by_name(run_dir):
    folder = checkpoints(run_dir)[-1]
    state = json.loads((folder / "state.json").read_text())
    (folder / "state.json").write_text(json.dumps({**state, "version": 99}))
    with pytest.raises(ConfigError, match="checkpoint version 99"):
        restore(folder, OneArray())


def test_a_run_that_starts_again_makes_its_first_evaluation_once(tmp_path):
    """Killed before the first checkpoint, after the evaluation of step 0, which the second start makes again."""
    from fastsched.config import LogConfig
    from fastsched.record.log import RunLog

    for resume_step in (None, 0):
        with RunLog(tmp_path, LogConfig(tensorboard=False, plots=False), 3, resume_step=resume_step) as log:
            log.evaluation(0, {"all": 0.5}, {"all": 8})
    assert len((tmp_path / "evals.jsonl").read_text().splitlines()) == 1
