"""Learner state on disk: each rank's flat fp32 shards as safetensors with their layout, read back under any rank count or stage.

Nothing here is pickled. `shards-R.safetensors` holds "KIND.I", shard I of one kind of state of rank R, and in its metadata which
piece of which parameter lies where.
"""

import json
from collections import defaultdict
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from fastsched.config import ConfigError

KINDS = ("master", "exp_avg", "exp_avg_sq", "average")


class Fragment(NamedTuple):
    """Elements [begin, begin + size) of a flattened parameter lie at [start, start + size) of shard `shard` of this rank."""

    name: str
    shard: int
    start: int
    begin: int
    size: int


def write_shards(path: Path, state: Mapping[str, Sequence[torch.Tensor]], layout: Sequence[Fragment], step: float) -> None:
    """One rank's shards. `state`: kind -> fp32 shards in the order of `layout`; `step`: updates that AdamW has counted."""
    tensors = {f"{kind}.{i}": shard.detach().contiguous() for kind, shards in state.items() for i, shard in enumerate(shards)}
    save_file(tensors, path, metadata={"shards": json.dumps({"step": float(step), "layout": layout})})  # of two keys the order varies


class ShardReader:
    """Pieces of parameters out of the shard files of a checkpoint, whatever ranks and ZeRO stage wrote them. A context manager."""

    def __init__(self, folder: Path):
        """Raises ConfigError when `folder` holds no shard files."""
        self.folder = folder
        self._files = [safe_open(path, "pt") for path in sorted(folder.glob("shards-*.safetensors"))]
        if not self._files:
            raise ConfigError(f"--resume: {folder} holds no shards-*.safetensors; it is no checkpoint of this version")
        self.ranks = len(self._files)
        described = [json.loads(file.metadata()["shards"]) for file in self._files]
        self.step = described[0]["step"]
        self._pieces: dict[str, list] = defaultdict(list)
        for file, description in zip(self._files, described, strict=True):
            for fragment in description["layout"]:
                piece = Fragment(*fragment)
                self._pieces[piece.name].append((file, piece))

    def __enter__(self) -> "ShardReader":
        return self

    def __exit__(self, *exception) -> None:
        self._files.clear()
        self._pieces.clear()

    def read_into(self, out: torch.Tensor, kind: str, wanted: Fragment) -> None:
        """Fill out[wanted.start : wanted.start + wanted.size]. Raises ConfigError for a parameter that the checkpoint does not hold."""
        missing = wanted.size
        for file, piece in self._pieces[wanted.name]:
            low, high = max(wanted.begin, piece.begin), min(wanted.begin + wanted.size, piece.begin + piece.size)
            if low >= high:
                continue
            source = file.get_slice(f"{kind}.{piece.shard}")[piece.start + low - piece.begin:piece.start + high - piece.begin]
            out.narrow(0, wanted.start + low - wanted.begin, high - low).copy_(source)
            missing -= high - low
            if not missing:
                return
        raise ConfigError(f"--resume: {self.folder} holds {wanted.size - missing} of {wanted.size} values of {wanted.name}; "
                          "it was written for another model")
