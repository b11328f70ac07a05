"""Packed rows must give what each sequence gives alone. Tried on the model itself, so that no list of architectures has to be right."""

from typing import NamedTuple, Sequence

import numpy as np
import torch
from torch import nn

from fastsched.config import ConfigError
from fastsched.engines.learner.policy import Policy
from fastsched.types import MicroBatch

PROMPT, RESPONSE = 5, 4
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
"""Of |packed - alone| / |alone|, the hidden states of one token: far above rounding, far below what a wrong position or state does."""


class Piece(NamedTuple):
    """Consecutive tokens of a row, at positions first, first + 1, ..."""

    ids: np.ndarray
    first: int
    group: int
    response: int


@torch.no_grad()
def require_packable_model(model: nn.Module, longest: int, share_prompts: bool, key: str = "model.name") -> None:
    """ConfigError, naming `key`, for a model whose hidden states of a sequence change with what else is in its row.

    The row holds a sequence at the first positions, with `share_prompts` a second response after the first, and a sequence that ends at
    position `longest` - 1: positions that depend on the longest sequence around (dynamic or long RoPE beyond the original length), on
    the place in the row (ALiBi) and states that run through it (recurrent and convolution layers) all show. Computed with sdpa,
    whatever model.attention is: what is asked here is the model's own, and that runs everywhere.
    """
    attention = model.config._attn_implementation
    try:
        model.set_attn_implementation("sdpa")
        worst = _largest_difference(Policy(model), _sequences(model, longest, share_prompts))
    except (RuntimeError, ValueError, TypeError, IndexError, KeyError, AttributeError, NotImplementedError) as error:
        raise ConfigError(f"{key}: {model.config.model_type} does not run on packed rows, which the learner trains on "
                          f"({type(error).__name__}: {' '.join(str(error).split())[:200]}); use a model with causal attention that "
                          "takes position_ids and a mask for every pair of tokens") from error
    finally:
        model.set_attn_implementation(attention)
    if not worst <= TOLERANCE[model.dtype]:
        shared = ", or set learner.share_prompts false if the positions are ALiBi's" if share_prompts else ""
        raise ConfigError(f"{key}: {model.config.model_type} computes other hidden states for a sequence in a packed row than alone (by "
                          f"{worst:.0%}): its positions depend on the length or the place of what is around them (dynamic or long RoPE, "
                          f"ALiBi), or states run from token to token (recurrent layers); use another model{shared}, or keep "
                          "data.max_prompt_tokens + rollout.max_new_tokens within the length that its positions were made for")


def _sequences(model: nn.Module, longest: int, share_prompts: bool) -> list[list[Piece]]:
    """Each as its pieces: prompt and response."""
    draw = lambda n: np.random.default_rng(n).integers(0, model.config.get_text_config().vocab_size, n)
    near, far = draw(PROMPT), max(longest - PROMPT - RESPONSE, 0)
    sequences = [[Piece(near, 0, 0, 0), Piece(draw(RESPONSE), PROMPT, 0, 1)]]
    if share_prompts:
        sequences.append([sequences[0][0], Piece(draw(RESPONSE - 1), PROMPT, 0, 2)])
    return [*sequences, [Piece(draw(PROMPT + 1)[1:], far, 1, 0), Piece(draw(RESPONSE + 3)[3:], far + PROMPT, 1, 1)]]


def _largest_difference(policy: Policy, sequences: Sequence[list[Piece]]) -> float:
    """max |packed - alone| / |alone| over tokens; NaN where hidden states are not finite."""
    pieces = list({(piece.group, piece.response): piece for sequence in sequences for piece in sequence}.values())
    near, *others = ([*sequence] for sequence in sequences)
    alone = [_hidden(policy, near)]  # first, while nothing longer has been seen
    packed = _hidden(policy, pieces)
    alone += [_hidden(policy, sequence) for sequence in others]
    differences = []
    for sequence, states in zip(sequences, alone, strict=True):
        for piece in sequence:
            a, b = states[piece.group, piece.response], packed[piece.group, piece.response]
            differences.append(((a - b).norm(dim=-1) / a.norm(dim=-1)).max())
    return float(torch.stack(differences).max())


def _hidden(policy: Policy, pieces: Sequence[Piece]) -> dict[tuple[int, int], torch.Tensor]:
    """Hidden states [n, H], fp32, of every piece of one row, by group and response."""
    row = lambda values: np.concatenate(values)[None].astype(np.int64)
    sizes = [len(piece.ids) for piece in pieces]
    count = sum(sizes)
    index, number = np.zeros(count, np.int64), np.ones(count, np.float32)
    micro = MicroBatch(row([p.ids for p in pieces]), row([p.first + np.arange(len(p.ids)) for p in pieces]),
                       row([np.full(len(p.ids), p.group) for p in pieces]), row([np.full(len(p.ids), p.response) for p in pieces]),
                       np.arange(count), index, number, number, number, index, index, index, 1)
    states = policy(micro, lambda head: head.hidden).float().split(sizes)
    return {(p.group, p.response): h for p, h in zip(pieces, states, strict=True)}
