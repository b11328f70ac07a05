"""Every kind of sampler, driven through the scheduler: what must hold whatever the policy does."""

import json
import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastsched.config import LearnedConfig, SchedulerConfig
from fastsched.control.scheduler import Scheduler
from fastsched.control.window import unknown_success
from fastsched.types import Features, Outcomes, Selection, Stats

KINDS = ["adaptive", "fixed", "uniform", "sec", "adarft", "mopps", "greso", "vcrl", "replay", "speed", "dots", "learned",
         "adaptive-posterior", "learned-clusters"]
RESUMED, G = 20, 4
STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=math.nan,
              clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def features(rows: int, clusters: int = 5, width: int = 16) -> Features:
    rng = np.random.default_rng(rows)
    embedding = rng.standard_normal((rows, width))
    embedding /= np.linalg.norm(embedding, axis=1, keepdims=True)
    return Features(rng.integers(0, clusters, rows).astype(np.int32), rng.random(rows, np.float32), embedding.astype(np.float16))


def scheduler(kind: str, bins: np.ndarray, prompts: int, seed: int = 0, **changes) -> Scheduler:
    name, _, variant = kind.partition("-")
    cfg = SchedulerConfig(kind=name, learned=LearnedConfig(arms="clusters" if variant == "clusters" else "bins"),
                          inside_bins="posterior" if variant == "posterior" else "order", **changes)
    return Scheduler(cfg, bins, prompts, 10**6, seed, features(len(bins)))


def roll_out(selection: Selection, rng, p: np.ndarray, fail: float) -> Outcomes:
    """Artificial outcomes of success p [K] by bin; a share `fail` of scores is lost, of some prompts all, and some were not sampled."""
    draw = rng.random((len(selection.rows), 2 * G + 1))
    sampled = np.ones((len(draw), G), bool) if selection.responses is None else np.arange(G) < selection.responses[:, None]
    rewards = (draw[:, :G] < p[selection.bins][:, None]).astype(float)
    rewards[~sampled | (draw[:, G:-1] < fail) | (draw[:, -1:] < fail)] = np.nan
    return Outcomes(selection.rows, selection.bins, rewards, sampled * (1 + 3 * selection.bins[:, None]), np.zeros(rewards.shape, bool))


def step(one: Scheduler, rng, p, fail) -> list[int]:
    """One step of the whole scheduler; the rows drawn."""
    selection = one.next_prompts()
    one.observe(roll_out(selection, rng, p, fail), STATS)
    return selection.rows.tolist()


def check(sampler, kind: str, selection: Selection, expected: int, bins: np.ndarray) -> None:
    rows, held, floor = selection.rows.tolist(), sampler.sizes > 0, sampler.cfg.weight_floor
    assert len(rows) == len(set(rows)) == expected
    assert np.array_equal(selection.bins, bins[selection.rows])
    for weights, available in ((sampler.weights, held), *(((sampler.arm_weights, sampler.members > 0),) if "learned" in kind else ())):
        assert abs(weights.sum() - 1) < 1e-9 and weights.min() >= 0
        if kind in ("adaptive", "adaptive-posterior", "sec", "adarft") or weights is not sampler.weights:
            assert weights[available].min() >= floor / available.sum() - 1e-12


ANY = dict(seed=st.integers(0, 2**31), sizes=st.lists(st.integers(0, 12), min_size=1, max_size=5).filter(lambda sizes: sizes[-1]),
           share=st.floats(0.02, 1), fail=st.sampled_from([0.0, 0.1, 0.9, 1.0]), drift=st.floats(-0.02, 0.02))


@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(derandomize=True, max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**ANY)
def test_a_drive(kind, seed, sizes, share, fail, drift):
    drive(kind, seed, sizes, share, fail, drift, 80)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS[:-1])
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(**ANY)
def test_a_long_drive(kind, seed, sizes, share, fail, drift):
    """10,000 steps a kind, other ones each time."""
    drive(kind, seed, sizes, share, fail, drift, 250)


