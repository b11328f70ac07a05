import ast
import json
import re

import numpy as np
import pytest
import reasoning_gym

from fastsched.config import ConfigError
from fastsched.data.tasks import Form, arithmetic_held_out, arithmetic_rows, mix64, reasoning_gym_rows


def parts(prompt):
    a, op, b = re.fullmatch(r"What is (\d+) ([-+*]) (\d+)\?", prompt).groups()
    return a, op, b


def test_hash_is_splitmix64():
    assert mix64(np.array([0]))[0] == 0xE220A8397B1DCDAF  # the first output of the published generator seeded with 0


def test_answers_are_right_and_operands_have_the_digits_of_their_bin():
    rows = arithmetic_rows(4000, (1, 3), Form("+-*"), seed=3)
    for prompt, answer, difficulty, index in zip(rows.prompt, rows.answer, rows.difficulty, rows.bin, strict=True):
        a, op, b = parts(prompt)
        assert int(answer) == {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}[op]
        assert len(a) == len(b) == difficulty == (1, 3)[index]
    assert any(answer.startswith("-") for answer in rows.answer)
    assert {parts(p)[0] for p, d in zip(rows.prompt, rows.difficulty, strict=True) if d == 1} == set("0123456789")
    assert json.loads(rows.meta[1]) == {"digits": 3}


def test_bins_have_equal_counts():
    assert np.bincount(arithmetic_rows(4002).bin).tolist() == [1001, 1001, 1000, 1000]


def test_rows_depend_on_the_seed_alone():
    first, again, other = (arithmetic_rows(500, seed=s).prompt for s in (7, 7, 8))
    assert first == again
    assert first != other


def test_operators_are_the_ones_asked_for():
    assert {parts(p)[1] for p in arithmetic_rows(500, form=Form("-")).prompt} == {"-"}
    assert {parts(p)[1] for p in arithmetic_rows(500, form=Form("+-")).prompt} == {"+", "-"}


def test_held_out_problems_never_occur_in_training():
    held = set(arithmetic_held_out(400, digits=(1, 2)).prompt)
    for seed in range(3):
        assert held.isdisjoint(arithmetic_rows(60_000, digits=(1, 2), seed=seed).prompt)


def test_training_and_held_out_cover_all_one_digit_problems():
    train, held = set(arithmetic_rows(20_000, digits=(1,)).prompt), set(arithmetic_held_out(200, digits=(1,)).prompt)
    assert len(held) == 62
    assert len(train | held) == 200


def test_held_out_problems_are_different_and_stay_the_same():
    rows = arithmetic_held_out(64)
    assert len(set(rows.prompt)) == len(rows.prompt)
    assert np.bincount(rows.bin).tolist() == [62, 64, 64, 64]
    assert arithmetic_held_out(10, digits=(4,)).prompt == rows.prompt[-64:-54]
    assert rows.prompt[-2:] == ["What is 3547 - 1792?", "What is 9246 + 1789?"]


@pytest.mark.parametrize("digits, operators, key", [
    ((), "+", "data.digits"), ((0,), "+", "data.digits"), ((1, 1), "+", "data.digits"), ((10,), "+", "data.digits"),
    ((1,), "", "data.operators"), ((1,), "/", "data.operators"), ((1,), "++", "data.operators"),
])
def test_impossible_settings_name_their_key(digits, operators, key):
    with pytest.raises(ConfigError, match=key):
        arithmetic_rows(10, digits, Form(operators))


# knights_knaves has NumPy strings in its entries, arc_agi tuples that its verifier compares, graph_color no answer text
@pytest.mark.parametrize("name", ["chain_sum", "knights_knaves", "arc_agi", "graph_color"])
def test_reasoning_gym_entries_come_back_whole(name):
    rows = reasoning_gym_rows(name, 2, seed=5)
    made = reasoning_gym.create_dataset(name, size=2, seed=5)
    for i in range(2):
        meta = json.loads(rows.meta[i])
        assert meta["task"] == name
        assert ast.literal_eval(meta["entry"]) == made[i]
        assert rows.prompt[i] == made[i]["question"]
        assert rows.answer[i] == (made[i]["answer"] or "")


def test_reasoning_gym_seed_and_size_count():
    assert reasoning_gym_rows("chain_sum", 3, 1).prompt != reasoning_gym_rows("chain_sum", 3, 2).prompt
    assert len(reasoning_gym_rows("chain_sum", 7, 1).prompt) == 7


def test_unknown_reasoning_gym_task_names_the_nearest():
    with pytest.raises(ConfigError, match="no task 'chain_sums'; the nearest are chain_sum"):
        reasoning_gym_rows("chain_sums", 1, 0)


def test_a_reasoning_gym_task_that_needs_settings_says_so():
    with pytest.raises(ConfigError, match="composite"):
        reasoning_gym_rows("composite", 1, 0)


def test_differences_are_negative_only_where_wanted():
    for rows in (arithmetic_rows(2000, form=Form(negative=False)), arithmetic_held_out(64, form=Form(negative=False))):
        assert all(int(a) >= 0 for a in rows.answer) and any("-" in p for p in rows.prompt)
    assert any(int(a) < 0 for a in arithmetic_rows(2000).answer)
    train = set(arithmetic_rows(20_000, digits=(1,), form=Form(negative=False)).prompt)
    assert train.isdisjoint(arithmetic_held_out(200, digits=(1,), form=Form(negative=False)).prompt)


def test_operators_occur_as_often_as_weighted():
    form = Form("+-*", (2.0, 1.0, 1.0))
    for rows in (arithmetic_rows(8000, (2, 3), form), arithmetic_held_out(1000, (3,), form)):
        found = [parts(prompt)[1] for prompt in rows.prompt]
        assert [found.count(op) / len(found) for op in "+-*"] == pytest.approx([0.5, 0.25, 0.25], abs=0.04)
