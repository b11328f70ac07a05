"""Named weights on their way from the learner to a sampler: what must arrive, and a fingerprint of what did."""

import re
from collections import defaultdict
from pathlib import Path
from typing import Iterable, Iterator, Mapping

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fastsched.types import EngineError

NamedTensors = Iterable[tuple[str, torch.Tensor]]

FINGERPRINT_TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 5e-3}


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


def layer_group(name: str) -> str:
    """'embedding', 'layer i attention', 'layer i mlp', 'final norm' or 'lm_head' for a parameter or module name."""
    layer = re.search(r"\.(?:layers|h|blocks)\.(\d+)\.(.+)", name)
    if layer:
        number, rest = layer.groups()
        before_mlp = rest.startswith(("mlp", "post_attention", "pre_feedforward", "post_feedforward"))
        return f"layer {number} {'mlp' if before_mlp else 'attention'}"
    if "lm_head" in name:
        return "lm_head"
    return "embedding" if "embed" in name or "wte" in name else "final norm"


def group_order(group: str) -> tuple[int, int]:
    if group.startswith("layer "):
        return int(group.split()[1]) + 1, int(group.endswith("mlp"))
    return {"embedding": (0, 0), "final norm": (1 << 30, 0)}.get(group, (1 << 30, 1))


def probe(width: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
    """[width] fixed signs: exact in every dtype."""
    signs = torch.randint(0, 2, (width,), generator=torch.Generator().manual_seed(width)) * 2 - 1
    return signs.to(device=device, dtype=dtype)


def energy(values: torch.Tensor) -> float:
    return values.double().square().sum().item()


@torch.no_grad()
def layer_fingerprints(named: NamedTensors, dtype: torch.dtype) -> dict[str, float]:
    """Sum of ||W r||^2 over the matrices W of a layer group (r: fixed signs) and of ||b||^2 over its vectors.

    Row order and the fusing of matrices along rows leave it unchanged, so that a sampler with fused and packed
    weights can form the same number by pushing r through its layers. `dtype` is the sampler's.
    """
    prints: dict[str, float] = defaultdict(float)
    for name, tensor in named:
        weight = tensor.detach().to(dtype).float()
        image = weight @ probe(weight.shape[1], weight.device, weight.dtype) if weight.ndim == 2 else weight
        prints[layer_group(name)] += energy(image)
        if name.endswith(("embed_tokens.weight", "wte.weight")):
            prints["tied head"] = energy(image)
    tied_head = prints.pop("tied head", None)
    if tied_head is not None:
        prints.setdefault("lm_head", tied_head)
    return dict(prints)


def first_difference(learner: Mapping[str, float], sampler: Mapping[str, float], dtype: torch.dtype) -> str | None:
    """The first layer group, in forward order, whose fingerprints differ by more than rounding in `dtype`."""
    for group in sorted(learner.keys() | sampler.keys(), key=group_order):
        ours, theirs = learner.get(group, 0.0), sampler.get(group, 0.0)
        if not abs(ours - theirs) <= FINGERPRINT_TOLERANCE[dtype] * max(ours, theirs):
            return group
    return None
