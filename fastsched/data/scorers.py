"""Scorers: functions of one response, run inside the reward pool's worker processes. Light imports only."""

import ast
import functools
import importlib
import inspect
import logging
import re
from dataclasses import dataclass
from decimal import Decimal
from typing import Any, Callable, Mapping, NamedTuple, Optional

from fastsched.data.numbers import Number, boxed, last_number, numbers

Scorer = Callable[..., Optional[float]]  # called as scorer(prompt=, response=, answer=, meta=)

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
LATEX_WORDS = re.compile(r"\\(?:text|mathrm|mbox|operatorname)\s*\{[^}]*\}|\\[A-Za-z]+|\b(?:or|and|in)\b")
SENTENCE = re.compile(r"(?:\b[A-Za-z]{2,}\b.*){3}", re.DOTALL)
"""Three words that are no LaTeX."""
FORMS = {"boxed": lambda response: boxed(response) is not None, "answer_tag": lambda response: bool(ANSWER_TAG.search(response))}
"""Of `reward.require`: whether a response has the form."""
LARGEST_REWARD = 1e30
VERIFIER_ERRORS = (ArithmeticError, AssertionError, AttributeError, LookupError, MemoryError, NotImplementedError, OSError, RecursionError,
                   RuntimeError, SyntaxError, TypeError, ValueError)


class Seen(NamedTuple):
    """What a scorer is told beside prompt, response, answer and meta, if an argument of it has the name."""

    prefill: str = ""  # what the answer began with, as part of the prompt
    finish_reason: str = "stop"  # or "length": cut by the limit
    tokens: int = 0  # of the response, the end token included


NOTHING_SEEN = Seen()


class Unreadable(ValueError):
    """Nothing can be read out of this response, and it is the response's fault: it is wrong, not unknown."""


def gold_number(answer: str) -> Number:
    """The one number of the answer, or of what stands behind its last "#" (GSM8K's "####"). ValueError where there is none, or several."""
    found = numbers(answer.rpartition("#")[2])
    if len(found) != 1 or found[0] is None:
        raise ValueError(f"the answer {answer!r} holds {len(found) or 'no'} number{'s' * (len(found) > 1)}"
                         + (", of which none is marked by # or \\boxed{}" if len(found) > 1 else ""))
    return found[0]


