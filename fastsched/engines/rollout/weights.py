"""Named weights on their way from the learner to a sampler: what must arrive."""

from pathlib import Path
from typing import Iterator, Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastsched.engines.rollout.fingerprints import NamedTensors
from fastsched.types import EngineError


class SyncError(EngineError):
    """The sampler does not hold the learner's weights."""


def expected_shapes(model_path: str | Path, trust_remote_code: bool = False) -> dict[str, tuple[int, ...]]:
    """Shape of every trainable tensor of the checkpoint, by Hugging Face name; a tied head is not listed."""
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}


def checked(named: NamedTensors, shapes: Mapping[str, tuple[int, ...]],
            dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    """Pass (name, copy in `dtype`) through; SyncError at an unknown name or wrong shape, at the end if one is missing.

    The copy makes a gathered ZeRO-3 parameter free to go as soon as the next one is asked for.
    """
    missing = set(shapes)
    for name, tensor in named:
        if name == "lm_head.weight" and name not in shapes:
            continue  # tied: the embedding carries it
        if name not in shapes:
            raise SyncError(f"weight sync: the sampler's model has no parameter {name!r}")
        if tuple(tensor.shape) != shapes[name]:
            raise SyncError(f"weight sync: {name} has shape {tuple(tensor.shape)}, the sampler expects {shapes[name]}")
        missing.discard(name)
        yield name, tensor.detach().to(dtype, copy=True)
    if missing:
        raise SyncError(f"weight sync: {len(missing)} of {len(shapes)} parameters never came, first {min(missing)!r}")
