"""What each reward says of a right answer and of its nearest wrong one: gold, right responses, wrong responses."""

import json
import math

import pytest

from fastsched.data.scorers import load_scorer, run_scorer
from fastsched.data.tasks import reasoning_gym_rows

HUGE = "9" * 4400

EXACT = [
    ("12", ["12", "12.", "12.0", "= 12", "**12**", "The answer is 12", "$12", "12 apples", "so 3 + 9 = 12", "+12"],
     ["-12", "112", "120", "1.2", "12 or 13", "12%2", "twelve", "", "1 2", "12.0000000000000000000001"]),
    ("-12", ["-12", "- 12", "-$12", "$-12", "= - 12", "it is - 12", "minus: \u221212", "(-12)", "0 - 24 = -12"],
     ["12", "$12", "3 -12 = -9", "12-12", "x - 12", "5 - 12"]),
    ("12", ["5 - 12 has a 12", "3-12", "7 - 12", "x - 12"], ["7 = -12"]),
    ("1234567", ["1,234,567", "1234567", "1{,}234{,}567", "1,234,567.00"], ["1,234,56", "1234,567", "1.234.567", "1,234,568"]),
    ("\\frac{1}{2}", ["1/2", "0.5", "\\frac{1}{2}", "\\dfrac{1}{2}", ".5", "2/4", "$\\boxed{\\frac{1}{2}}$"],
     ["2", "7/2", "1", "0.51", "-1/2", "1/20"]),
    ("\\frac{-1}{2}", ["-1/2", "-0.5", "\\frac{1}{-2}", "-\\frac12", "\\cfrac{-1}{2}", "\u2013 0.5"], ["1/2", "2", "-1", "-2", "12"]),
    ("\\frac12", ["0.5", "\\frac{1}{2}", "\\dfrac 1 2", "\\frac{1.5}{3}"], ["12", "2", "\\frac21"]),
    ("12", ["\\frac{36}{3}", "\\frac{1{,}200}{100}"], ["\\frac12", "\\boxed{} 12", "\\boxed{none} 12"]),
    ("0.75", ["3/4", "0.75", "6/8", "\\tfrac{3}{4}", "-3/-4 is 3/4"], ["4", "-3/4", "0.7", "4/3"]),
    ("1.5", ["1 1/2", "3/2", "1.50", "1\\frac{1}{2}", "1 \\frac12"], ["\\frac{1}{2}", "1/2", "2.5", "1 2/1"]),
    ("-3/4", ["-3/4", "-0.75", "- 3/4", "-\\frac{3}{4}"], ["3/4", "-4/3", "5-3/4"]),
    ("7", ["\\boxed{7} in 3 steps", "\\boxed{7}, not 9", "first \\boxed{3}, then \\boxed{7}", "\\boxed{x = 7}", "007"],
     ["\\boxed{3}, that is 7 less 4", "\\boxed{7}{}\\boxed{8}", "\\boxed{1/7} so 7"]),
    ("9007199254740993", ["9007199254740993", "9,007,199,254,740,993"], ["9007199254740992", "9007199254740994", "9.007199254740993e15x"]),
    ("1e3", ["1000", "1,000", "1e3", "1.0E+3"], ["1e4", "100", "3"]),
    ("1000000000000000000000000000001", ["1000000000000000000000000000001"], ["1e30", "1000000000000000000000000000000"]),
    ("6 * 200 + 34 = 1,234 #### 1,234", ["1234", "1,234"], ["34", "200", "123"]),
    ("#### -5", ["-5", "- 5"], ["5"]),
    ("\\boxed{42}", ["42", "\\boxed{42}"], ["\\boxed{24} 42"]),
    ("2024", ["on 12/25/2024", "2024"], ["12/25", "2025"]),
    ("3", [], ["1e99999999999999999999", HUGE, "1/0", "9/" + HUGE]),
    (HUGE, [HUGE], [HUGE[:-1] + "8", HUGE[:-1]]),
]

