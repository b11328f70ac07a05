"""Scorers: functions of one response, run inside the reward pool's worker processes. Light imports only."""

import ast
import functools
import importlib
import logging
import math
import re
from decimal import Decimal
from typing import Any, Callable, Mapping, Optional

Scorer = Callable[..., Optional[float]]  # called as scorer(prompt=, response=, answer=, meta=)

NUMBER = re.compile(
    r"(?:(?<![\w)\]])[-+])?"  # a sign belongs to the number unless it stands between two operands
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]+(?!\w))?"
)
ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def last_number(text: str) -> Optional[Decimal]:
    """The last number in `text`, exactly, or None.

    Thousands separators count when they part groups of three digits; a final period, a unit or a bracket after the
    number does not matter. A sign must touch its number and must not follow a letter, a digit or a closing bracket:
    "3-5" ends in 5, "= -5" in -5. Exponents ("1e3") are read; a fraction such as 3/4 is two numbers.
    """
    found = NUMBER.findall(text.replace("\u2212", "-"))
    return Decimal(found[-1].replace(",", "")) if found else None


def exact_number(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """1.0 when the last number of the response equals the last number of the answer as a decimal, else 0.0.

    Of several numbers only the last one counts, right or wrong. Raises ValueError when the answer holds no number.
    """
    gold = last_number(answer)
    if gold is None:
        raise ValueError(f"the answer {answer!r} holds no number")
    return float(last_number(response) == gold)


def graded_number(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """`exact_number`, with up to 0.5 for a wrong integer: half the share of its digits that are right.

    Digits are compared place by place from the units on, over as many places as the longer of the two numbers has; a wrong
    sign, a fraction or no number scores 0. Only the right number scores above 0.5.
    """
    if exact_number(prompt, response, answer, meta):
        return 1.0
    said, gold = (integer_digits(last_number(text)) for text in (response, answer))
    if said is None or gold is None or said[0] != gold[0]:
        return 0.0
    right = sum(a == b for a, b in zip(said[1], gold[1], strict=False))
    return 0.5 * right / max(len(said[1]), len(gold[1]))


def integer_digits(number: Optional[Decimal]) -> Optional[tuple[bool, str]]:
    """(negative, digits from the units on) of an integer of at most 1000 digits, else None."""
    if number is None or number.adjusted() >= 1000 or number != number.to_integral_value():
        return None
    return number < 0, str(abs(int(number)))[::-1]


def gold_expressions(answer: str) -> list:
    """The answer as math-verify reads it; LaTeX without delimiters, which it would misread, gets them."""
    from math_verify import parse

    delimited = any(mark in answer for mark in ("$", "\\boxed", "\\(", "\\["))
    latex = not delimited and ("\\" in answer or "^" in answer)
    for text in (f"${answer}$", answer) if latex else (answer, f"${answer}$"):
        parsed = parse(text, parsing_timeout=None, raise_on_error=True)
        if parsed:
            return parsed
    raise ValueError(f"math-verify reads no expression in the answer {answer!r}")


def math_verify(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """1.0 when math-verify finds the response equal to the answer, else 0.0; the time limit is the pool's.

    math-verify judges some unequal pairs equal, for example the equations of two different lines.
    """
    from math_verify import parse, verify

    gold = gold_expressions(answer)
    target = parse(response, parsing_timeout=None, raise_on_error=True)
    return float(verify(gold, target, timeout_seconds=None, raise_on_error=True))


@functools.lru_cache(maxsize=None)
def verifier(task: str) -> Callable[[str, dict], float]:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0).score_answer


def reasoning_gym_verifier(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """reasoning-gym's own score, in [0, 1], of the text in the last <answer> tag, or of the response without one."""
    tagged = ANSWER_TAG.findall(response)
    said = (tagged[-1] if tagged else response).strip()
    return verifier(meta["task"])(said, ast.literal_eval(meta["entry"]))


def load_scorer(kind: str, task: str) -> Scorer:
    """The scorer of `reward.kind`; whatever importing a user's module raises is passed on."""
    if kind in ("exact_number", "graded_number"):
        return exact_number if kind == "exact_number" else graded_number
    if kind == "math_verify":
        logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at each start that its timeouts are off
        importlib.import_module("math_verify")
        return math_verify
    if kind == "task":
        verifier(task.removeprefix("reasoning-gym:"))
        return reasoning_gym_verifier
    module, _, function = kind.partition(":")
    scorer = getattr(importlib.import_module(module), function)
    if not callable(scorer):
        raise TypeError(f"{function} of module {module} is not callable")
    return scorer


def run_scorer(scorer: Scorer, prompt: str, response: str, answer: str, meta: dict) -> tuple[str, float, str]:
    """(kind, reward, message) of one response; kind is "ok", "raised", "none" or "nonfinite"."""
    try:
        value = scorer(prompt=prompt, response=response, answer=answer, meta=meta)
        reward = float("nan") if value is None else float(value)
    except BaseException as error:  # the user's code: everything it raises is reported and counted, also SystemExit
        return "raised", float("nan"), f"{type(error).__name__}: {error}"
    if value is None:
        return "none", reward, "the scorer returned None"
    if not math.isfinite(reward):
        return "nonfinite", float("nan"), f"the scorer returned {reward}"
    return "ok", reward, ""
