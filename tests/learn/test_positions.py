import json

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.learn.positions import BINS, RARE, TokenPositions, count_positions, position_bin


def counted(*batches):
    positions = TokenPositions()
    for batch in batches:
        positions.add([count_positions(batch)])
    return positions


def test_bins_run_from_the_first_to_the_last_token():
    assert position_bin(np.array([1, 2, 3, 0, 5])).tolist() == [99, 0, 99, 0, 50, 99, 0, 25, 50, 75, 99]


def test_tp_score_by_its_formula():
    """TP(v) = sum_b c_b f_b(v) / sum_b f_b(v), f_b normalised within the bin: 7 first of all, 8 in the middle and at the end."""
    responses = [[7, 8, 8]] * 30 + [[7, 9, 9]] * 10 + [[5, 9, 8]] * 2
    scores = counted(responses).scores()
    assert scores.tokens.tolist() == [7, 8, 9] and scores.seen.tolist() == [40, 62, 22]  # 5 was seen twice: left out
    middle, end = {8: 30 / 42, 9: 12 / 42}, {8: 32 / 42, 9: 10 / 42}
    expected = [0.005] + [(0.505 * middle[v] + 0.995 * end[v]) / (middle[v] + end[v]) for v in (8, 9)]
    np.testing.assert_allclose(scores.score, expected, rtol=1e-12)


def test_a_token_without_a_score_counts_as_where_it_stands():
    positions = counted([[7, 8, 8]] * RARE)
    np.testing.assert_allclose(positions.score_tokens([[8, 3, 7, 4]]),
                               [positions.scores().score[1], 0.335, 0.005, 0.995])
    np.testing.assert_allclose(TokenPositions().score_tokens([[1, 2]]), [0.005, 0.995])


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.lists(st.integers(0, 9), max_size=6), min_size=1, max_size=5), min_size=1, max_size=4))
def test_counts_do_not_care_how_batches_and_ranks_are_cut(batches):
    every = [r for batch in batches for r in batch]
    whole, ranks = counted(every), TokenPositions()
    ranks.add([count_positions(batch) for batch in batches])
    for other in (counted(*batches), ranks):
        assert np.array_equal(whole.keys, other.keys) and np.array_equal(whole.counts, other.counts)
    assert whole.counts.sum() == sum(len(r) for r in every)
    truth = {}
    for r in every:
        for t, v in enumerate(r):
            u = 1.0 if len(r) == 1 else t / (len(r) - 1)
            key = v * BINS + min(int(u * BINS + 1e-9), BINS - 1)
            truth[key] = truth.get(key, 0) + 1
    assert dict(zip(whole.keys.tolist(), whole.counts.tolist(), strict=True)) == truth


def test_state_survives_json_bit_for_bit():
    rng = np.random.default_rng(0)
    positions = counted([rng.integers(0, 50_000, 40).tolist() for _ in range(50)])
    again = TokenPositions()
    again.load_state_dict(json.loads(json.dumps(positions.state_dict())))
    assert np.array_equal(again.keys, positions.keys) and np.array_equal(again.counts, positions.counts)
    more = [[1, 2, 3]] * RARE
    for one in (positions, again):
        one.add([count_positions(more)])
    assert np.array_equal(again.scores().score, positions.scores().score)