def exact_number(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """1.0 when the last number of the response (`numbers.last_number`) equals that of the answer exactly, else 0.0.

    Of several numbers only the last one counts, right or wrong; a box decides where there is one. Raises ValueError for an answer that
    does not hold one number.
    """
    return float(last_number(response) == gold_number(answer))


def graded_number(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """`exact_number`, with up to 0.5 for a wrong integer: half the share of its digits that are right.

    Digits are compared place by place from the units on, over as many places as the longer of the two numbers has; a wrong
    sign, a fraction or no number scores 0. Only the right number scores above 0.5.
    """
    if exact_number(prompt, response, answer, meta):
        return 1.0
    said, gold = integer_digits(last_number(response)), integer_digits(gold_number(answer))
    if said is None or gold is None or said[0] != gold[0]:
        return 0.0
    right = sum(a == b for a, b in zip(said[1], gold[1], strict=False))
    return 0.5 * right / max(len(said[1]), len(gold[1]))


def integer_digits(number: Optional[Number]) -> Optional[tuple[bool, str]]:
    """(negative, digits from the units on) of an integer of at most 1000 digits, else None."""
    if not isinstance(number, Decimal) or number.adjusted() >= 1000 or number != number.to_integral_value():
        return None
    return number < 0, str(abs(int(number)))[::-1]


def gold_expressions(answer: str) -> list:
    """The answer as math-verify reads it, as if it stood in a box: plain text goes to its number extractor, which reads 1 in "y = 2x + 1".

    An answer with delimiters of its own is read as it is, one behind "####" alone, a sentence as text.
    """
    from math_verify import parse

    said = answer.rpartition("####")[2].strip()
    if re.fullmatch(r"[-+]?[0-9.]+[eE][-+]?[0-9]{1,3}", said):
        said = format(Decimal(said), "f")  # else e is Euler's number
    for text in (said, f"\\boxed{{{said}}}")[::1 if stands_for_itself(said) else -1]:
        parsed = parse(text, parsing_timeout=None, raise_on_error=True)
        if parsed:
            return parsed
    raise ValueError(f"math-verify reads no expression in the answer {answer!r}")


def stands_for_itself(said: str) -> bool:
    """An answer with delimiters, or a sentence: it is read as text, not as what stands in a box."""
    return any(mark in said for mark in DELIMITERS) or bool(SENTENCE.search(LATEX_WORDS.sub("", said)))


def right_response(kind: str, answer: str, form: str = "none") -> str | None:
    """What must score 1 under `reward.kind` and `reward.require`: the answer in the form that they read. None for a user's function."""
    if ":" in kind:
        return None
    said = answer.rpartition("####")[2].strip() if kind == "math_verify" else answer
    box = form == "boxed" or kind == "math_verify" and not stands_for_itself(said)
    said = f"\\boxed{{{said}}}" if box and "\\boxed" not in said else said
    return f"<answer>{said}</answer>" if form == "answer_tag" or kind == "task" else said


def math_verify(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """1.0 when math-verify finds the response equal to the answer, else 0.0; the time limit is the pool's.

    math-verify judges some unequal pairs equal, for example the equations of two different lines. Unreadable: a response on which it
    fails while the answer itself can be read.
    """
    from math_verify import parse, verify

    gold = gold_expressions(answer)
    try:
        target = parse(response, parsing_timeout=None, raise_on_error=True)
        return float(verify(gold, target, timeout_seconds=None, raise_on_error=True))
    except VERIFIER_ERRORS as error:
        raise Unreadable(f"math-verify: {type(error).__name__}: {error}") from error


@functools.lru_cache(maxsize=None)
def verifier(task: str) -> Callable[[str, dict], float]:
    import reasoning_gym

    return reasoning_gym.create_dataset(task, size=1, seed=0).score_answer


def reasoning_gym_verifier(prompt: str, response: str, answer: str, meta: Mapping[str, Any]) -> float:
    """reasoning-gym's own score, in [0, 1], of the text in the last <answer> tag.

    Without a tag the response itself is scored, and only a full score counts: of running text that holds the answer, the verifiers give
    more the shorter it is. Unreadable: a response on which the verifier fails while it scores the task's own answer.
    """
    tagged = ANSWER_TAG.findall(response)
    said = (tagged[-1] if tagged else response).strip()
    score, entry = verifier(meta["task"]), ast.literal_eval(meta["entry"])
    try:
        found = score(said, entry)
    except VERIFIER_ERRORS as error:
        score(answer, entry)  # raises where it is not the response's fault
        raise Unreadable(f"{meta['task']}: {type(error).__name__}: {error}") from error
    return found if tagged or found == 1.0 else 0.0


@dataclass(frozen=True)
class LoadedScorer:
    """A scorer, the form that it is asked only about, and the fields of `Seen` that its arguments name."""

    scorer: Scorer
    form: str = "none"
    asks: tuple[str, ...] = ()

    def __call__(self, prompt: str, response: str, answer: str, meta: Mapping[str, Any],
                 seen: Seen = NOTHING_SEEN) -> Optional[float]:
        if self.form != "none" and not FORMS[self.form](response):
            return 0.0
        return self.scorer(prompt=prompt, response=response, answer=answer, meta=meta, **{name: getattr(seen, name) for name in self.asks})


def load_scorer(kind: str, task: str, form: str = "none") -> LoadedScorer:
    """The scorer of a reward's `kind`, which gives 0 to a response without the `form` of its `require`; whatever importing a user's
    module raises is passed on."""
    scorer = _scorer_of(kind, task)
    return LoadedScorer(scorer, form, asked_for(scorer))


def asked_for(scorer: Scorer) -> tuple[str, ...]:
    """The fields of `Seen` that are names of arguments; all of them where it takes any name, none where Python cannot say."""
    try:
        arguments = inspect.signature(scorer).parameters
    except ValueError:
        return ()
    anything = any(argument.kind is argument.VAR_KEYWORD for argument in arguments.values())
    return tuple(name for name in Seen._fields if anything or name in arguments)


def _scorer_of(kind: str, task: str) -> Scorer:
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


def run_scorer(scorer: LoadedScorer, prompt: str, response: str, answer: str, meta: Mapping[str, Any],
               seen: Seen = NOTHING_SEEN) -> tuple[str, float, str]:
    """(kind, reward, message) of one response; kind is "ok", "unreadable" (reward 0), "raised", "none" or "nonfinite"."""
    try:
        value = scorer(prompt, response, answer, meta, seen)
        if isinstance(value, (str, bytes, bytearray)):
            raise TypeError(f"the scorer returned the text {value!r}, which is no number")
        reward = float("nan") if value is None else float(value)
    except Unreadable as error:
        return "unreadable", 0.0, f"{error}"
    except BaseException as error:  # the user's code: everything it raises is reported and counted, also SystemExit
        return "raised", float("nan"), f"{type(error).__name__}: {error}"
    if value is None:
        return "none", reward, "the scorer returned None"
    if not abs(reward) <= LARGEST_REWARD:
        return "nonfinite", float("nan"), f"the scorer returned {reward}; rewards must lie within {LARGEST_REWARD:g}, as fp32 holds them"
    return "ok", reward, ""
