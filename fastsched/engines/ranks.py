"""Rank, world size and collectives: what everybody but the optimizer wants of torch.distributed."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Mapping

import deepspeed
import numpy as np
import torch
from deepspeed import comm

from fastsched.types import Disagreement

PATIENCE_S = 1800.0
"""How long a collective waits for a rank that writes a checkpoint, prepares a model or evaluates; torch's own limit."""


def init_distributed(timeout_s: float = PATIENCE_S) -> "Ranks":
    """Join the launcher's process group, or make one of a single process, which needs no port that another run could hold; its ranks.

    A collective waits `timeout_s` for a rank that is late, in seconds.
    """
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        os.environ.setdefault(name, value)
    if not torch.cuda.is_available():
        # Only DeepSpeed's inference collectives use this op; building it takes minutes and a killed build locks the next start.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        # Ranks of this host, as DeepSpeed's launcher says it: else ZeRO-3 starts `numactl` in every backward pass to count devices.
        os.environ["LOCAL_SIZE"] = os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("LOCAL_SIZE") or "1"
    if comm.is_initialized():
        return joined_ranks()
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if os.environ["WORLD_SIZE"] == "1" and not torch.distributed.is_initialized():
        torch.distributed.init_process_group(backend, store=torch.distributed.HashStore(), rank=0, world_size=1)
    deepspeed.init_distributed(backend, verbose=False, timeout=timedelta(seconds=timeout_s))
    return joined_ranks()


def leave_distributed() -> None:
    """Leave the process group, if there is one; a later `init_distributed` of this process makes a new one."""
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    deepspeed.utils.groups._WORLD_GROUP = None  # a clone of the group that is gone


@dataclass(frozen=True)
class Ranks:
    """The ranks of a run; by default the one of a single process. Collectives are called on every rank alike."""

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")

    def mine(self, count: int) -> range:
        """Which of `count` places, dealt out in turn, are this rank's."""
        return range(self.rank, count, self.world_size)

    def all_reduce(self, values: np.ndarray, op: str = "sum") -> np.ndarray:
        """Elementwise sum or max over ranks, float64."""
        if self.world_size == 1:
            return values
        tensor = torch.from_numpy(np.ascontiguousarray(values, np.float64)).to(self.device)
        comm.all_reduce(tensor, op={"sum": comm.ReduceOp.SUM, "max": comm.ReduceOp.MAX}[op])
        return tensor.cpu().numpy()

    def all_gather(self, value: object) -> list:
        """`value` of every rank, in rank order."""
        if self.world_size == 1:
            return [value]
        out: list = [None] * self.world_size
        torch.distributed.all_gather_object(out, value)
        return out

    def agree(self, decided: Mapping[str, object], what: str) -> None:
        """Compare what every rank must have decided alike with rank 0's, bit for bit, by name.

        Raises Disagreement on every rank, with `what` was decided and the first name that differs.
        """
        gathered = self.all_gather({name: repr(value) for name, value in decided.items()})
        for rank, other in enumerate(gathered):
            for name, value in other.items():
                if value != gathered[0][name]:
                    raise Disagreement(f"{what}: rank {rank} decided {name} = {shortened(value)}, rank 0 {shortened(gathered[0][name])}; "
                                       "every rank must see the same data, configuration and code. Resume from the last checkpoint once "
                                       "they do")

    def barrier(self) -> None:
        if self.world_size > 1:
            comm.barrier()


def joined_ranks() -> Ranks:
    """Those of the process group that this process is in."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if torch.cuda.is_available() else torch.device("cpu")
    return Ranks(comm.get_rank(), comm.get_world_size(), device)


def shortened(text: str, width: int = 80) -> str:
    return text if len(text) <= width else f"{text[:width - 3]}..."
