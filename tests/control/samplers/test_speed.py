import numpy as np
import pytest

from fastsched.config import ConfigError, SchedulerConfig, SpeedConfig
from fastsched.control.samplers.speed import ScreeningSampler
from fastsched.control.window import unknown_success
from fastsched.types import Outcomes

SIZES = np.array([40, 60])
BINS = np.repeat(np.arange(2), SIZES).astype(np.uint16)
UNKNOWN = unknown_success(2, 0.5)


def sampler(beta=0.5, **speed):
    return ScreeningSampler(SchedulerConfig(kind="speed", success_beta=beta, speed=SpeedConfig(**speed)), BINS, SIZES, 10, 0)


def observe(one, rewards, continued=None):
    rewards = np.array(rewards, dtype=float)
    rows = np.arange(len(rewards))
    one.observe(Outcomes(rows, BINS[rows].astype(np.int64), rewards, np.ones(rewards.shape, np.int64), np.zeros(rewards.shape, bool),
                         None if continued is None else np.array(continued)), UNKNOWN)


def test_candidates_are_screened_in_deck_order():
    one = sampler(screen=3)
    drawn = [one.draw(10, UNKNOWN) for _ in range(5)]
    assert all(len(d.rows) == 20 and d.responses.tolist() == [3] * 20 for d in drawn)  # half is taken to pass at first
    assert sorted(np.concatenate([d.rows for d in drawn]).tolist()) == list(range(100))


def test_their_number_follows_the_share_that_passes():
    """0 < success rate < 1 over the scored responses; a candidate without a score and a continued prompt count on neither side."""
    one = sampler()
    observe(one, [[1, 0], [1, 1], [0, 0], [0, 0], [np.nan, np.nan], [1, np.nan]])
    assert one.pass_rate == pytest.approx(1 / 5) and one.candidates(4) == 16  # at most 4 for each that is wanted
    observe(one, [[1, 0], [1, 0], [0, 0], [1, 1]], continued=[False, False, True, True])
    assert one.pass_rate == pytest.approx(0.6) and one.candidates(4) == 7
    assert sampler(candidates=1).candidates(4) == 4 and sampler(candidates=9).candidates(60) == 100
    observe(one, [[1, 0], [1, 0]], continued=[True, True])
    assert one.pass_rate == pytest.approx(0.6)


def test_nothing_passing_asks_for_the_most():
    one = sampler()
    for _ in range(2000):
        observe(one, [[1, 1], [0, 0]])
    assert one.candidates(5) == 20


@pytest.mark.parametrize("changes", [{"screen": 0}, {"candidates": 0}])
def test_options_that_make_no_sense_are_refused(changes):
    with pytest.raises(ConfigError, match="scheduler.speed"):
        SpeedConfig(**changes)