MATH = [
    ("y = 2x + 1", ["\\boxed{y=2x+1}", "$y = 2x + 1$"], ["\\boxed{1}", "\\boxed{y=2x-1}", "1"]),
    ("1, 2, 3", ["\\boxed{1, 2, 3}", "\\boxed{1,2,3}"], ["\\boxed{3}", "\\boxed{1, 2}", "\\boxed{1,2,4}"]),
    ("(1, 2), (3, 4)", ["\\boxed{(1, 2), (3, 4)}"], ["\\boxed{4}", "\\boxed{(1, 2)}"]),
    ("2x", ["\\boxed{2x}", "\\boxed{x + x}"], ["\\boxed{2}", "\\boxed{x}"]),
    ("3x - 7", ["\\boxed{3x-7}", "\\boxed{-7+3x}"], ["\\boxed{7}", "\\boxed{3x+7}", "\\boxed{-7}"]),
    ("x > 3", ["\\boxed{x>3}", "\\boxed{x > 3}"], ["\\boxed{3}", "\\boxed{x<3}"]),
    ("2n+1", ["\\boxed{2n+1}", "\\boxed{1+2n}"], ["\\boxed{1}", "\\boxed{2}", "\\boxed{2n}"]),
    ("1:2", ["\\boxed{1:2}", "\\boxed{\\frac{1}{2}}"], ["\\boxed{2}", "\\boxed{1}"]),
    ("1{,}234", ["\\boxed{1234}", "\\boxed{1,234}"], ["\\boxed{234}", "\\boxed{1}"]),
    ("x=1 or x=2", ["\\boxed{x=1 \\text{ or } x=2}", "\\boxed{x=1, x=2}"], ["\\boxed{2}", "\\boxed{x=2}"]),
    ("0 < x < 1", ["\\boxed{0<x<1}"], ["\\boxed{1}", "\\boxed{0}", "\\boxed{x<1}"]),
    ("\\frac{1}{2}", ["\\boxed{1/2}", "\\boxed{0.5}", "$\\frac{2}{4}$"], ["\\boxed{2}", "\\boxed{1}"]),
    ("2\\sqrt{3}", ["\\boxed{2\\sqrt{3}}", "\\boxed{\\sqrt{12}}"], ["\\boxed{2}", "\\boxed{3}", "\\boxed{\\sqrt{3}}"]),
    ("x^2+1", ["$x^2+1$", "\\boxed{1+x^2}"], ["\\boxed{x^2}", "\\boxed{2}"]),
    ("3\\pi", ["\\boxed{3\\pi}"], ["\\boxed{3}", "\\boxed{\\pi}"]),
    ("2^{10}", ["\\boxed{1024}", "\\boxed{2^{10}}"], ["\\boxed{2}", "\\boxed{10}", "\\boxed{20}"]),
    ("[0,1)", ["\\boxed{[0,1)}"], ["\\boxed{(0,1]}", "\\boxed{1}"]),
    ("(-\\infty, 3)", ["\\boxed{(-\\infty, 3)}"], ["\\boxed{3}", "\\boxed{(3, \\infty)}"]),
    ("\\{1,2,3\\}", ["\\boxed{\\{1,2,3\\}}", "\\boxed{\\{3,2,1\\}}"], ["\\boxed{3}", "\\boxed{\\{1,2\\}}"]),
    ("n(n+1)/2", ["\\boxed{\\frac{n(n+1)}{2}}"], ["\\boxed{n(n+1)}", "\\boxed{2}"]),
    ("a+b", ["\\boxed{b+a}"], ["\\boxed{a-b}", "\\boxed{a}"]),
    ("1e6", ["\\boxed{1000000}", "\\boxed{10^6}"], ["\\boxed{1}", "\\boxed{6}"]),
    ("12", ["12", "\\boxed{12}", "so it is 12", "$12$"], ["\\boxed{13}", "-12", "I do not know"]),
    ("-7", ["\\boxed{-7}", "-7"], ["\\boxed{7}", "7"]),
    ("10 cm", ["\\boxed{10}", "\\boxed{10 \\text{ cm}}"], ["\\boxed{1}", "\\boxed{100}"]),
    ("50%", ["\\boxed{50\\%}", "\\boxed{0.5}"], ["\\boxed{5}", "\\boxed{5\\%}"]),
    ("#### 12", ["\\boxed{12}"], ["\\boxed{21}"]),
    ("She has 12 apples left and 3 pears.\n#### 12", ["\\boxed{12}"], ["\\boxed{3}"]),
    ("The answer is 42.", ["\\boxed{42}", "42"], ["\\boxed{4}"]),
    ("$x=5$", ["\\boxed{x=5}", "\\boxed{5}"], ["\\boxed{x=4}"]),
    ("\\boxed{7}", ["\\boxed{7}"], ["\\boxed{3}"]),
    ("A", ["\\boxed{A}"], ["\\boxed{B}"]),
]

