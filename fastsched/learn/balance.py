"""Groups move between ranks until every rank packs about as many tokens: the step ends with the rank that has most.

A group goes whole, so that its responses can share a prompt; what it costs is its packed tokens, attention not counted.
"""

from dataclasses import replace
from typing import Callable, Sequence

import numpy as np
from binpacking import to_constant_bin_number
from scipy.optimize import linear_sum_assignment

from fastsched.learn.packing import Sample, packed_tokens

AllGather = Callable[[object], list]


def balanced(samples: Sequence[Sample], share_prompts: bool, rank: int, all_gather: AllGather) -> list[Sample]:
    """What rank `rank` trains of the `samples` of all ranks; every rank calls it. Groups are numbered anew, over all ranks.

    Unchanged where no other division would relieve the rank with most.
    """
    mine: dict[int, list[Sample]] = {}
    for sample in samples:
        mine.setdefault(sample.group, []).append(sample)
    costs = all_gather([packed_tokens(group, share_prompts) for group in mine.values()])
    target = divide(costs)
    offset = sum(len(part) for part in costs[:rank])
    groups = {offset + i: group for i, group in enumerate(mine.values())}
    leaving = {number: group for number, group in groups.items() if target[number] != rank}
    arriving = {number: group for part in all_gather(leaving) for number, group in part.items() if target[number] == rank}
    staying = {number: group for number, group in groups.items() if number not in leaving}
    return [replace(sample, group=number) for number, group in sorted((staying | arriving).items()) for sample in group]


def divide(costs: Sequence[Sequence[int]]) -> np.ndarray:
    """[groups of all ranks] the rank of each, from the costs of what every rank holds: longest first to the rank with least so far.

    Parts go to the ranks that hold most of them already. Where the most loaded rank gains nothing, all stay where they are.
    """
    home = np.repeat(np.arange(len(costs)), [len(part) for part in costs])
    cost = np.array([c for part in costs for c in part], np.int64)
    parts = to_constant_bin_number(dict(enumerate(cost.tolist())), len(costs))
    held = np.zeros((len(parts), len(costs)))
    for number, part in enumerate(parts):
        np.add.at(held[number], home[list(part)], cost[list(part)])
    target = np.empty(len(cost), np.int64)
    for number, rank in zip(*linear_sum_assignment(held, maximize=True), strict=True):
        target[list(parts[number])] = rank
    load = lambda of: np.bincount(of, weights=cost, minlength=len(costs)).max(initial=0)
    return target if load(target) < load(home) else home
