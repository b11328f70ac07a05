from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import ConfigError, ReplayConfig, SchedulerConfig
from fastsched.control.samplers.replay import ReplaySampler
from fastsched.control.window import unknown_success
from fastsched.types import Outcomes

SIZES = np.array([100, 100])
BINS = np.repeat(np.arange(2), SIZES).astype(np.uint16)
EASY, HARD = set(range(0, 20)), set(range(100, 120))


def success(ema):
    return replace(unknown_success(2, 0.5), ema=ema)


def sampler(temperature=0.5, **changes):
    """Knows 20 easy prompts (success 0.75) and 20 hard ones (0.25)."""
    cfg = SchedulerConfig(kind="replay", informativeness_temperature=temperature, replay=ReplayConfig(**changes))
    one = ReplaySampler(cfg, BINS, SIZES, 10, 0)
    observe(one, {row: 3 for row in EASY} | {row: 1 for row in HARD})
    return one


def observe(one, solved):
    rows = np.array(list(solved))
    rewards = (np.arange(4) < np.array(list(solved.values()))[:, None]).astype(float)
    counts = np.ones(rewards.shape, np.int64)
    one.observe(Outcomes(rows, BINS[rows].astype(np.int64), rewards, counts, counts == 0), success(0.5))


def drawn_and_lost(one, ema):
    """A batch whose rewards all fail, so that the memory stays as it is."""
    rows = one.draw(10, success(ema)).rows
    counts = np.ones((10, 4), np.int64)
    one.observe(Outcomes(rows, BINS[rows].astype(np.int64), np.full((10, 4), np.nan), counts, counts == 0), success(ema))
    return set(rows.tolist())


@pytest.mark.parametrize("ema, from_easy, from_hard", [(0.3, 6, 0), (0.7, 0, 6), (0.5, 0, 0), (0.4, 0, 0), (None, 0, 0)])
def test_outside_the_window_past_prompts_move_success_back(ema, from_easy, from_hard):
    one = sampler(share=0.6)
    one.in_order(20, np.zeros(0, np.int64))
    rows = one._again(6, success(ema)).tolist()
    assert (len(EASY & set(rows)), len(HARD & set(rows))) == (from_easy, from_hard) and len(set(rows)) == len(rows)
    drawn = set(one.draw(10, success(ema)).rows.tolist())
    assert len(drawn) == 10 and len(drawn & EASY) >= from_easy and len(drawn & HARD) >= from_hard


def test_the_share_is_what_the_option_says_and_inside_the_window_nothing_is_replayed():
    past = []
    for share in (0.0, 0.3, 0.9):
        one = sampler(share=share)
        past.append(sum(len(drawn_and_lost(one, 0.2) & EASY) for _ in range(30)))
    assert past[0] < 60 < 85 < past[1] < 150 < 265 < past[2]
    inside, plain = sampler(share=0.9), sampler(share=0.0)
    drawn = [[drawn_and_lost(one, 0.5) for _ in range(20)] for one in (inside, plain)]
    assert set.union(*drawn[0]) == set.union(*drawn[1]) == set(range(200))


def test_prompts_near_even_odds_are_preferred():
    one = sampler(temperature=0.1)
    observe(one, {row: 4 for row in range(20, 60)})  # solved: they raise success and teach nothing
    often = sum(len(set(one._again(5, success(0.2)).tolist()) & EASY) for _ in range(40))
    assert often > 0.9 * 200


def test_memory_holds_the_last_success_of_the_prompts_visited_last():
    one = sampler(memory=30)
    assert len(one.memory) == 30 and not set(one.memory) & set(range(10))
    observe(one, {15: 0, 150: 2})
    assert one.memory[15] == 0.0 and list(one.memory)[-2:] == [15, 150] and len(one.memory) == 30


@pytest.mark.parametrize("changes", [{"share": 1.0}, {"share": -0.1}, {"memory": 0}])
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="scheduler.replay"):
        ReplayConfig(**changes)
