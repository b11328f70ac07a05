"""Generated tasks: arithmetic with a held-out split by problem, and the reasoning-gym generators."""

import ast
import difflib
import json
from dataclasses import dataclass
from typing import Optional, Sequence

import numpy as np

from fastsched.config import ConfigError, DataConfig, require

OPERATIONS = {"+": np.add, "-": np.subtract, "*": np.multiply}
SMALL_SHARE = 4  # one in four of the problems of one-digit operands is held out,
LARGE_SHARE = 16  # one in sixteen of the larger ones


@dataclass(frozen=True)
class Rows:
    """Columns of N generated problems."""

    prompt: list[str]
    problem: list[str]  # without the question around it: "25 + 17"
    answer: list[str]
    difficulty: np.ndarray  # [N] int64
    bin: np.ndarray  # [N] int64
    meta: list[str]  # JSON objects


@dataclass(frozen=True)
class Form:
    """Which problems of d digits there are: operators, how often each, and whether the smaller operand may come first in a difference."""

    operators: str = "+-"
    weights: Optional[Sequence[float]] = None
    negative: bool = True

    def __post_init__(self):
        require(len(self.operators) > 0 and len(set(self.operators)) == len(self.operators) and set(self.operators) <= set(OPERATIONS),
                f"data.operators: {self.operators!r} must be one or more of {''.join(OPERATIONS)}, each once")
        require(self.weights is None or len(self.weights) == len(self.operators) and all(0 < w < float("inf") for w in self.weights),
                f"data.operator_weights: {self.weights} must be one positive number for each of the operators {self.operators}")


def form_of(cfg: DataConfig) -> Form:
    return Form(cfg.operators, cfg.operator_weights, cfg.negative)


def mix64(keys: np.ndarray) -> np.ndarray:
    """Stable hash of integer keys [N] to uint64 [N]: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = keys.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def operand_range(digits: int) -> tuple[int, int]:
    """[low, high) of the numbers with exactly `digits` digits; 0 counts as one digit."""
    return (0 if digits == 1 else 10 ** (digits - 1)), 10**digits


def held_out(a: np.ndarray, operator: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Which problems (operands [N], operator as character code [N]) belong to the held-out split, bool [N].

    Depends on the problem alone, so the split is the same for every size, seed and choice of bins.
    """
    share = np.where(np.maximum(a, b) < 10, SMALL_SHARE, LARGE_SHARE).astype(np.uint64)
    return mix64(mix64(mix64(a) ^ operator.astype(np.uint64)) ^ b.astype(np.uint64)) % share == 0


def draw_problems(n: int, digits: int, form: Form, rng: np.random.Generator) -> np.ndarray:
    """n problems, even with replacement: [n, 3] int64 of first operand, operator's character code, second operand."""
    low, high = operand_range(digits)
    width = high - low
    flat = rng.integers(0, width * width * len(form.operators), size=n)
    chosen = flat // (width * width)
    if form.weights is not None:
        chosen = rng.choice(len(form.operators), size=n, p=np.array(form.weights) / sum(form.weights))
    a, operator, b = low + flat % width, np.array([ord(op) for op in form.operators])[chosen], low + flat // width % width
    swap = (operator == ord("-")) & (a < b) & (not form.negative)
    return np.stack([np.where(swap, b, a), operator, np.where(swap, a, b)], axis=1)


def check_digits(digits: Sequence[int]) -> None:
    require(len(digits) > 0 and len(set(digits)) == len(digits) and all(1 <= d <= 9 for d in digits),
            f"data.digits: {tuple(digits)} must be different numbers from 1 to 9")


def phrase(problems: np.ndarray, digits: np.ndarray, bins: np.ndarray) -> Rows:
    answers = np.empty(len(problems), dtype=np.int64)
    for op, apply in OPERATIONS.items():
        of_op = problems[:, 1] == ord(op)
        answers[of_op] = apply(problems[of_op, 0], problems[of_op, 2])
    problem = [f"{a} {chr(op)} {b}" for a, op, b in problems.tolist()]
    return Rows(
        prompt=[f"What is {text}?" for text in problem],
        problem=problem,
        answer=[str(x) for x in answers.tolist()],
        difficulty=digits,
        bin=bins,
        meta=[f'{{"digits": {d}}}' for d in digits.tolist()],
    )


