"""The learner engine: DeepSpeed ZeRO around the policy, with the averaged policy beside the fp32 master weights."""

import copy
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

import deepspeed
import numpy as np
import torch
from fastsched_kernels.averaging import ema_and_drift_
from fastsched_kernels.sums import squared_norm
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from fastsched.config import ConfigError, LearnerConfig, ModelConfig
from fastsched.engines.learner.bin_squares import BinSquares
from fastsched.engines.learner.master import MasterShards
from fastsched.engines.learner.policy import Policy, weight_names
from fastsched.engines.learner.reference_network import ReferenceNetwork
from fastsched.engines.learner.shards import KINDS, ShardReader, write_shards
from fastsched.engines.ranks import joined_ranks
from fastsched.types import Head, MicroBatch, StepResult


class DeepSpeedLearner:
    """Policy, AdamW and average under ZeRO stage 0-3. Losses are normalised by the caller over the global batch.

    The caller owns the accumulation boundary (`managed_gradient_accumulation` off): `backward` as often as needed, then `step`.
    DeepSpeed averages gradients over ranks, so `backward` multiplies the loss by the world size.
    """

    def __init__(self, model: nn.Module, cfg: LearnerConfig, model_cfg: ModelConfig, teacher: Optional[nn.Module] = None):
        self.cfg, self.dtype = cfg, getattr(torch, model_cfg.dtype)
        self.ranks = joined_ranks()
        self.device = self.ranks.device
        reference = copy.deepcopy(model) if cfg.kl != "none" else teacher  # the configuration allows one of them
        self.reference = None if reference is None else ReferenceNetwork(reference, zero_stage=cfg.zero_stage, dtype=self.dtype,
                                                                         device=self.device)
        self.follows_average = cfg.reference == "average" and teacher is None
        policy = Policy(model)
        optimizer = torch.optim.AdamW(policy.parameters(), lr=cfg.lr, betas=cfg.betas, weight_decay=cfg.weight_decay, fused=True)
        self.engine, *_ = deepspeed.initialize(model=policy, optimizer=optimizer, config=self._deepspeed_config())
        self.policy: Policy = self.engine.module
        self.master = MasterShards(self.engine, self.policy)
        self.average = [shard.detach().clone() for shard in self.master.shards()]
        self._micro_squares: list[torch.Tensor] = []
        self._bins = BinSquares()
        for p in self.policy.parameters():
            p.register_hook(partial(self._see_gradient, p))
        self._plain_norm = float("nan")
        if cfg.zero_stage == 0:
            optimizer.register_step_pre_hook(self._clip_plain)

    def _deepspeed_config(self) -> dict[str, Any]:
        bf16 = self.dtype == torch.bfloat16
        return {
            "train_micro_batch_size_per_gpu": 1,
            "gradient_accumulation_steps": 1,
            "managed_gradient_accumulation": False,
            "gradient_clipping": self.cfg.grad_clip if self.cfg.zero_stage else 0.0,
            "bf16": {"enabled": bf16, "immediate_grad_update": bf16},
            # bf16 gradients are added up, over micro-batches and over ranks, in fp32: a bf16 sum of hundreds stops growing.
            "data_types": {"grad_accum_dtype": "fp32"},
            "communication_data_type": "fp32",
            "zero_optimization": {"stage": self.cfg.zero_stage, "overlap_comm": False},
            "zero_allow_untested_optimizer": True,
            "steps_per_print": 10**9,
        }

    def backward(self, micro: MicroBatch, loss: Callable[[Head, Optional[Head]], Any], *, reference: bool) -> Any:
        """Forward, fused loss and backward of one micro-batch; returns what `loss` returned (it has a scalar `.loss`)."""
        self._micro_squares.append(torch.zeros((), dtype=torch.float64, device=self.device))
        self._bins.begin(micro.bin)
        with self.reference.head(micro) if reference else nullcontext() as other:
            out = self.engine(micro, lambda head: loss(head, other))
            self.engine.backward(out.loss * self.ranks.world_size)
        return out

    @torch.no_grad()
    def score(self, micro: MicroBatch, score: Callable[[Head], torch.Tensor]) -> torch.Tensor:
        """`score(Head)` of the policy, without gradient."""
        return self.engine(micro, score)

    def step(self, lr: float) -> StepResult:
        """Reduce, clip and apply the accumulated gradients at learning rate `lr`."""
        for group in self.engine.optimizer.param_groups:
            group["lr"] = lr
        self.engine.step()
        applied = bool(self.engine.was_step_applied())
        norm = self.engine.get_global_grad_norm()
        return StepResult(float(self._plain_norm if norm is None else norm) if applied else float("nan"), applied)

    def _clip_plain(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        """Clipping for stage 0, where DeepSpeed clips without telling the norm."""
        limit = self.cfg.grad_clip or float("inf")
        self._plain_norm = torch.nn.utils.clip_grad_norm_(self.policy.parameters(), limit)

    def discard_gradients(self) -> None:
        """Drop what was accumulated since the last step; weights and optimizer state stay."""
        self.master.discard_gradients()

    def _see_gradient(self, parameter: nn.Parameter, grad: torch.Tensor) -> None:
        self._bins.add(parameter, grad)
        self._micro_squares[-1] += squared_norm(grad)

    def take_gradient_squares(self) -> list[float]:
        """Squared gradient norm of each micro-batch since the last call, of its share of the global loss."""
        squares, self._micro_squares = self._micro_squares, []
        return [float(s) / self.ranks.world_size**2 for s in squares]

    def take_bin_squares(self) -> dict[int, float]:
        """Squared norm, by difficulty bin, of this rank's summed gradient of that bin since the last call, as the same share."""
        return {b: square / self.ranks.world_size**2 for b, square in self._bins.take().items()}

    @torch.no_grad()
    def update_average(self, alpha: float) -> float:
        """avg <- alpha avg + (1 - alpha) theta on the master shards; returns the drift ||theta - avg|| / ||avg|| over all ranks."""
        out = ema_and_drift_(self.average, self.master.shards(), alpha)
        sums = np.array([float(out.squared_drift), float(out.squared_norm)])
        drift, norm = self.ranks.all_reduce(sums) if self.master.partitioned else sums
        if self.follows_average:
            self.refresh_reference()
        return float(np.sqrt(drift / norm)) if norm > 0 else float("nan")

    @torch.no_grad()
    def refresh_reference(self) -> None:
        """Copy the average into the reference policy's working weights."""
        if self.reference is None:
            return
        if self.reference.partitioned:
            self.reference.take_shards(self.average, self.master.layout())
        else:
            self.reference.take(self.average_weights())

    def copy_reference(self) -> None:
        """The reference becomes the policy as it is now."""
        self.reference.take(self.named_weights())

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full working weight), one at a time; every rank gets all of them."""
        for name, p in weight_names(self.policy):
            with deepspeed.zero.GatheredParameters([p], enabled=self.cfg.zero_stage == 3):
                yield name, p.detach()

    def average_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """(Hugging Face name, full fp32 average), one at a time; every rank gets all of them."""
        for name, p in weight_names(self.policy):
            yield name, self.master.full(p, self.average)

    def save(self, folder: Path) -> None:
        """This rank's master weights, optimizer and average below `folder`; every rank calls it.

        policy.safetensors (working dtype) and average.safetensors (fp32) hold the full weights under Hugging Face names, for eval,
        export and serving. Raises OSError for what could not be written, after the last collective.
        """
        first, second, step = self.master.moments()
        flat = lambda shards: [shard.reshape(-1) for shard in shards]
        state = dict(zip(KINDS, (flat(self.master.shards()), first, second, flat(self.average)), strict=True))
        failures = [_failure(partial(write_shards, folder / f"shards-{self.ranks.rank}.safetensors", state, self.master.layout(), step))]
        files = [("policy", self.named_weights(), self.dtype), ("average", self.average_weights(), torch.float32)]
        if self.cfg.reference == "copy":
            files.append(("reference", self.reference.named_weights(), self.dtype))
        for name, weights, dtype in files:
            full = {}
            for n, w in weights:
                if self.ranks.rank == 0:
                    full[n] = w.to("cpu", dtype, copy=True).contiguous()
            if self.ranks.rank == 0:
                failures.append(_failure(partial(save_file, full, folder / f"{name}.safetensors", metadata={"format": "pt"})))
        if any(failures):
            raise OSError(next(filter(None, failures)))

    def load(self, folder: Path) -> int:
        """Restore what `save` wrote, under this engine's ranks and ZeRO stage; returns the rank count that wrote it."""
        master, average = ([shard.detach().reshape(-1) for shard in shards] for shards in (self.master.shards(), self.average))
        first, second = ([torch.zeros_like(shard) for shard in master] for _ in range(2))
        with ShardReader(folder) as reader:
            for kind, shards in zip(KINDS, (master, first, second, average), strict=True):
                for fragment in self.master.layout():
                    reader.read_into(shards[fragment.shard], kind, fragment)
            self.master.restore_moments(first, second, reader.step)
            ranks = reader.ranks
        self.master.restore_working_weights()
        if self.follows_average:
            self.refresh_reference()
        elif self.cfg.reference == "copy":
            self._load_reference(folder / "reference.safetensors")
        return ranks

    def _load_reference(self, file: Path) -> None:
        if not file.exists():
            raise ConfigError(f"--resume: {file.parent} holds no reference copy; it was written with learner.reference average")
        self.reference.take(iter(load_file(file).items()))

    def close(self) -> None:
        if self.reference:
            self.reference.close()
        self.engine.destroy()


def _failure(write: Callable[[], None]) -> str:
    """What went wrong in writing a file, empty when nothing did."""
    try:
        write()
    except (OSError, SafetensorError) as error:
        return f"{error}"
    return ""
