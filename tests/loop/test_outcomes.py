"""What the reward workers are told of a response."""

import numpy as np
import pytest
from transformers import AddedToken

from fastsched.config import RewardConfig
from fastsched.data.rewards import RewardResult
from fastsched.data.scorers import Seen
from fastsched.engines.models.loading import load_tokenizer
from fastsched.loop.outcomes import Scorer
from fastsched.types import Prompt, Response

PROMPT = Prompt(0, (5, 6), "2 + 3?", "5", 0, {"level": 1}, prefill="2 + 3 = ")


class Listens:
    """A pool that keeps what it is asked to score."""

    def score(self, items):
        self.items = items
        return RewardResult(np.zeros(len(items)), {}, {}, np.zeros(len(items), bool))


def of(token_ids, reason="stop"):
    return Response(0, (5, 6), tuple(token_ids), np.zeros(len(token_ids), np.float32), reason, 0)


@pytest.fixture
def item(parts, log):
    """What the pool is asked about one response to `PROMPT`."""

    def asked(text, tokenizer=parts.tokenizer, reason="stop", **options):
        pool = Listens()
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        Scorer(tokenizer, pool, log, RewardConfig(**options)).score([PROMPT], [of(ids, reason)])
        return pool.items[0]

    return asked


@pytest.mark.parametrize("prefill, text", [(False, "5"), (True, "2 + 3 = 5")])
def test_the_reward_reads_the_prefill_where_it_is_told_to(item, prefill, text):
    assert item("5", prefill=prefill).text == text


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_length_finish_reason_and_prefill_are_told(item, reason):
    found = item("5", reason=reason)
    assert found.seen == Seen("2 + 3 = ", reason, 1) and (found.answer, found.meta) == ("5", {"level": 1})


@pytest.fixture
def tagged(random_model, parts):
    """A tokenizer whose tags are special tokens."""
    tokenizer = load_tokenizer(random_model, parts.cfg.model)
    special = [AddedToken(text, special=True) for text in ("<answer>", "</answer>", "<think>")]
    tokenizer.add_special_tokens({"additional_special_tokens": special})
    return tokenizer


def test_tags_that_are_special_tokens_stay_where_the_reward_needs_them(item, tagged):
    end = tagged.eos_token
    assert item(f"<think><answer>5</answer>{end}", tagged).text == "<answer>5</answer>"
    assert item(f"<think><answer>5</answer>{end}", tagged, keep_tokens=("<think>",)).text == "<think>5"
    assert item(f"<think><answer>5</answer>{end}", tagged, keep_tokens=()).text == "5"


def test_a_tokenizer_without_such_tags_is_read_as_ever(item, parts):
    assert item(f"5{parts.tokenizer.eos_token}").text == "5"
