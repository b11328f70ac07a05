import json
import re

import numpy as np
import pytest

from fastsched.config import ConfigError, DataConfig
from fastsched.data.chain import chain_held_out, chain_problems, chain_rows, chain_text
from fastsched.data.scorers import exact_number
from fastsched.data.tasks import Form
from fastsched.engines.models.tiny import tiny_tokenizer

STEPS = (5, 6, 8, 9)


def operands(problem):
    return [int(x) for x in problem.split()[::2]], problem.split()[1::2]


def test_a_problem_in_words():
    assert chain_text([3, ord("+"), 5, ord("-"), 2, ord("-"), 9]) == ("3 + 5 - 2 - 9", "3+5=8;8-2=6;6-9=-3;#-3")


def test_every_step_follows_from_the_one_before():
    rows = chain_rows(400, STEPS, Form(negative=False), seed=3)
    for prompt, problem, answer, difficulty, index in zip(rows.prompt, rows.problem, rows.answer, rows.difficulty, rows.bin, strict=True):
        assert prompt == f"Work out {problem} step by step."
        numbers, operators = operands(problem)
        *worked, final = answer.split(";")
        assert len(worked) == len(operators) == difficulty == STEPS[index]
        total = numbers[0]
        for step, operator, number in zip(worked, operators, numbers[1:], strict=True):
            a, op, b, c = re.fullmatch(r"(\d+)([-+])(\d+)=(\d+)", step).groups()
            assert (int(a), op, int(b)) == (total, operator, number)
            total = total + number if operator == "+" else total - number
            assert int(c) == total >= 0
        assert final == f"#{total}" and total == eval(problem)
    assert json.loads(rows.meta[1]) == {"steps": 6}


def test_only_the_result_is_graded():
    worked = "3+5=8;8-2=6;#6"
    for response, reward in (("3+5=8;8-2=6;#6", 1), ("3+5=9;9-2=5;#6", 1), ("#6", 1), ("3+5=8;8-2=6;#7", 0), ("3+5=8;8-2=", 0),
                             ("3+5=6;6-2=4", 0)):
        assert exact_number("", response, worked, {}) == reward, response
    assert exact_number("", "2-5=-3;#-3", "2-5=-3;#-3", {}) == 1 and exact_number("", "2-5=-3;#3", "2-5=-3;#-3", {}) == 0


def test_responses_have_30_to_80_tokens_of_the_tiny_model():
    tokenizer, rows = tiny_tokenizer(), chain_rows(2000, DataConfig().chain_steps, Form(negative=False))
    lengths = np.array([len(ids) for ids in tokenizer([answer + tokenizer.eos_token for answer in rows.answer]).input_ids])
    assert 30 <= lengths.min() and lengths.max() <= 80
    means = [lengths[rows.bin == b].mean() for b in range(4)]
    assert means == sorted(means) and means[-1] > 1.5 * means[0]


def test_training_and_held_out_have_no_problem_in_common():
    held = chain_held_out(3000, (2,), Form())
    assert len(set(held.prompt)) == len(held.prompt) > 100
    for seed in range(2):
        train = set(chain_rows(60_000, (2,), Form(), seed).prompt)
        assert train.isdisjoint(held.prompt)
    assert len(train) + len(held.prompt) == 9**3 * 4  # two steps: every problem is in one of the two
    assert chain_held_out(5, STEPS).prompt == [p for b in range(4) for p in chain_held_out(9, STEPS).prompt[9 * b:9 * b + 5]]


def test_rows_follow_seed_operators_weights_and_sign():
    assert chain_rows(20, STEPS, seed=1).prompt == chain_rows(20, STEPS, seed=1).prompt != chain_rows(20, STEPS, seed=2).prompt
    assert np.bincount(chain_rows(4002, STEPS).bin).tolist() == [1001, 1001, 1000, 1000]
    assert any(int(a.rpartition("#")[2]) < 0 for a in chain_rows(400, STEPS, Form()).answer)
    sums = [op for p in chain_rows(400, STEPS, Form("+")).problem for op in operands(p)[1]]
    assert set(sums) == {"+"}
    drawn = chain_problems(4000, 5, Form("+-", (3.0, 1.0)), np.random.default_rng(0))
    assert np.mean(drawn[:, 1::2] == ord("+")) == pytest.approx(0.75, abs=0.02)


@pytest.mark.parametrize("steps, form, key", [
    ((), Form(), "data.chain_steps"), ((1,), Form(), "data.chain_steps"), ((3, 3), Form(), "data.chain_steps"),
    ((21,), Form(), "data.chain_steps"), ((3,), Form("+*"), "data.operators"), ((3,), Form("-", negative=False), "data.negative"),
])
def test_impossible_settings_name_their_key(steps, form, key):
    for make in (chain_rows, chain_held_out):
        with pytest.raises(ConfigError, match=key):
            make(8, steps, form)


def test_a_prompt_set_of_chains(load):
    train, held = load(task="chain", chain_steps=(2, 4), negative=False, size=60, eval_per_bin=5)
    assert len(train) == 60 and np.bincount(held.bins).tolist() == [5, 5]
    prompt = train.prompt(1)
    assert prompt.text.startswith("Work out ") and prompt.bin == 1 and prompt.meta["steps"] == 4 and prompt.answer.count(";") == 4
    other = load(task="chain", chain_steps=(3, 4), negative=False, size=60, eval_per_bin=5)[0]
    assert other.digest != train.digest
