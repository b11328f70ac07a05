"""The warm-started policies that the package brings, so that every machine trains and compares the same ones.

`python -m bench.learning.policies` makes them anew, with their tokenizer, and prints the lines of the table below.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load, save_file
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

from fastsched.config import ConfigError
from fastsched.engines.models import tiny

FOLDER = Path(__file__).with_name("policies")


class Policy(NamedTuple):
    """Weights in float16, what they were warmed up on, and the SHA-256 of their file."""

    file: str
    recipe: str
    sha256: str


POLICIES = (
    Policy("arithmetic.safetensors", "e94dd97b20a166a0", "7c1eb39a699652c6139d22602e4e8086b13edd2881d0d3bf2f97d3eacb8fa971"),
    Policy("chain.safetensors", "1456ab2a95391730", "99e6ee88f7541a33bece26e91b651750fc6634c8384cf32d18036ddabb4ebe19"),
)
TOKENIZER = ("tokenizer.json", "5c8164afd6497f2913cfa03486f05e0b8924020e40d256d7068a93e4fd076d21")


def recipe_hash(rows: Sequence[tiny.WarmStartRow], accuracy: float) -> str:
    """What a policy is found by: rows and accuracy of its warm start, not the code that trains or the machine."""
    return hashlib.sha256(json.dumps([list(rows), accuracy]).encode()).hexdigest()[:16]


def shipped(rows: Sequence[tiny.WarmStartRow], accuracy: float) -> Policy | None:
    """The policy of this warm start, None where the package has none. ConfigError for a file that is not the one it was."""
    wanted = recipe_hash(rows, accuracy)
    found = next((policy for policy in POLICIES if policy.recipe == wanted), None)
    if found:
        checked(found.file, found.sha256)
        checked(*TOKENIZER)
    return found


def checked(file: str, sha256: str) -> bytes:
    """The content of a shipped file. ConfigError naming it where it is missing or its SHA-256 is another."""
    path = FOLDER / file
    content = path.read_bytes() if path.is_file() else b""
    if hashlib.sha256(content).hexdigest() != sha256:
        raise ConfigError(f"model.name: {path} of the package is missing or damaged (its SHA-256 is not {sha256}); install fastsched again")
    return content


def unpack(policy: Policy, path: Path) -> None:
    """Writes the model folder: weights in float32, configuration, tokenizer, generation_config."""
    model = Qwen3ForCausalLM(tiny.tiny_config())
    weights = {name: weight.float() for name, weight in load(checked(policy.file, policy.sha256)).items()}
    model.load_state_dict(weights, strict=False)  # the tied head is not in the file
    tiny.save(model, tiny.in_chat_form(Tokenizer.from_str(checked(*TOKENIZER).decode())), path)


def pack(model: Qwen3ForCausalLM, path: Path) -> None:
    """Writes weights as they are shipped: 11 bits of every weight, 0.9 MB."""
    weights = {name: weight.detach().to(torch.float16).contiguous() for name, weight in model.named_parameters()}
    save_file(weights, path, metadata={"format": "pt"})
