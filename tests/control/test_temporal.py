import pytest
import torch
from fastsched_kernels.trajectory import trajectory_keep

from fastsched.config import ConfigError, TemporalConfig
from fastsched.control.temporal import schedule_ends, temporal_s

PUBLISHED = TemporalConfig(mode="linear", magnitude=0.99, start=0.0, end=0.8)


@pytest.mark.parametrize("step, s, cuts", [  # algorithms.md 1.3, T = 117; cuts at L = 1, 2, 10, 100, 8000
    (1, 0.979355, (0, 1, 9, 97, 7834)),
    (10, 0.883548, (0, 1, 8, 88, 7068)),
    (47, 0.489677, (0, 0, 4, 48, 3917)),
    (92, 0.010645, (0, 0, 0, 1, 85)),
    (93, 0.0, (0, 0, 0, 0, 0)),
    (117, 0.0, (0, 0, 0, 0, 0)),
])
def test_linear_schedule_gives_the_published_values(step, s, cuts):
    ours = temporal_s(step, 117, PUBLISHED)
    assert ours == pytest.approx(s, abs=5e-7)
    assert tuple(min(int(length * ours), length - 1) for length in (1, 2, 10, 100, 8000)) == cuts
    masks = trajectory_keep(torch.tensor([1, 2, 10, 100, 8000]), ours)
    for i, cut in enumerate(cuts):  # what the schedule and the mask make of it together: token `cut` is the first that is kept
        assert int(masks.keep[masks.sequence == i].int().argmax()) == cut


def test_the_published_schedule_ends_at_step_93_of_117():
    assert schedule_ends(117, PUBLISHED) == (0, 93)
    assert temporal_s(1, 117, PUBLISHED) == pytest.approx(0.99 * (1 - 1 / 93)) and temporal_s(92, 117, PUBLISHED) > 0


@pytest.mark.parametrize("tau, boundary", [(0.3, 0.7), (0.8, 0.2)])
def test_boundary_percentile_is_one_minus_progress(tau, boundary):
    """The paper's figure (algorithms.md 1.3): tau 0.3 trains the last 30 %, tau 0.8 the last 80 %."""
    cfg = TemporalConfig(mode="linear", magnitude=1.0, start=0.0, end=1.0)
    assert temporal_s(round(100 * tau), 100, cfg) == pytest.approx(boundary)
    assert int(trajectory_keep(torch.tensor([1000]), temporal_s(round(100 * tau), 100, cfg)).keep.sum()) == round(1000 * tau)


@pytest.mark.parametrize("length, budgets", [(1, (1, 1, 1)), (10, (1, 2, 6)), (100, (3, 12, 52)), (8000, (166, 932, 4083))])
def test_entropy_budget_at_scheduled_values(length, budgets):
    """algorithms.md 1.4: ceil((1 - S) L) tokens, at least one, at steps 1, 10 and 47 of the published schedule."""
    entropy = torch.arange(float(length))
    for step, budget in zip((1, 10, 47), budgets, strict=True):
        keep = trajectory_keep(torch.tensor([length]), temporal_s(step, 117, PUBLISHED), proxy="entropy", entropy=entropy).keep
        assert int(keep.sum()) == budget and keep[-budget:].all()  # the most uncertain ones


def test_the_tightest_entropy_budget_is_one_of_a_hundred():
    """ceil(100 (1 - 0.99)) is 2 in float64 without a tolerance."""
    assert int(trajectory_keep(torch.tensor([100]), 0.99, proxy="entropy", entropy=torch.arange(100.0)).keep.sum()) == 1


@pytest.mark.parametrize("progress, s", [(0, 0.99), (0.25, 0.7425), (0.5, 0.495), (0.75, 0.2475), (1, 0.0)])
def test_linear_reference_values(progress, s):  # algorithms.md 1.1
    cfg = TemporalConfig(mode="linear", magnitude=0.99, start=0.0, end=1.0)
    assert temporal_s(int(progress * 100), 100, cfg) == pytest.approx(s, abs=1e-12)


@pytest.mark.parametrize("mode, values", [  # algorithms.md 1.1, at progress 0, 0.25, 0.5, 0.75, 1
    ("sigmoid", (0.99, 0.886056, 0.495, 0.103944, 0.0)), ("gamma", (0.9801, 0.551306, 0.245025, 0.061256, 0.0)),
])
def test_sigmoid_and_gamma_reference_values(mode, values):
    cfg = TemporalConfig(mode=mode, magnitude=0.99, start=0.0, end=1.0)
    assert [temporal_s(step, 100, cfg) for step in (0, 25, 50, 75, 100)] == pytest.approx(values, abs=5e-7)
    assert temporal_s(50, 100, TemporalConfig(mode="gamma", gamma=1.0, end=1.0)) == pytest.approx(0.495)


def test_start_holds_the_magnitude_and_none_cuts_nothing():
    late = TemporalConfig(mode="linear", magnitude=0.5, start=0.5, end=1.0)
    assert [temporal_s(step, 10, late) for step in (1, 5, 10)] == [0.5, 0.5, 0.0]
    assert temporal_s(6, 10, late) == pytest.approx(0.4)
    assert temporal_s(1, 10, TemporalConfig(mode="none")) == 0.0


def test_ends_are_rounded_down():
    cfg = TemporalConfig(mode="linear", magnitude=1.0, start=0.29, end=0.8)  # 9 steps: from 2 to 7
    assert [temporal_s(step, 9, cfg) for step in (2, 3, 7)] == [1.0, pytest.approx(0.8), 0.0]


def test_a_run_too_short_for_the_schedule_is_an_error():
    with pytest.raises(ConfigError, match="scheduler.temporal.*2 steps are both step 0"):
        temporal_s(1, 2, TemporalConfig(mode="linear", start=0.0, end=0.4))