def arithmetic_rows(n: int, digits: Sequence[int] = (1, 2, 3, 4), form: Form = Form(), seed: int = 0) -> Rows:
    """n training problems "What is A + B?", one difficulty bin for each entry of `digits`.

    Both operands of bin i have exactly digits[i] digits. Row r is of bin r mod len(digits), so counts differ by at
    most one. Problems are drawn with replacement (one digit has only 138 of them) and never belong to the held-out
    split. Answers are decimal strings. Raises ConfigError on impossible digit counts.
    """
    check_digits(digits)
    bins = np.arange(n, dtype=np.int64) % len(digits)
    problems = np.empty((n, 3), dtype=np.int64)
    for i, d in enumerate(digits):
        rng = np.random.default_rng([seed, d])
        of_bin = np.flatnonzero(bins == i)
        while len(of_bin):
            drawn = draw_problems(len(of_bin), d, form, rng)
            drawn = drawn[~held_out(*drawn.T)]
            problems[of_bin[: len(drawn)]] = drawn
            of_bin = of_bin[len(drawn):]
    return phrase(problems, np.asarray(digits, dtype=np.int64)[bins], bins)


def arithmetic_held_out(per_bin: int, digits: Sequence[int] = (1, 2, 3, 4), form: Form = Form()) -> Rows:
    """Up to `per_bin` different held-out problems of each bin, bin after bin; independent of any seed.

    A bin gives fewer where its split holds fewer: one digit with + and - has 62. A smaller `per_bin` gives a prefix
    of each bin of a larger one.
    """
    check_digits(digits)
    chosen = []
    for d in digits:
        drawn = draw_problems(max(4096, 64 * per_bin), d, form, np.random.default_rng([0x4E1D, d]))
        drawn = drawn[held_out(*drawn.T)]
        first = np.sort(np.unique(drawn, axis=0, return_index=True)[1])
        chosen.append(drawn[first[:per_bin]])
    bins = np.repeat(np.arange(len(digits)), [len(c) for c in chosen])
    return phrase(np.concatenate(chosen), np.asarray(digits, dtype=np.int64)[bins], bins)


def reasoning_gym_rows(name: str, n: int, seed: int) -> Rows:
    """n problems of reasoning-gym task `name` in one bin; meta carries the entry that its verifier needs.

    Raises ConfigError for an unknown name, naming the nearest, and for a task whose entries do not survive storage.
    """
    entries = make_reasoning_gym(name, n, seed)
    rows = [entries[i] for i in range(n)]
    stored = [store_entry(name, entry) for entry in rows]
    return Rows(
        prompt=[entry["question"] for entry in rows],
        problem=[entry["question"] for entry in rows],
        answer=["" if entry["answer"] is None else str(entry["answer"]) for entry in rows],
        difficulty=np.zeros(n, dtype=np.int64),
        bin=np.zeros(n, dtype=np.int64),
        meta=[json.dumps({"task": name, "entry": text}) for text in stored],
    )


def make_reasoning_gym(name: str, n: int, seed: int):
    """The reasoning-gym dataset `name` of n entries; ConfigError when there is no such task or it needs settings."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    if name not in DATASETS:
        near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.4)
        hint = f"the nearest are {', '.join(near)}" if near else f"there are {len(DATASETS)}, such as chain_sum"
        raise ConfigError(f"data.task: reasoning-gym has no task {name!r}; {hint}")
    try:
        return reasoning_gym.create_dataset(name, size=n, seed=seed)
    except AssertionError as error:
        raise ConfigError(f"data.task: reasoning-gym task {name!r} cannot be made by name alone: {error}") from error


def plain(value):
    """`value` with NumPy scalars inside dicts, lists and tuples turned into Python's own."""
    if isinstance(value, dict):
        return {plain(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)([plain(item) for item in value])
    return value.item() if isinstance(value, np.generic) else value


def store_entry(name: str, entry: dict) -> str:
    """The entry as a Python literal: JSON would turn tuples into lists, which some verifiers notice."""
    text = repr(plain(entry))
    try:
        same = ast.literal_eval(text) == entry
    except (ValueError, SyntaxError) as error:
        raise ConfigError(f"data.task: entries of reasoning-gym task {name!r} cannot be stored: {error}") from error
    require(same, f"data.task: entries of reasoning-gym task {name!r} change when stored as text")
    return text
