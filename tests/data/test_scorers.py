import json
from decimal import Decimal

import pytest

from fastsched.data.scorers import (
    LoadedScorer,
    Seen,
    asked_for,
    exact_number,
    graded_number,
    last_number,
    load_scorer,
    math_verify,
    right_response,
    run_scorer,
)
from fastsched.data.tasks import reasoning_gym_rows


@pytest.mark.parametrize("text, number", [
    ("12", "12"), ("12.", "12"), ("112", "112"), ("it is 1,234,567.", "1234567"), ("1,2", "2"), ("12,3456", "3456"),
    ("3 - 5 = -2", "-2"), ("3-5", "5"), ("x=-5", "-5"), ("(2)-5", "5"), ("minus \u22127", "-7"), ("- 5", "-5"),
    ("3.50", "3.5"), (".5", "0.5"), ("-0.5.", "-0.5"), ("1e3", "1000"), ("2e", "2"), ("$\\boxed{12}$", "12"),
    ("12 apples", "12"), ("$5", "5"), ("50%", "50"), ("3/4", "0.75"), ("007", "7"), ("first 4, then 9, so 13", "13"),
    ("**7**", "7"), ("9" * 400, "9" * 400), ("no number", None), ("", None), (".", None), ("-", None),
])
def test_last_number(text, number):
    assert last_number(text) == (None if number is None else Decimal(number))


@pytest.mark.parametrize("response, answer, reward", [
    ("12", "12", 1.0), ("The answer is 12.", "12", 1.0), ("112", "12", 0.0), ("12 or 13", "12", 0.0),
    ("13 or 12", "12", 1.0), ("12.0", "12", 1.0), ("12.0000000000000000000001", "12", 0.0), ("1,234", "1234", 1.0),
    ("-2", "2", 0.0), ("", "12", 0.0),
    ("1234", "6 * 200 + 34 = 1,234 #### 1,234", 1.0),
])
def test_exact_number(response, answer, reward):
    assert exact_number("", response, answer, {}) == reward


def test_exact_number_refuses_an_answer_without_a_number():
    with pytest.raises(ValueError, match="'many' holds no number"):
        exact_number("", "12", "many", {})


@pytest.mark.parametrize("response, answer, reward", [
    ("42", "42", 1.0), ("so 42.0", "42", 1.0), ("43", "42", 0.25), ("12", "42", 0.25), ("2", "42", 0.25), ("4", "42", 0.0),
    ("142", "42", 1 / 3), ("1142", "142", 3 / 8), ("-42", "42", 0.0), ("-43", "-42", 0.25), ("42.5", "42", 0.0), ("", "42", 0.0),
    ("0.5", "0.5", 1.0), ("0", "0.5", 0.0), ("10", "0", 0.25), ("1e999999", "42", 0.0),
])
def test_graded_number(response, answer, reward):
    assert graded_number("", response, answer, {}) == pytest.approx(reward)


@pytest.mark.parametrize("response, answer, reward", [
    ("so it is $\\frac{1}{2}$", "0.5", 1.0), ("0.5", "1/2", 1.0), ("\\boxed{\\frac{9}{7}}", "\\dfrac{9}{7}", 1.0),
    ("$3$", "3\\sqrt{2}", 0.0),  # read without delimiters, the answer would be 3
    ("$3\\sqrt{2}$", "3\\sqrt{2}", 1.0), ("$x^2+1$", "x^2+1", 1.0), ("12", "13", 0.0), ("I do not know", "13", 0.0),
    ("it is $[2,5)$", "[2,5)", 1.0), ("$1/2^{98}$", "$1/2^{99}$", 1.0),  # the last is wrong: math-verify 0.9.0 rounds
])
def test_math_verify(response, answer, reward):
    assert math_verify("", response, answer, {}) == reward


def test_math_verify_refuses_an_answer_it_cannot_read():
    with pytest.raises(ValueError, match="no expression"):
        math_verify("", "12", "", {})


def test_reasoning_gym_verifier_reads_the_last_answer_tag_or_everything():
    rows = reasoning_gym_rows("chain_sum", 1, seed=0)
    score = load_scorer("task", "reasoning-gym:chain_sum")
    answer, meta = rows.answer[0], json.loads(rows.meta[0])
    said = (answer, f"<answer>0.5</answer> no: <answer> {answer} </answer>", f"<answer>0.5</answer> {answer}")
    plain, last_tag, wrong_tag = (score(prompt="", response=text, answer=answer, meta=meta) for text in said)
    assert plain == last_tag == 1.0 > wrong_tag


