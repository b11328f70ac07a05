"""Chain-of-steps arithmetic: a sum of several one-digit numbers whose answer works out one operation after another.

"Work out 3 + 5 - 2 step by step." is answered by "3+5=8;8-2=6;#6". The number of operations sets the difficulty and the
length: the answer is long enough that positions within a response differ.
"""

from typing import Sequence

import numpy as np

from fastsched.config import require
from fastsched.data.tasks import Form, Rows, mix64

HELD_OUT_SHARE = 16  # one problem in sixteen is held out
OPERANDS = 1, 10  # [low, high) of every operand
NOT_NEGATIVE = Form(negative=False)


def check_chain(steps: Sequence[int], form: Form) -> None:
    require(len(steps) > 0 and len(set(steps)) == len(steps) and all(2 <= k <= 20 for k in steps),
            f"data.chain_steps: {tuple(steps)} must be different numbers from 2 to 20")
    require("*" not in form.operators, f"data.operators: {form.operators!r}: data.task=chain takes + and - only")
    require(form.negative or "+" in form.operators,
            "data.negative: without negative totals data.task=chain needs + among data.operators")


def chain_problems(n: int, steps: int, form: Form, rng: np.random.Generator) -> np.ndarray:
    """n problems, drawn with replacement: [n, 2 steps + 1] int64 of operands with the operators' character codes between them.

    Without `form.negative` a difference that would fall below zero is a sum instead.
    """
    problems = np.empty((n, 2 * steps + 1), dtype=np.int64)
    problems[:, ::2] = rng.integers(*OPERANDS, size=(n, steps + 1))
    weights = None if form.weights is None else np.array(form.weights) / sum(form.weights)
    problems[:, 1::2] = rng.choice([ord(op) for op in form.operators], size=(n, steps), p=weights)
    total = problems[:, 0].copy()
    for k in range(1, 2 * steps, 2):
        operator, operand = problems[:, k], problems[:, k + 1]
        operator[(operator == ord("-")) & (total < operand) & (not form.negative)] = ord("+")
        total += np.where(operator == ord("-"), -operand, operand)
    return problems


def chain_held_out_mask(problems: np.ndarray) -> np.ndarray:
    """Which problems [N, 2 steps + 1] belong to the held-out split, bool [N]; depends on the problem alone."""
    key = np.zeros(len(problems), dtype=np.uint64)
    for column in problems.T:
        key = mix64(key ^ column.astype(np.uint64))
    return key % np.uint64(HELD_OUT_SHARE) == 0


def chain_text(problem: Sequence[int]) -> tuple[str, str]:
    """(problem, worked answer) of one row of `chain_problems`: ("3 + 5 - 2", "3+5=8;8-2=6;#6")."""
    total, question, worked = problem[0], [str(problem[0])], []
    for operator, operand in zip(map(chr, problem[1::2]), problem[2::2], strict=True):
        after = total + operand if operator == "+" else total - operand
        question.append(f"{operator} {operand}")
        worked.append(f"{total}{operator}{operand}={after};")
        total = after
    return " ".join(question), f"{''.join(worked)}#{total}"


def phrase_chain(problems: Sequence[Sequence[int]], steps: np.ndarray, bins: np.ndarray) -> Rows:
    texts = [chain_text(problem) for problem in problems]
    return Rows(
        prompt=[f"Work out {question} step by step." for question, _ in texts],
        problem=[question for question, _ in texts],
        answer=[worked for _, worked in texts],
        difficulty=steps,
        bin=bins,
        meta=[f'{{"steps": {k}}}' for k in steps.tolist()],
    )


def chain_rows(n: int, steps: Sequence[int] = (5, 6, 8, 9), form: Form = NOT_NEGATIVE, seed: int = 0) -> Rows:
    """n training problems, one difficulty bin for each entry of `steps`, the number of operations.

    Row r is of bin r mod len(steps). Problems are drawn with replacement and never belong to the held-out split. The answer
    is the whole worked text, which ends in the result. Raises ConfigError on impossible settings.
    """
    check_chain(steps, form)
    bins = np.arange(n, dtype=np.int64) % len(steps)
    problems: list = [None] * n
    for i, k in enumerate(steps):
        rng = np.random.default_rng([seed, k])
        of_bin = np.flatnonzero(bins == i)
        while len(of_bin):
            drawn = chain_problems(len(of_bin), k, form, rng)
            drawn = drawn[~chain_held_out_mask(drawn)].tolist()
            for row, problem in zip(of_bin, drawn, strict=False):
                problems[row] = problem
            of_bin = of_bin[len(drawn):]
    return phrase_chain(problems, np.asarray(steps, dtype=np.int64)[bins], bins)


def chain_held_out(per_bin: int, steps: Sequence[int] = (5, 6, 8, 9), form: Form = NOT_NEGATIVE) -> Rows:
    """Up to `per_bin` different held-out problems of each bin, bin after bin; independent of any seed.

    A smaller `per_bin` gives a prefix of each bin of a larger one.
    """
    check_chain(steps, form)
    chosen: list = []
    counts = []
    for k in steps:
        drawn = chain_problems(max(4096, 64 * per_bin), k, form, np.random.default_rng([0x4E1D, k]))
        drawn = drawn[chain_held_out_mask(drawn)]
        first = np.sort(np.unique(drawn, axis=0, return_index=True)[1])[:per_bin]
        chosen += drawn[first].tolist()
        counts.append(len(first))
    bins = np.repeat(np.arange(len(steps)), counts)
    return phrase_chain(chosen, np.asarray(steps, dtype=np.int64)[bins], bins)
