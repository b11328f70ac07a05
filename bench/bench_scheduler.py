"""Overheads of the scheduler: a decision plus a batch of 512 prompts under 5 ms, opening 10 million rows under 2 s."""

import math

import numpy as np
import pytest

from fastsched.config import AdsConfig, SchedulerConfig
from fastsched.control.scheduler import Scheduler
from fastsched.types import Features, Outcomes, Stats

PROMPTS, RESPONSES = 512, 8
STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=math.nan,
              clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def random_bins(rows, bins):
    return np.random.default_rng(0).integers(0, bins, rows)


def random_features(rows, clusters=64):
    rng = np.random.default_rng(2)
    cluster, difficulty = rng.integers(0, clusters, rows, np.int32), rng.gamma(2.0, size=rows).astype(np.float32)
    return Features(cluster, difficulty, np.zeros((rows, 0), np.float16))


@pytest.mark.parametrize("bins", [4, 100])
@pytest.mark.parametrize("rows", [10**4, 10**6, 10**7])
@pytest.mark.parametrize("kind", ["adaptive", "fixed", "uniform", "sec", "adarft", "mopps", "greso", "ads"])
def bench_step(benchmark, kind, rows, bins):
    features = random_features(rows) if kind == "ads" else None
    scheduler = Scheduler(SchedulerConfig(kind=kind, ads=AdsConfig(clusters=16)), random_bins(rows, bins), PROMPTS, 1000, 0, features)
    rewards = np.random.default_rng(1).random((PROMPTS, RESPONSES))
    counts = np.ones((PROMPTS, RESPONSES), np.int64)

    def step():
        selection = scheduler.next_prompts()
        solved = (rewards < 0.9 - 0.8 * selection.bins[:, None] / bins).astype(np.float64)
        scheduler.observe(Outcomes(selection.rows, selection.bins, solved, counts, counts == 0), STATS)
        return scheduler.knobs()

    benchmark.pedantic(step, rounds=200, warmup_rounds=5)
    benchmark.extra_info["prompts"] = PROMPTS
    assert benchmark.stats.stats.median < 5e-3


@pytest.mark.parametrize("rows", [10**4, 10**6, 10**7])
def bench_open(benchmark, rows):
    bins = random_bins(rows, 4)
    scheduler = benchmark.pedantic(Scheduler, (SchedulerConfig(), bins, PROMPTS, 1000, 0), rounds=3, warmup_rounds=1)
    held = scheduler.sampler.deck.bins.nbytes + scheduler.sampler.deck.rows.nbytes
    benchmark.extra_info["bytes_per_prompt"] = held / rows
    assert benchmark.stats.stats.median < 2.0 and held / rows <= 16


@pytest.mark.parametrize("rows", [10**4, 10**6, 10**7])
def bench_open_ads(benchmark, rows):
    bins, features = random_bins(rows, 4), random_features(rows)
    cfg = SchedulerConfig(kind="ads")
    scheduler = benchmark.pedantic(Scheduler, (cfg, bins, PROMPTS, 1000, 0, features), rounds=3, warmup_rounds=1)
    s = scheduler.sampler
    held = sum(array.nbytes for array in (s.order, s.cluster, s.bins, s.deck.rows, s.deck.bins))
    benchmark.extra_info["bytes_per_prompt"] = held / rows
    assert benchmark.stats.stats.median < 2.0 and held / rows <= 16
