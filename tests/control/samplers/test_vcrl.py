from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import ConfigError, SchedulerConfig, VcrlConfig
from fastsched.control.samplers.vcrl import VarianceSampler, group_variance
from fastsched.control.window import unknown_success
from fastsched.types import Outcomes

SIZES = np.array([40, 60])
BINS = np.repeat(np.arange(2), SIZES).astype(np.uint16)
UNKNOWN = unknown_success(2, 0.5)


def sampler(**vcrl):
    return VarianceSampler(SchedulerConfig(kind="vcrl", vcrl=VcrlConfig(**vcrl)), BINS, SIZES, 10, 0)


def observe(one, solved: dict, step=0, group=8):
    """solved: row -> number of successes of `group` scored responses, NaN: no score."""
    rows = np.array(list(solved))
    rewards = (np.arange(group) < np.array(list(solved.values()))[:, None]).astype(float)
    rewards[np.isnan(list(solved.values()))] = np.nan
    counts = np.ones(rewards.shape, np.int64)
    one.observe(Outcomes(rows, BINS[rows].astype(np.int64), rewards, counts, counts == 0), replace(UNKNOWN, steps=step))


@pytest.mark.parametrize("group", [2, 3, 7, 8, 16])
def test_variance_is_the_published_one(group):
    """algorithms.md 3: sigma^2 = k (G - k) / (G (G - 1)) over G / (4 (G - 1)) for even, (G + 1) / (4 G) for odd G."""
    k = np.arange(group + 1)
    largest = group / (4 * (group - 1)) if group % 2 == 0 else (group + 1) / (4 * group)
    np.testing.assert_allclose(group_variance(k, np.full(group + 1, group)), k * (group - k) / (group * (group - 1)) / largest, rtol=1e-12)
    assert group_variance(k, np.full(group + 1, group)).max() == 1


def test_without_two_scores_the_variance_is_unknown():
    np.testing.assert_array_equal(group_variance(np.array([0, 1]), np.array([0, 1])), [np.nan, np.nan])


def test_prompts_enter_at_kappa_are_scored_anew_and_leave_below_it():
    one = sampler(kappa=0.5)  # at G = 8: k = 2 has 0.75, k = 1 has 0.4375
    observe(one, {3: 2, 7: 1, 8: 4, 9: 8}, step=1)
    assert one.bank == {3: (0.75, 1), 8: (1.0, 1)}
    observe(one, {3: 4, 8: 1}, step=2)
    assert one.bank == {3: (1.0, 2)}
    observe(one, {3: np.nan}, step=3)
    assert one.bank == {3: (1.0, 2)}
    lower = sampler(kappa=0.4)
    observe(lower, {7: 1})
    assert 7 in lower.bank


def test_the_bank_gives_its_share_highest_variance_first_then_the_one_visited_longest_ago():
    one = sampler(bank_share=0.3)
    observe(one, {row: 4 for row in (50, 51, 52)}, step=2)
    observe(one, {60: 4, 61: 2, 62: 2}, step=1)
    drawn = set(one.draw(10, UNKNOWN).rows.tolist())  # three from the bank: row 60 of step 1, then two of step 2
    assert {60, 50, 51} <= drawn
    turned_off = sampler(bank_share=0.0)
    turned_off.bank = dict(one.bank)
    in_order = sampler(bank_share=0.0).draw(10, UNKNOWN)
    assert turned_off.draw(10, UNKNOWN).rows.tolist() == in_order.rows.tolist()


def test_a_full_bank_drops_the_least_variance_first():
    one = sampler(bank=2, kappa=0.1)
    observe(one, {1: 1, 2: 4, 3: 2})
    assert set(one.bank) == {2, 3}
    observe(one, {4: 2}, step=1)  # as row 3, which was visited longer ago
    assert set(one.bank) == {2, 4}


def test_a_short_bank_is_made_up_in_deck_order():
    one = sampler(bank_share=0.9)
    observe(one, {5: 4})
    drawn = one.draw(10, UNKNOWN).rows.tolist()
    assert 5 in drawn and len(set(drawn)) == 10


@pytest.mark.parametrize("changes", [{"kappa": 0.0}, {"kappa": 1.5}, {"bank": 0}, {"bank_share": 1.0}])
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="scheduler.vcrl"):
        VcrlConfig(**changes)