def drive(kind, seed, sizes, share, fail, drift, steps):
    """Exact, distinct batches and proper weights under any drift of the policy and any share of failed scores; the state, taken at a
    random step as strictly valid JSON, goes on in a fresh sampler exactly as in the old one."""
    bins, rng = np.repeat(np.arange(len(sizes)), sizes), np.random.default_rng(seed)
    kind = "learned-clusters" if kind == "learned" and seed % 2 else kind
    prompts, resume = max(1, int(share * len(bins))), int(rng.integers(0, steps - RESUMED))
    make = lambda: scheduler(kind, bins, prompts, seed % 1000).sampler
    one, other = make(), None
    logits = rng.normal(0, 2, len(sizes)) + drift * np.arange(steps)[:, None]
    unknown = unknown_success(len(sizes), 0.5)
    for t, p in enumerate(1 / (1 + np.exp(-logits))):
        success = replace(unknown, steps=t, ema=float(p.mean()), bins=tuple(p.tolist()), tried=(True,) * len(p))
        if t == resume:
            state, other = json.loads(json.dumps(one.state_dict(), allow_nan=False)), make()
            other.load_state_dict(state)
            assert other.state_dict() == one.state_dict() == state
        expected = one.candidates(prompts) if kind == "speed" else prompts
        selection = one.draw(prompts, success)
        check(one, kind, selection, expected, bins)
        outcomes = roll_out(selection, rng, p, fail)
        one.observe(outcomes, success)
        if other and t < resume + RESUMED:
            assert other.draw(prompts, success).rows.tolist() == selection.rows.tolist()
            other.observe(outcomes, success)
    json.dumps(one.state_dict(), allow_nan=False)


@pytest.mark.parametrize("kind", KINDS)
def test_failed_scores_alone_leave_what_is_known_as_it_was(kind):
    """NaN neither enters the state nor moves it: what the sampler knows stays, only its turn and its counters go on."""
    bins = np.repeat(np.arange(3), 40)
    one, rng = scheduler(kind, bins, 12), np.random.default_rng(0)
    for _ in range(10):
        step(one, rng, np.array([0.9, 0.5, 0.1]), 0.0)
    moving = {"rng", "deck", "weights", "arm_weights", "tokens", "reference_rows", "reference_success", "line"}
    known = lambda: {key: value for key, value in one.sampler.state_dict().items() if key not in moving}
    before = known()
    step(one, rng, np.array([0.9, 0.5, 0.1]), 1.0)
    if kind == "sec":  # published: an arm without a reward decays
        assert one.sampler.bandit == [0.5 * q for q in before["bandit"]]
    else:
        assert known() == before


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in ("speed", "dots")])  # which are refused with refills
@pytest.mark.parametrize("rows_a_bin, distinct", [(400, True), (10, False)])
def test_the_refills_of_a_step_are_other_prompts(kind, rows_a_bin, distinct):
    """As long as there are others: 30 rows cannot fill three batches of 16, but each batch is still of distinct prompts."""
    bins = np.repeat(np.arange(3), rows_a_bin)
    one, rng = scheduler(kind, bins, 16), np.random.default_rng(0)
    for t in range(60):  # more than one pass over all rows
        outcomes = [roll_out(one.next_prompts(), rng, np.array([0.9, 0.5, 0.1]), 0.0) for _ in range(3)]
        rows = np.concatenate([o.rows for o in outcomes])
        assert len(set(rows.tolist())) == 48 or not distinct, t
        assert all(len(set(o.rows.tolist())) == 16 for o in outcomes)
        one.observe(Outcomes(*(np.concatenate([getattr(o, name) for o in outcomes])
                               for name in ("rows", "bins", "rewards", "lengths", "truncated"))), STATS)


@pytest.mark.parametrize("kind", KINDS)
def test_every_prompt_keeps_being_visited(kind):
    """Under a drifting policy no prompt is forgotten: every row comes in the first half of a long run and again in the second."""
    bins = np.repeat(np.arange(4), 25)
    one, rng = scheduler(kind, bins, 20 if kind == "greso" else 10, weight_floor=0.2), np.random.default_rng(1)
    steps = 200  # GRESO has no floor but a chance of 1 % at each offer, hence its larger batches
    for half in range(2):
        seen: set[int] = set()
        for t in range(steps):
            p = 1 / (1 + np.exp(-(np.array([3.0, 1.0, -1.0, -3.0]) + 2.0 * (half + t / steps))))
            seen |= set(step(one, rng, p, 0.0))
        assert seen == set(range(100)), half
