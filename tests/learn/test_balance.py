"""Groups exchanged between ranks; that training is then the same is in tests/distributed/test_ranks.py."""

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.learn.balance import balanced, divide
from fastsched.learn.packing import Sample, pack, packed_tokens


def loads(costs: list[list[int]], target: np.ndarray) -> np.ndarray:
    return np.bincount(target, weights=[c for part in costs for c in part], minlength=len(costs))


@settings(deadline=None, max_examples=200)
@given(st.lists(st.lists(st.integers(1, 1000), max_size=12), min_size=1, max_size=6))
def test_no_rank_gets_more_than_the_most_loaded_had_and_few_much_above_the_mean(costs):
    before = np.array([sum(part) for part in costs])
    after = loads(costs, divide(costs))
    assert after.sum() == before.sum() and after.max() <= before.max(initial=0)
    largest = max((c for part in costs for c in part), default=0)
    assert after.max() <= before.mean() + largest  # the bound of longest first


def test_what_is_level_stays_and_what_moves_is_little():
    assert divide([[5, 3], [4, 4], [8]]).tolist() == [0, 0, 1, 1, 2]
    assert divide([[], []]).tolist() == []
    moved = divide([[9, 9, 9, 9, 1], [9, 9, 1, 1]])
    assert (moved != np.repeat([0, 1], [5, 4])).sum() <= 5 and loads([[9, 9, 9, 9, 1], [9, 9, 1, 1]], moved).max() == 29


def samples(rank: int, groups: int, length: int) -> list[Sample]:
    """`groups` prompts of 4 tokens with 3 responses; tokens tell rank, group and response apart."""
    return [Sample(g, (rank, g, 7, 7), tuple([100 * rank + 10 * g + k] * (length + g)), np.full(length + g, -rank, np.float32), float(k),
                   np.ones(length + g, bool), 0.5, bin=g % 2) for g in range(groups) for k in range(3)]


def on_ranks(parts: list[list[Sample]], share: bool) -> list[list[Sample]]:
    """`balanced` on every rank at once, each in a thread."""
    board, barrier = [None] * len(parts), Barrier(len(parts))

    def run(rank: int) -> list[Sample]:
        def all_gather(value):
            board[rank] = value
            barrier.wait(timeout=30)
            seen = list(board)
            barrier.wait(timeout=30)
            return seen

        return balanced(parts[rank], share, rank, all_gather)

    with ThreadPoolExecutor(len(parts)) as pool:
        return list(pool.map(run, range(len(parts))))


@pytest.mark.parametrize("share", [True, False])
def test_every_response_is_trained_once_whole_groups_together_and_unchanged(share):
    parts = [samples(0, 8, 20), samples(1, 2, 5), []]
    after = on_ranks(parts, share)
    content = lambda s: (tuple(s.prompt_ids), s.token_ids, s.sampler_logp.tolist(), s.advantage, s.keep.tolist(), s.weight, s.bin)
    assert sorted(content(s) for part in after for s in part) == sorted(content(s) for part in parts for s in part)
    homes = {}
    for rank, part in enumerate(after):
        for sample in part:
            homes.setdefault(tuple(sample.prompt_ids), set()).add((rank, sample.group))
    assert all(len(home) == 1 for home in homes.values()) and len({next(iter(h))[1] for h in homes.values()}) == 10
    tokens = [sum(packed_tokens([s for s in part if s.group == g], share) for g in {s.group for s in part}) for part in after]
    assert max(tokens) - min(tokens) <= 60 + 4 * 3 + 21 and min(tokens) > 0
    assert pack(after[2], token_budget=4096, share_prompts=share)[0].groups == tuple(sorted({s.group for s in after[2]}))


def test_a_group_costs_what_it_takes_in_a_row():
    group = samples(0, 1, 10)
    assert packed_tokens(group, True) == 4 + 3 * 9 and packed_tokens(group, False) == 3 * (4 + 9)
    for share in (True, False):
        packed, = pack(group, token_budget=4096, share_prompts=share)
        assert packed.input_ids.size == packed_tokens(group, share)
