"""The rules of ADS against algorithms.md 2.2 and 2.3, and against a second writing of them."""

import numpy as np
import pytest
from ads_case import BAND, by_hand
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.control.samplers.ads import followed, moved

UP, DOWN, KEEP = 1.0, 0.0, 0.5


@pytest.mark.parametrize("positions, moves, members, after", [
    ([0, 1, 2, 3], [UP] * 4, 10, [1, 2, 3, 4]),
    ([0, 1, 2, 3], [DOWN] * 4, 10, [0, 1, 2, 3]),
    ([6, 7, 8, 9], [UP] * 4, 10, [6, 7, 8, 9]),
    ([2, 3, 4, 5], [KEEP, UP, DOWN, KEEP], 10, [2, 3, 4, 5]),
    ([0, 1, 2], [UP] * 3, 3, [0, 1, 2]),  # no more members than positions
    ([0, 1], [UP] * 2, 2, [0, 1]),
    ([3, 4], [None, UP], 9, [3, 5]),  # no feedback stays
    ([3, 4], [UP, None], 9, [4, 5]),  # the aim is taken by a keeper: one further on
])
def test_positions_of_the_specification(positions, moves, members, after):
    success = {p: s for p, s in zip(positions, moves, strict=True) if s is not None}
    assert moved(np.array(positions), success, members, BAND).tolist() == after


@pytest.mark.parametrize("correct, to", [(0, 4), (1, 4), (2, 4), (3, 5), (4, 5), (5, 5), (6, 6), (7, 6), (8, 6)])
def test_three_to_five_of_eight_stay(correct, to):
    assert moved(np.array([5]), {5: correct / 8}, 20, BAND).tolist() == [to]


def test_the_ends_of_the_band_stay():
    assert moved(np.array([5]), {5: 0.33}, 20, BAND).tolist() == moved(np.array([5]), {5: 0.67}, 20, BAND).tolist() == [5]
    assert moved(np.array([5]), {5: np.nextafter(0.33, 0)}, 20, BAND).tolist() == [4]
    assert moved(np.array([5]), {5: np.nextafter(0.67, 1)}, 20, BAND).tolist() == [6]


@settings(derandomize=True, deadline=None, max_examples=400)
@given(st.data())
def test_the_collision_rule_against_a_second_writing(data):
    n = data.draw(st.integers(1, 14))
    positions = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1, max_size=n)))
    rates = {p: data.draw(st.integers(0, 8)) / 8 for p in positions if data.draw(st.booleans())}
    low, high = data.draw(st.sampled_from([(0.33, 0.67), (0.5, 0.5), (0.0, 1.0), (0.25, 0.75)]))
    after = moved(np.array(positions), rates, n, (low, high)).tolist()
    assert after == by_hand(positions, rates, n, low, high) and len(after) == len(positions)


def test_weights_of_the_specification():
    p = followed(np.full(4, 0.25), np.array([0.9, 0.1, 0.5, 0.5]), 0.3)
    np.testing.assert_allclose(p, [0.31, 0.19, 0.25, 0.25], atol=1e-12)
    np.testing.assert_allclose(followed(np.array([0.7, 0.3]), np.zeros(2), 0.3), [0.64, 0.36], atol=1e-12)  # towards equal weights
