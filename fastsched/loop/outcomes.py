"""Responses -> rewards: decoding, the reward workers, and the outcomes of all ranks in the order of the selection."""

import functools
from dataclasses import dataclass
from typing import Mapping, NamedTuple, Sequence

import numpy as np

from fastsched.config import RewardConfig
from fastsched.data.reward_worker import RewardItem
from fastsched.data.rewards import RewardPool
from fastsched.data.scorers import Seen
from fastsched.record.log import RunLog
from fastsched.types import Outcomes, Prompt, Ranks, Response, Selection


class Scores(NamedTuple):
    """Of n responses, in their order."""

    rewards: np.ndarray  # [n] float64, NaN where scoring failed
    texts: list[str]
    errors: dict[str, int]  # failures by kind
    unreadable: np.ndarray  # [n] bool, scored 0
    parts: Mapping[str, np.ndarray]  # [n] float64 by name, where several rewards are added up


@dataclass(frozen=True)
class Scorer:
    """Decodes responses and has the reward workers score them; the log hears of each kind of failure once."""

    tokenizer: object
    pool: RewardPool
    log: RunLog
    cfg: RewardConfig = RewardConfig()

    @property
    def failure(self) -> str:
        """Kind and message of the last failure, for a guard's message."""
        return self.pool.failure

    @functools.cached_property
    def _left_out(self) -> frozenset[int] | None:
        """Special tokens without `reward.keep_tokens`, which are no part of the text; None where these are all special tokens."""
        special = {token_id: token.content for token_id, token in self.tokenizer.added_tokens_decoder.items() if token.special}
        left_out = frozenset(token_id for token_id, text in special.items() if text not in self.cfg.keep_tokens)
        return None if len(left_out) == len(special) else left_out

    def texts(self, responses: Sequence[Response]) -> list[str]:
        if not responses:
            return []
        if self._left_out is None:
            return self.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True)
        ids = [[token_id for token_id in r.token_ids if token_id not in self._left_out] for r in responses]
        return self.tokenizer.batch_decode(ids, skip_special_tokens=False)

    def score(self, prompts: Sequence[Prompt], responses: Sequence[Response]) -> Scores:
        """`prompts` are those of each response [n]."""
        texts = self.texts(responses)
        result = self.pool.score([self._item(*of_one) for of_one in zip(texts, prompts, responses, strict=True)])
        for kind, message in result.messages.items():
            what = "unreadable, which counts as wrong" if kind == "unreadable" else f"reward failed ({kind}), its response is left out"
            self.log.note_once(f"WARNING: {what}: {message}", key=f"reward failed ({kind})")
        return Scores(np.asarray(result.rewards, np.float64), texts, dict(result.errors), result.unreadable, result.parts)

    def _item(self, text: str, prompt: Prompt, response: Response) -> RewardItem:
        seen = Seen(prompt.prefill, response.finish_reason, len(response.token_ids))
        return RewardItem(prompt.prefill + text if self.cfg.prefill else text, prompt.text, prompt.answer, prompt.meta, seen)


def gather_outcomes(ranks: Ranks, selection: Selection, group: int, responses: Sequence[Response],
                    scores: Scores) -> tuple[np.ndarray, Outcomes]:
    """(this rank's rewards [P, G], outcomes of all ranks in the order of `selection`) from those of this rank's responses [n].

    A prompt has `group` responses where the selection does not say how many. G is the largest number of responses of any prompt; what
    was not sampled has reward NaN and length 0.
    """
    prompts = len(selection.rows)
    counts = np.full(prompts, group) if selection.responses is None else selection.responses
    place = np.arange(counts.max()) < counts[ranks.rank::ranks.world_size, None]
    lengths, cut = [len(r.token_ids) for r in responses], [r.finish_reason == "length" for r in responses]
    local = [_placed(place, values, empty) for values, empty in (
        (scores.rewards, np.nan), (lengths, 0), (cut, False), (scores.unreadable, False), *((v, np.nan) for v in scores.parts.values()))]
    merged = [np.empty((prompts, values.shape[1]), values.dtype) for values in local]
    for rank, part in enumerate(ranks.all_gather(local)):
        for whole, values in zip(merged, part, strict=True):
            whole[rank::ranks.world_size] = values
    *seen, unreadable = merged[:4]
    return local[0], Outcomes(selection.rows, selection.bins, *seen, unreadable=unreadable,
                              parts=dict(zip(scores.parts, merged[4:], strict=True)))


def _placed(place: np.ndarray, values: Sequence | np.ndarray, empty: float | int | bool) -> np.ndarray:
    """[P, G] of one value for each response, `empty` where there is no response."""
    whole = np.full(place.shape, empty)
    whole[place] = values
    return whole


def join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    """One after another; narrower ones are widened by responses that were not sampled."""
    width = max(part.rewards.shape[1] for part in parts)
    widen = lambda values, empty: np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=empty)
    continued = [np.zeros(len(p.rows), bool) if p.continued is None else p.continued for p in parts]
    unreadable = [np.zeros(p.lengths.shape, bool) if p.unreadable is None else p.unreadable for p in parts]
    joined = lambda values, empty: np.concatenate([widen(v, empty) for v in values])
    return Outcomes(np.concatenate([p.rows for p in parts]), np.concatenate([p.bins for p in parts]),
                    joined([p.rewards for p in parts], np.nan), joined([p.lengths for p in parts], 0),
                    joined([p.truncated for p in parts], False),
                    None if all(p.continued is None for p in parts) else np.concatenate(continued), joined(unreadable, False),
                    {name: joined([p.parts[name] for p in parts], np.nan) for name in parts[0].parts})
