"""Responses -> rewards: decoding, the reward workers, and the outcomes of all ranks in the order of the selection."""

from dataclasses import dataclass
from typing import NamedTuple, Sequence

import numpy as np

from fastsched.data.rewards import RewardItem, RewardPool
from fastsched.record.log import RunLog
from fastsched.types import Outcomes, Prompt, Ranks, Response, Selection


class Scores(NamedTuple):
    """Of n responses, in their order."""

    rewards: np.ndarray  # [n] float64, NaN where scoring failed
    texts: list[str]
    errors: dict[str, int]  # failures by kind
    unreadable: np.ndarray  # [n] bool, scored 0


@dataclass(frozen=True)
class Scorer:
    """Decodes responses and has the reward workers score them; the log hears of each kind of failure once."""

    tokenizer: object
    pool: RewardPool
    log: RunLog

    @property
    def failure(self) -> str:
        """Kind and message of the last failure, for a guard's message."""
        return self.pool.failure

    def texts(self, responses: Sequence[Response]) -> list[str]:
        return self.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True) if responses else []

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> Scores:
        """`prompts` are those of each response [n]."""
        texts = self.texts(responses)
        result = self.pool.score([RewardItem(text, p.text, p.answer, p.meta) for text, p in zip(texts, prompts, strict=True)])
        for kind, message in result.messages.items():
            what = "unreadable, which counts as wrong" if kind == "unreadable" else f"reward failed ({kind}), its response is left out"
            self.log.note_once(f"WARNING: {what}: {message}", key=f"reward failed ({kind})")
        return Scores(np.asarray(result.rewards, np.float64), texts, dict(result.errors), result.unreadable)


def gather_outcomes(ranks: Ranks, selection: Selection, group: int, responses: Sequence[Response], rewards: np.ndarray,
                    unreadable: np.ndarray) -> tuple[np.ndarray, Outcomes]:
    """(this rank's rewards [P, G], outcomes of all ranks in the order of `selection`) from those of this rank's responses [n].

    A prompt has `group` responses where the selection does not say how many. G is the largest number of responses of any prompt; what
    was not sampled has reward NaN and length 0.
    """
    prompts = len(selection.rows)
    counts = np.full(prompts, group) if selection.responses is None else selection.responses
    place = np.arange(counts.max()) < counts[ranks.rank::ranks.world_size, None]
    local = [np.full(place.shape, empty) for empty in (np.nan, 0, False, False)]
    local[0][place], local[1][place] = rewards, [len(r.token_ids) for r in responses]
    local[2][place], local[3][place] = [r.finish_reason == "length" for r in responses], unreadable
    merged = [np.empty((prompts, values.shape[1]), values.dtype) for values in local]
    for rank, part in enumerate(ranks.all_gather(local)):
        for whole, values in zip(merged, part, strict=True):
            whole[rank::ranks.world_size] = values
    *seen, bad = merged
    return local[0], Outcomes(selection.rows, selection.bins, *seen, unreadable=bad)


def join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    """One after another; narrower ones are widened by responses that were not sampled."""
    width = max(part.rewards.shape[1] for part in parts)
    widen = lambda values, empty: np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=empty)
    continued = [np.zeros(len(p.rows), bool) if p.continued is None else p.continued for p in parts]
    unreadable = [np.zeros(p.lengths.shape, bool) if p.unreadable is None else p.unreadable for p in parts]
    return Outcomes(np.concatenate([p.rows for p in parts]), np.concatenate([p.bins for p in parts]),
                    np.concatenate([widen(p.rewards, np.nan) for p in parts]), np.concatenate([widen(p.lengths, 0) for p in parts]),
                    np.concatenate([widen(p.truncated, False) for p in parts]),
                    None if all(p.continued is None for p in parts) else np.concatenate(continued),
                    np.concatenate([widen(values, False) for values in unreadable]))