FORMS = [(task, form, value) for task in ("chain_sum", "basic_arithmetic", "gcd", "prime_factorization", "products") for form, value in (
    ("<answer>{}</answer>", 1.0), ("so <answer> {} </answer>", 1.0), ("<answer>no</answer> <answer>{}</answer>", 1.0),
    ("<answer>{}1</answer>", 0.0), ("{} <answer>none</answer>", 0.0), ("<answer></answer>", 0.0))]


def cases(table):
    return [pytest.param(gold, response, value, id=f"{gold[:20]} | {response[:30]} | {value:g}")
            for gold, right, wrong in table for value, responses in ((1.0, right), (0.0, wrong)) for response in responses]


def test_the_table_is_long_enough():
    assert len(cases(EXACT)) + len(cases(MATH)) + len(FORMS) >= 150


@pytest.mark.parametrize("gold, response, value", cases(EXACT))
def test_exact_number(gold, response, value):
    assert run_scorer(load_scorer("exact_number", ""), "", response, gold, {})[:2] == ("ok", value)


@pytest.mark.parametrize("gold", ["", "many", "1 and 2", "3 or 4", "1e99999999999999999999", "1/0"])
def test_an_answer_that_is_not_one_number_is_the_golds_fault(gold):
    kind, reward, message = run_scorer(load_scorer("exact_number", ""), "", "3", gold, {})
    assert kind == "raised" and math.isnan(reward) and repr(gold) in message


@pytest.mark.parametrize("gold, response, value", cases(MATH))
def test_math_verify(gold, response, value):
    kind, reward, _ = run_scorer(load_scorer("math_verify", ""), "", response, gold, {})
    assert reward == value and kind == "ok"


@pytest.fixture(scope="module")
def verified():
    found = {}
    for task in {task for task, _, _ in FORMS}:
        rows = reasoning_gym_rows(task, 1, seed=0)
        found[task] = load_scorer("task", f"reasoning-gym:{task}"), rows.answer[0], json.loads(rows.meta[0])
    return found


@pytest.mark.parametrize("task, form, value", FORMS)
def test_a_tasks_own_verifier(verified, task, form, value):
    """reasoning-gym gives some credit for an answer that holds the right one and more ("4261" for 426); nothing but the right one is 1."""
    scorer, answer, meta = verified[task]
    _, reward, _ = run_scorer(scorer, "", form.format(answer), answer, meta)
    assert reward == 1.0 if value else 0.0 <= reward < 1.0


@pytest.mark.parametrize("task", ["prime_factorization", "gcd", "chain_sum"])
@pytest.mark.parametrize("response", ["", "x", "2 x x 3", "1e999", "\u221e", "None", "[]", "2 ×", HUGE, "\x00"])
def test_what_a_verifier_cannot_read_is_wrong_and_not_unknown(verified, task, response):
    """Untrained policies write such things; prime_factorization's verifier raises on them."""
    scorer, answer, meta = verified[task]
    kind, reward, _ = run_scorer(scorer, "", f"<answer>{response}</answer>", answer, meta)
    assert kind in ("ok", "unreadable") and 0.0 <= reward < 0.5