def test_without_a_tag_a_task_gives_no_credit_for_being_short():
    """reasoning-gym gave the share of the text that the right answer takes: brevity was what an untagged policy learnt."""
    rows = reasoning_gym_rows("chain_sum", 1, seed=0)
    score = load_scorer("task", "reasoning-gym:chain_sum")
    answer, meta = rows.answer[0], json.loads(rows.meta[0])
    said = [f"= {answer}", f"so it is {answer}", f"{'step by step, ' * 50}{answer}."]
    assert [score(prompt="", response=text, answer=answer, meta=meta) for text in said] == [0.0] * 3
    assert 0 < score(prompt="", response=f"<answer>= {answer}</answer>", answer=answer, meta=meta) < 1


SEEN = Seen(prefill="1 + 1 =", finish_reason="length", tokens=7)


@pytest.mark.parametrize("scorer, names", [
    (lambda prompt, response, answer, meta: 0.0, ()), (lambda prompt, response, answer, meta, tokens: tokens, ("tokens",)),
    (lambda response, finish_reason="stop", **rest: 0.0, Seen._fields), (lambda response, **rest: 0.0, Seen._fields),
    (type("Counts", (), {"__call__": lambda self, prompt, response, answer, meta, prefill: 0.0})(), ("prefill",))])
def test_a_scorer_is_told_what_its_arguments_name(scorer, names):
    assert asked_for(scorer) == names


def test_what_is_seen_arrives():
    def kept(prompt, response, answer, meta, prefill, finish_reason, tokens):
        return tokens * (prefill == "1 + 1 =" and finish_reason == "length")

    assert run_scorer(LoadedScorer(kept, "none", asked_for(kept)), "", "", "", {}, SEEN) == ("ok", 7.0, "")


@pytest.mark.parametrize("value, kind", [(None, "none"), (float("nan"), "nonfinite"), (float("-inf"), "nonfinite"),
                                         ("word", "raised"), ("1.0", "raised"), (b"1", "raised"), (1e200, "nonfinite"), (True, "ok"),
                                         (0.25, "ok")])
def test_run_scorer_names_what_came_back(value, kind):
    found, reward, message = run_scorer(LoadedScorer(lambda prompt, response, answer, meta: value), "", "", "", {})
    assert found == kind
    assert (reward == value) == (kind == "ok")
    assert bool(message) == (kind != "ok")


def test_what_a_row_says_is_read_as_literals_and_never_run(tmp_path):
    """Code comes from the configuration alone: an entry out of a data file that is an expression is an error of its response."""
    expression = f"__import__('pathlib').Path({str(tmp_path / 'ran')!r}).touch()"
    scorer = load_scorer("task", "reasoning-gym:chain_sum")
    kind, reward, message = run_scorer(scorer, "", "1", "1", {"task": "chain_sum", "entry": expression})
    assert kind == "raised" and "malformed" in message and not (tmp_path / "ran").exists()


@pytest.mark.parametrize("form, right, wrong", [
    ("boxed", "so \\boxed{12}", "so 12"), ("boxed", "\\boxed{12} in 3 steps", "\\boxed{12"),
    ("answer_tag", "<answer>12</answer>", "12"), ("answer_tag", "well <answer> 12 </answer>", "<answer>12")])
def test_a_required_form_decides_before_the_number(form, right, wrong):
    score = load_scorer("exact_number", "", form)
    assert [score(prompt="", response=text, answer="12", meta={}) for text in (right, wrong)] == [1.0, 0.0]
    assert load_scorer("exact_number", "")(prompt="", response=wrong, answer="12", meta={}) == 1.0


@pytest.mark.parametrize("kind", ["exact_number", "graded_number", "math_verify"])
@pytest.mark.parametrize("form", ["none", "boxed", "answer_tag"])
@pytest.mark.parametrize("answer", ["12", "-3.5", "#### 7", "\\boxed{8}"])
def test_the_right_response_is_right(kind, form, answer):
    response = right_response(kind, answer, form)
    assert load_scorer(kind, "", form)(prompt="", response=response, answer=answer, meta={}) == 1.0
