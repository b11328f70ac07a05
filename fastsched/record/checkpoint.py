"""Checkpoints: written beside, marked complete, renamed; the newest one whose every byte is as written is resumed.

runs/NAME/checkpoints/step-N/ holds the learner's files, `state.json` (loop, scheduler, random generators), `groups.npz` where groups
are kept for later steps, and `COMPLETE`, which lists every other file with its size and checksum. Nothing in it is pickled.
"""

import contextlib
import json
import os
import random
import re
import shutil
from itertools import count
from pathlib import Path
from typing import Any, Callable, Mapping, Protocol

import numpy as np
import xxhash

from fastsched.config import ConfigError
from fastsched.types import Ranks

MARKER = "COMPLETE"
OURS = re.compile(r"step-\d+")
ARRAYS = "groups.npz"
VERSION = 2
BLOCK = 1 << 24  # bytes read at a time


class Saver(Protocol):
    ranks: Ranks

    def save(self, folder: Path) -> None: ...
    def load(self, folder: Path) -> int: ...


class CheckpointError(RuntimeError):
    """A checkpoint could not be written. Exit code 3; the ones before it are untouched."""


def checkpoints(run_dir: Path) -> list[Path]:
    """Marked checkpoints, oldest first, by step number."""
    return [folder for folder in step_folders(run_dir) if (folder / MARKER).exists()]


def step_folders(run_dir: Path) -> list[Path]:
    """Folders named step-N, oldest first; whatever else somebody keeps beside them is left alone."""
    return sorted((p for p in (run_dir / "checkpoints").glob("step-*") if OURS.fullmatch(p.name) and p.is_dir()), key=step_of)


def step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step-"))


def save_checkpoint(run_dir: Path, step: int, learner: Saver, state: dict[str, Any], keep: int, score: float | None = None,
                    arrays: Mapping[str, np.ndarray] | None = None) -> Path:
    """Write step-N atomically and delete all but the last `keep` and the best; every rank calls it.

    Args:
        state: JSON-able; floats round-trip bit for bit.
        score: what the best checkpoint has most of; without one it is never kept as the best.
        arrays: what is too large for `state`, the same on every rank; numbers and text.

    Raises CheckpointError on every rank when one of them could not write.
    """
    final = run_dir / "checkpoints" / f"step-{step}"
    partial = final.with_name(f".partial-step-{step}")
    if learner.ranks.rank == 0:
        shutil.rmtree(partial, ignore_errors=True)
    _all_write(learner, partial, lambda: partial.mkdir(parents=True, exist_ok=True))
    _all_write(learner, partial, lambda: learner.save(partial))
    generators = learner.ranks.all_gather(_generators())
    body = json.dumps({"version": VERSION, "step": step, "generators": generators, **state})
    _all_write(learner, partial, lambda: learner.ranks.rank or (partial / "state.json").write_text(body))
    if arrays:
        _all_write(learner, partial, lambda: learner.ranks.rank or np.savez(partial / ARRAYS, **arrays))
    names = learner.ranks.all_gather(sorted(path.name for path in partial.iterdir()) if learner.ranks.rank == 0 else [])[0]
    digests: dict[str, list] = {}
    mine = names[learner.ranks.rank::learner.ranks.world_size]
    _all_write(learner, partial, lambda: digests.update({name: _digest(partial / name, sync=True) for name in mine}))
    listed = {name: entry for part in learner.ranks.all_gather(digests) for name, entry in part.items()}
    marker = {"version": VERSION, "step": step, "ranks": learner.ranks.world_size, "score": score, "files": dict(sorted(listed.items()))}
    _all_write(learner, partial, lambda: learner.ranks.rank or _publish(partial, final, marker))
    if learner.ranks.rank == 0:
        _prune(run_dir, keep)
    learner.ranks.barrier()
    return final


def _all_write(learner: Saver, partial: Path, write: Callable[[], object]) -> None:
    """Run `write` on every rank; all of them raise when one failed. Rank 0 removes what was written so far."""
    problem = ""
    try:
        write()
    except OSError as error:
        problem = f"rank {learner.ranks.rank}: {error}"
    problems = [p for p in learner.ranks.all_gather(problem) if p]
    if problems:
        if learner.ranks.rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise CheckpointError(f"checkpoint {partial.name.removeprefix('.partial-')} could not be written ({problems[0]}); the ones before "
                              "it are untouched. Make room or mend the disk, then continue with --resume")


