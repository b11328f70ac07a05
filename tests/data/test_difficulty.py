import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastsched.data.difficulty import equal_count_bins


def test_distinct_values_give_equal_counts():
    values = np.random.default_rng(0).permutation(1003) * 0.5
    bins = equal_count_bins(values, 4)
    assert np.ptp(np.bincount(bins)) <= 1
    assert len(np.bincount(bins)) == 4


def test_the_number_of_bins_is_the_one_asked_for():
    assert [equal_count_bins(np.arange(60), k).max() + 1 for k in (1, 2, 5, 60)] == [1, 2, 5, 60]


def test_a_constant_column_gives_one_bin():
    assert equal_count_bins(np.full(10, 3.0), 4).tolist() == [0] * 10


def test_a_cut_inside_ties_moves_to_the_nearer_end():
    assert equal_count_bins(np.array([1, 2, 2, 2, 2, 2, 3, 3]), 2).tolist() == [0, 0, 0, 0, 0, 0, 1, 1]
    assert equal_count_bins(np.array([1, 1, 1, 2, 2, 2, 2, 2]), 2).tolist() == [0, 0, 0, 1, 1, 1, 1, 1]


@given(st.lists(st.integers(-5, 5), min_size=1, max_size=60), st.integers(1, 8))
def test_bins_are_ordered_gapless_and_keep_ties_together(values, k):
    bins = equal_count_bins(np.array(values), k)
    assert sorted(set(bins.tolist())) == list(range(bins.max() + 1))
    assert bins.max() < k
    pairs = sorted(zip(values, bins.tolist(), strict=True))
    assert all(b1 == b2 if v1 == v2 else b1 <= b2 for (v1, b1), (v2, b2) in zip(pairs, pairs[1:], strict=False))


def test_what_is_not_finite_is_refused():
    with pytest.raises(ValueError, match="finite"):
        equal_count_bins(np.array([1.0, np.nan]), 2)
