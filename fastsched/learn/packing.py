"""Responses -> packed micro-batches under a token budget.

P prompts, G responses a prompt, L response tokens, [B, W] packed tokens, R trained tokens.
"""

from dataclasses import dataclass, replace
from typing import Sequence

import numpy as np

from fastsched.config import ConfigError
from fastsched.types import COMMON, MicroBatch

COMMON_SHARE = 8  # a row is at least this many times as long as the beginning that its prompts have in common


@dataclass(frozen=True)
class Sample:
    """One response with what the loss needs of it."""

    group: int  # index of its prompt in the batch
    prompt_ids: Sequence[int]
    token_ids: Sequence[int]  # [L]
    sampler_logp: np.ndarray  # [L] float32
    advantage: float | np.ndarray  # of every token, or [L]
    keep: np.ndarray  # [L] bool, tokens that carry loss
    weight: float  # of each kept token: one over the global denominator
    old_logp: np.ndarray | None = None  # [L] float32, for all samples or none
    kl_scale: np.ndarray | None = None  # [L] float32, for all samples or none
    bin: int = -1  # difficulty bin of the prompt

    @property
    def flat(self) -> bool:
        """It has no advantage."""
        return not np.any(self.advantage)


def pack(samples: Sequence[Sample], *, token_budget: int, share_prompts: bool, row_width: int | None = None) -> list[MicroBatch]:
    """Micro-batches of at most `token_budget` tokens, padding included; longest first, first fit.

    With `share_prompts` the responses of a group stand behind one copy of its prompt, and the groups of a row behind one copy of
    what all prompts begin with (system prompt, examples). `row_width` is the width of a packed row; by default that of the
    longest item, which keeps the quadratic attention of a padded row small, but wide enough for a common beginning to pay.
    Raises ConfigError when one item alone exceeds the budget.
    """
    items = _items(samples, share_prompts)
    common = _common_beginning(samples) if share_prompts and len(items) > 1 else 0
    lengths = [_item_length(samples, item) - common for item in items]
    longest = common + max(lengths, default=0)
    if longest > token_budget:
        raise ConfigError(
            f"learner.micro_batch_tokens: {token_budget} is less than the {longest} tokens of one packed "
            f"{'group (prompt and its responses)' if share_prompts else 'response with its prompt'}; raise it to at least {longest}"
        )
    bins = _first_fit(lengths, (row_width or max(longest, min(COMMON_SHARE * common, token_budget))) - common)
    micro_batches, start = [], 0
    while start < len(bins):
        width = common + sum(lengths[i] for i in bins[start])
        stop = min(len(bins), start + max(1, token_budget // max(width, 1)))
        micro_batches.append(_fill(samples, [[items[i] for i in b] for b in bins[start:stop]], width, common))
        start = stop
    return micro_batches


def packed_tokens(group: Sequence[Sample], share_prompts: bool) -> int:
    """Tokens that the responses of one prompt take in packed rows, what all prompts begin with counted for each prompt."""
    return sum(_item_length(group, item) for item in _items(group, share_prompts))


def dummy(micro: MicroBatch) -> MicroBatch:
    """The same shapes with no weight: evens out the micro-batch count between ranks."""
    return replace(micro, token_weights=np.zeros_like(micro.token_weights), groups=(), bin=-1)


def blank() -> MicroBatch:
    """For a rank without a single trained response: one padding token, no loss."""
    zero, none = np.zeros((1, 1), np.int64), np.zeros(1, np.float32)
    index = np.zeros(1, np.int64)
    return MicroBatch(zero, zero, zero, zero, index, index, none, none, none, index, index, index, ())


def _items(samples: Sequence[Sample], share_prompts: bool) -> list[list[int]]:
    if not share_prompts:
        return [[i] for i in range(len(samples))]
    groups: dict[int, list[int]] = {}
    for i, sample in enumerate(samples):
        groups.setdefault(sample.group, []).append(i)
    return list(groups.values())


def _common_beginning(samples: Sequence[Sample]) -> int:
    """How many tokens all prompts begin with; at least the last token of each prompt stays its own."""
    first, *others = {id(s.prompt_ids): s.prompt_ids for s in samples}.values()
    common = len(first) - 1
    for prompt in others:
        common = min(common, len(prompt) - 1)
        common = next((i for i in range(common) if prompt[i] != first[i]), common)
    return common


def _item_length(samples: Sequence[Sample], item: list[int]) -> int:
    return len(samples[item[0]].prompt_ids) + sum(_fed(samples[i]) for i in item)


def _fed(sample: Sample) -> int:
    """Tokens that stand in the row: of a response all but the last, of an empty one none."""
    return max(len(sample.token_ids) - 1, 0)


def _first_fit(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Item indices by row, rows in order of falling fill."""
    rows: list[list[int]] = []
    space: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        row = next((r for r, free in enumerate(space) if free >= lengths[i]), None)
        if row is None:
            rows.append([])
            space.append(capacity)
            row = len(rows) - 1
        rows[row].append(i)
        space[row] -= lengths[i]
    return sorted(rows, key=lambda row: -sum(lengths[i] for i in row))


def _fill(samples: Sequence[Sample], rows: list[list[list[int]]], width: int, common: int) -> MicroBatch:
    shape = (len(rows), width)
    tokens, positions = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    groups, responses = np.full(shape, -1, np.int64), np.zeros(shape, np.int64)
    trained: list[tuple[np.ndarray, Sample, int, np.ndarray]] = []
    for b, row in enumerate(rows):
        end = common
        tokens[b, :common], positions[b, :common] = samples[row[0][0]].prompt_ids[:common], np.arange(common)
        groups[b, :common] = COMMON
        for number, item in enumerate(row):
            prompt = samples[item[0]].prompt_ids
            start, end = end, end + len(prompt) - common
            tokens[b, start:end], positions[b, start:end] = prompt[common:], np.arange(common, len(prompt))
            groups[b, start:end], last_prompt = number, b * width + end - 1
            for k, i in enumerate(item, start=1):
                sample, fed = samples[i], _fed(samples[i])
                at = slice(end, end + fed)
                tokens[b, at], positions[b, at] = sample.token_ids[:-1], len(prompt) + np.arange(fed)
                groups[b, at], responses[b, at] = number, k
                source = np.concatenate([[last_prompt], b * width + np.arange(end, end + fed)])
                trained.append((source, sample, i, np.flatnonzero(sample.keep)))
                end += fed
    bins = {sample.bin for _, sample, _, _ in trained}
    return MicroBatch(tokens, positions, groups, responses, **_trained_tokens(trained),
                      groups=tuple(sorted({sample.group for _, sample, _, keep in trained if len(keep)})),
                      bin=bins.pop() if len(bins) == 1 else -1)


def _trained_tokens(trained: list[tuple[np.ndarray, Sample, int, np.ndarray]]) -> dict[str, np.ndarray]:
    def gather(per_response, dtype):
        return np.concatenate([np.asarray(per_response(*entry), dtype) for entry in trained] or [np.zeros(0, dtype)])

    def optional(name):
        absent = all(getattr(s, name) is None for _, s, _, _ in trained)
        return None if absent else gather(lambda source, s, i, keep: getattr(s, name)[keep], np.float32)

    return dict(
        rows=gather(lambda source, s, i, keep: source[keep], np.int64),
        targets=gather(lambda source, s, i, keep: np.asarray(s.token_ids)[keep], np.int64),
        advantages=gather(lambda source, s, i, keep: np.broadcast_to(s.advantage, len(s.keep))[keep], np.float32),
        token_weights=gather(lambda source, s, i, keep: np.full(len(keep), s.weight), np.float32),
        sampler_logp=gather(lambda source, s, i, keep: s.sampler_logp[keep], np.float32),
        responses=gather(lambda source, s, i, keep: np.full(len(keep), i), np.int64),
        offsets=gather(lambda source, s, i, keep: keep, np.int64),
        deciles=gather(lambda source, s, i, keep: keep * 10 // len(s.keep), np.int64),
        old_logp=optional("old_logp"), kl_scale=optional("kl_scale"),
    )
