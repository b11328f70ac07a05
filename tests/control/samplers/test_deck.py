import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastsched.control.samplers.deck import ROUNDS, Deck, permute


def deck_of(sizes, seed=0):
    return Deck(np.repeat(np.arange(len(sizes)), sizes).astype(np.uint16), np.array(sizes), seed)


def permutation(size, key):
    keys = np.random.SeedSequence(key).generate_state(ROUNDS, np.uint64)
    index = np.arange(size, dtype=np.uint64)
    return permute(index, np.full(size, size, np.uint64), np.tile(keys, (size, 1)))


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 17, 100, 9999, 10_000])
def test_permute_is_a_permutation(size):
    np.testing.assert_array_equal(np.sort(permutation(size, 3)), np.arange(size))


def test_permute_is_even_over_keys():
    """Chi-square of (index, image) counts over keys, 30 degrees of freedom beyond the mean at most 3.5 sigma away."""
    size, keys = 7, 2000
    counts = np.zeros((size, size))
    for key in range(keys):
        counts[np.arange(size), permutation(size, key).astype(int)] += 1
    chi, freedom = ((counts - keys / size) ** 2 / (keys / size)).sum(), (size - 1) ** 2
    assert abs(chi - freedom) < 3.5 * np.sqrt(2 * freedom)


def test_neighbours_do_not_stay_neighbours():
    image = permutation(10_000, 1).astype(float)
    assert abs(np.corrcoef(image[:-1], image[1:])[0, 1]) < 0.05


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_batches_are_distinct_and_every_row_keeps_its_turn(sizes, data):
    deck, visits = deck_of(sizes), np.zeros(sum(sizes), int)
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    bins = np.repeat(np.arange(len(sizes)), sizes)
    for _ in range(30):
        counts = rng.integers(0, np.array(sizes) + 1)
        rows = deck.draw(counts)
        assert len(set(rows.tolist())) == len(rows) == counts.sum()
        np.testing.assert_array_equal(np.bincount(bins[rows], minlength=len(sizes)), counts)
        visits[rows] += 1
    for b in range(len(sizes)):
        assert np.ptp(visits[bins == b]) <= 2


@settings(derandomize=True, max_examples=60, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_others_than_those_drawn_come_while_there_are_any(sizes, data):
    deck, rng = deck_of(sizes), np.random.default_rng(data.draw(st.integers(0, 1000)))
    bins, sizes = np.repeat(np.arange(len(sizes)), sizes), np.array(sizes)
    for _ in range(10):
        drawn, counts = rng.permutation(len(bins))[:rng.integers(0, len(bins) + 1)], rng.integers(0, sizes + 1)
        rows = deck.draw_others(counts, drawn)
        np.testing.assert_array_equal(np.bincount(bins[rows], minlength=len(sizes)), counts)
        assert len(set(rows.tolist())) == len(rows)
        enough = sizes - np.bincount(bins[drawn], minlength=len(sizes)) >= counts
        assert not set(drawn[enough[bins[drawn]]].tolist()) & set(rows.tolist())


def test_a_bin_is_exhausted_before_it_is_reshuffled():
    deck = deck_of([12])
    first = np.concatenate([deck.draw(np.array([4])) for _ in range(3)])
    second = np.concatenate([deck.draw(np.array([4])) for _ in range(3)])
    assert sorted(first) == sorted(second) == list(range(12)) and first.tolist() != second.tolist()
    assert first.tolist() != deck_of([12], seed=1).draw(np.array([12])).tolist()


def test_a_row_met_twice_in_a_batch_waits_for_the_next_batch():
    deck = deck_of([5])
    while not deck.waiting:
        deck.draw(np.array([4]))
    waiting = list(deck.waiting)
    assert set(waiting) <= set(deck.draw(np.array([4])).tolist())


def test_more_rows_than_a_bin_holds_is_an_error():
    with pytest.raises(ValueError, match="bins of"):
        deck_of([3, 5]).draw(np.array([4, 0]))


def test_state_round_trips_and_goes_on_identically():
    one = deck_of([5, 40])
    for _ in range(7):
        one.draw(np.array([4, 9]))
    two = deck_of([5, 40])
    two.load_state_dict(json.loads(json.dumps(one.state_dict())))
    for _ in range(20):
        np.testing.assert_array_equal(one.draw(np.array([4, 9])), two.draw(np.array([4, 9])))
