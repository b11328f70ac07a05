"""Checkpoints: written beside, renamed, and marked complete last; the newest complete one is resumed.

runs/NAME/checkpoints/step-N/ holds the learner's files, `state.json` (loop, scheduler, random generators) and `COMPLETE`.
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from fastsched.config import ConfigError

MARKER = "COMPLETE"
VERSION = 2


class Saver(Protocol):
    rank: int

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> None: ...
    def barrier(self) -> None: ...
    def all_gather(self, value: object) -> list: ...


def checkpoints(run_dir: Path) -> list[Path]:
    """Complete checkpoints, oldest first, by step number."""
    found = (run_dir / "checkpoints").glob(f"step-*/{MARKER}")
    return sorted((p.parent for p in found), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def save_checkpoint(run_dir: Path, step: int, learner: Saver, state: dict[str, Any], keep: int) -> Path:
    """Write step-N atomically and delete all but the last `keep`; every rank calls it.

    Args:
        state: JSON-able; floats round-trip bit for bit.
    """
    final = run_dir / "checkpoints" / f"step-{step}"
    partial = final.with_name(f".partial-step-{step}")
    if learner.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    learner.barrier()
    learner.save(partial)
    generators = learner.all_gather(_generators())
    if learner.rank == 0:
        body = {"version": VERSION, "step": step, "generators": generators, **state}
        (partial / "state.json").write_text(json.dumps(body))
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        (final / MARKER).touch()
        for old in checkpoints(run_dir)[:-keep]:
            (old / MARKER).unlink()
            shutil.rmtree(old)
    learner.barrier()
    return final


def load_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises ConfigError when another version wrote it."""
    state = json.loads((folder / "state.json").read_text())
    if state["version"] != VERSION:
        raise ConfigError(f"--resume: {folder} has checkpoint version {state['version']}, this program reads {VERSION}")
    return state


def restore(folder: Path, learner: Saver) -> dict[str, Any]:
    """Load the learner and this rank's random generators from `folder`; returns its state."""
    state = load_state(folder)
    learner.load(folder)
    _set_generators(state["generators"][learner.rank])
    return state


def _generators() -> dict[str, Any]:
    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [s.numpy().tobytes().hex() for s in torch.cuda.get_rng_state_all()] if torch.cuda.is_available() else [],
    }


def _set_generators(saved: dict[str, Any]) -> None:
    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    tensor = lambda text: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    torch.set_rng_state(tensor(saved["torch"]))
    if saved["cuda"]:
        torch.cuda.set_rng_state_all([tensor(s) for s in saved["cuda"]])
