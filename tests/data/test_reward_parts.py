"""Several rewards of one response: their weighted sum, each of them by itself, and what a failure of one of them costs."""

import math

import pytest

from fastsched.config import RewardConfig, RewardPart
from fastsched.data.rewards import RewardItem, RewardPool
from fastsched.data.scorers import Seen

MINE = '''
def short(prompt, response, answer, meta, tokens, finish_reason):
    if response == "raise 12":
        raise ValueError("bad value")
    while response == "hang 12":
        pass
    return (10 - tokens) / 10 - (finish_reason == "length")
'''


@pytest.fixture
def score(tmp_path, monkeypatch):
    """The result of (response, tokens, finish reason) for the answer 12, under `exact_number` and the parts given."""
    (tmp_path / "mine.py").write_text(MINE)
    monkeypatch.chdir(tmp_path)

    def of(extra, *responses, **options):
        with RewardPool(RewardConfig(extra=tuple(extra), **options), "arithmetic") as pool:
            return pool.score([RewardItem(text, "", "12", {}, Seen("", reason, tokens)) for text, tokens, reason in responses])

    return of


SHORT = RewardPart("mine:short", 0.5)
SAID = [("12", 2, "stop"), ("13", 4, "stop"), ("= 12", 10, "length")]


def test_the_reward_is_the_weighted_sum_and_each_part_is_kept(score):
    found = score([SHORT], *SAID)
    assert found.rewards == pytest.approx([1.4, 0.3, 0.5])
    assert found.parts["exact_number"].tolist() == [1.0, 0.0, 1.0]
    assert found.parts["short"] == pytest.approx([0.8, 0.6, -1.0])


@pytest.mark.parametrize("weight, rewards", [(0.0, [1.0, 0.0, 1.0]), (-1.0, [0.2, -0.6, 2.0])])
def test_a_weight_may_be_nothing_or_negative(score, weight, rewards):
    found = score([RewardPart("mine:short", weight, "brevity")], *SAID)
    assert found.rewards == pytest.approx(rewards) and set(found.parts) == {"exact_number", "brevity"}


def test_each_part_has_a_form_of_its_own(score):
    found = score([RewardPart("exact_number", 1.0, "in_a_box", "boxed")], ("12", 1, "stop"), ("\\boxed{12}", 1, "stop"))
    assert found.rewards.tolist() == [1.0, 2.0] and found.parts["in_a_box"].tolist() == [0.0, 1.0]


def test_a_part_that_fails_costs_the_response_and_is_named(score):
    found = score([SHORT], ("raise 12", 1, "stop"), ("hang 12", 1, "stop"), ("12", 0, "stop"), timeout_s=2.0)
    assert [math.isnan(r) for r in found.rewards] == [True, True, False] and found.rewards[2] == 1.5
    assert found.errors == {"raised": 1, "timeout": 1} and "short: ValueError: bad value" in found.messages["raised"]
    assert found.parts["exact_number"][0] == 1.0 and math.isnan(found.parts["short"][0])
    assert math.isnan(found.parts["exact_number"][1])


def test_an_unreadable_part_is_wrong_and_the_others_count(score):
    found = score([RewardPart("math_verify", 2.0)], ("\\boxed{12}", 1, "stop"), (f"\\boxed{{{'9' * 5000}}}", 1, "stop"))
    assert found.rewards[0] == 3.0 and found.rewards[1] == 0.0 and found.errors == {}


def test_a_sum_that_fp32_cannot_hold_is_no_number(score, tmp_path):
    (tmp_path / "huge.py").write_text("def huge(response, **rest):\n    return 1e29\n")
    found = score([RewardPart("huge:huge", 100.0)], ("12", 1, "stop"))
    assert found.errors == {"nonfinite": 1} and "add up to 1e+31" in found.messages["nonfinite"]


def test_one_reward_has_no_parts(score):
    assert score([], *SAID).parts == {}