def _publish(partial: Path, final: Path, marker: dict) -> None:
    """The marker last, then one rename; a checkpoint of the same name, damaged or of a run before, makes way only then."""
    with (partial / MARKER).open("w") as file:
        file.write(json.dumps(marker, indent=1))
        file.flush()
        os.fsync(file.fileno())
    old = final.with_name(f".old-{final.name}")
    if final.exists():
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    partial.rename(final)
    folder = os.open(final.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def _prune(run_dir: Path, keep: int) -> None:
    """Delete all but the last `keep` checkpoints and the best, and whatever was never completed. Damaged ones do not count as kept."""
    for folder in checkpoints(run_dir):
        if damage(folder, checksums=False):
            set_aside(folder)
    marked = checkpoints(run_dir)
    best = best_checkpoint(run_dir)
    for old in marked[:-keep]:
        if old != best:
            (old / MARKER).unlink()
    for folder in (run_dir / "checkpoints").iterdir():
        unmarked = OURS.fullmatch(folder.name) and not (folder / MARKER).exists()
        if unmarked or folder.name.startswith((".partial-", ".old-")):
            shutil.rmtree(folder, ignore_errors=True)


def set_aside(folder: Path) -> Path:
    """Rename a damaged checkpoint step-N.damaged, so that it is neither resumed nor counted nor deleted; its new place."""
    names = (folder.with_name(f"{folder.name}.damaged{i or ''}") for i in count())
    return folder.rename(next(name for name in names if not name.exists()))


def best_checkpoint(run_dir: Path) -> Path | None:
    """The marked checkpoint with the highest score, the later one of equals; None where none has a score."""
    scored = [(folder, _marker(folder).get("score")) for folder in checkpoints(run_dir)]
    return max(((score, step_of(folder), folder) for folder, score in scored if score is not None), default=(0, 0, None))[2]


def newest_intact(run_dir: Path, say: Callable[[str], None]) -> Path | None:
    """The newest checkpoint that is as it was written; `say` hears of every newer one that is not."""
    for folder in reversed(step_folders(run_dir)):
        if not (folder / MARKER).exists():
            say(f"checkpoint {folder.name} has no {MARKER}: it was never finished, or its deletion was not; it is ignored")
            continue
        problem = damage(folder)
        if not problem:
            return folder
        say(f"checkpoint {folder.name} is damaged ({problem}); the one before it is used")
    return None


def set_aside_newer(run_dir: Path, intact: Path) -> list[Path]:
    """What lies after the checkpoint that a run goes on from is damaged: out of the way of what it writes next. Their new places."""
    return [set_aside(folder) for folder in checkpoints(run_dir) if step_of(folder) > step_of(intact)]


def damage(folder: Path, *, checksums: bool = True) -> str:
    """What differs from what the marker lists: a missing file, a size, a checksum; empty when nothing does."""
    marker = _marker(folder)
    if not isinstance(marker.get("files"), dict):
        return f"{MARKER} lists no files: torn, or of an earlier version"
    for name, (size, checksum) in marker["files"].items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size} bytes, {size} were written"
        if checksums and _digest(path) != [size, checksum]:
            return f"{name} has another checksum than was written"
    return ""


def agree_on(folder: Path | None, ranks: Ranks) -> Path | None:
    """Rank 0's checkpoint, once every rank has seen all its files; raises ConfigError on all of them when one has not."""
    chosen = ranks.all_gather(folder)[0]
    if chosen is None:
        return None
    found = ranks.all_gather(damage(chosen, checksums=False))
    for rank, problem in enumerate(found):
        if problem:
            raise ConfigError(f"--resume: rank {rank} does not see {chosen} as rank 0 does ({problem}); the run folder must be shared")
    return chosen


def load_state(folder: Path) -> dict[str, Any]:
    """state.json of a checkpoint. Raises ConfigError when another version wrote it."""
    state = json.loads((folder / "state.json").read_text())
    if state["version"] != VERSION:
        raise ConfigError(f"--resume: {folder} has checkpoint version {state['version']}, this program reads {VERSION}")
    return state


def load_arrays(folder: Path) -> dict[str, np.ndarray]:
    """The `arrays` of a checkpoint, empty when it has none."""
    if not (folder / ARRAYS).exists():
        return {}
    with np.load(folder / ARRAYS) as file:
        return dict(file)


def restore(folder: Path, learner: Saver) -> tuple[dict[str, Any], int]:
    """Load the learner and this rank's random generators from `folder`; returns its state and the rank count that wrote it."""
    state = load_state(folder)
    ranks = learner.load(folder)
    _set_generators(state["generators"][learner.ranks.rank % len(state["generators"])])
    return state, ranks


def _marker(folder: Path) -> dict:
    with contextlib.suppress(json.JSONDecodeError, FileNotFoundError, UnicodeDecodeError):
        marker = json.loads((folder / MARKER).read_text())
        return marker if isinstance(marker, dict) else {}
    return {}


def _digest(path: Path, *, sync: bool = False) -> list:
    """[size in bytes, xxh3_128]; with `sync` the file reaches the disk first."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        while block := file.read(BLOCK):
            digest.update(block)
        return [file.tell(), digest.hexdigest()]


def _generators() -> dict[str, Any]:
    import torch

    name, keys, position, has_gauss, cached = np.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": [name, keys.tolist(), position, has_gauss, cached],
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": [torch.cuda.get_rng_state().numpy().tobytes().hex()] if torch.cuda.is_available() else [],
    }


def _set_generators(saved: dict[str, Any]) -> None:
    import torch

    version, internal, gauss = saved["python"]
    random.setstate((version, tuple(internal), gauss))
    np.random.set_state(tuple(saved["numpy"]))
    tensor = lambda text: torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)
    torch.set_rng_state(tensor(saved["torch"]))
    if saved["cuda"] and torch.cuda.is_available():
        device = torch.cuda.current_device()  # checkpoints once held a state of every device that the rank saw
        torch.cuda.set_rng_state(tensor(saved["cuda"][device if device < len(saved["cuda"]) else 0]))
