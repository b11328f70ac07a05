"""Overheads of the scheduler: a decision plus a batch of 512 prompts under 5 ms, opening 10 million rows under 2 s, state of at most
16 bytes a prompt."""

import json
import math
from functools import lru_cache

import numpy as np
import pytest

from fastsched.config import AdsConfig, SchedulerConfig
from fastsched.control.scheduler import Scheduler
from fastsched.types import Features, Outcomes, Stats

PROMPTS, RESPONSES, WIDTH = 512, 8, 128
KINDS = ["adaptive", "fixed", "uniform", "sec", "adarft", "mopps", "greso", "vcrl", "replay", "speed", "dots", "learned", "ads",
         "adaptive-posterior"]
STATS = Stats(loss=0.0, entropy=1.0, kl=0.01, kl_kind="exact", drift=0.01, grad_norm=1.0, grad_snr=math.nan,
              clip_fraction=0.0, ratio_deviation=0.0, kept_fraction=1.0, flat_groups=0.0, skipped=0, lr=1e-6)


def random_bins(rows, bins):
    return np.random.default_rng(0).integers(0, bins, rows)


@lru_cache(maxsize=1)
def random_features(rows):
    """64 clusters; embeddings of 128 numbers, zeros but for the first rows."""
    rng = np.random.default_rng(2)
    cluster, difficulty = rng.integers(0, 64, rows, np.int32), rng.gamma(2.0, size=rows).astype(np.float32)
    embedding = np.zeros((rows, WIDTH), np.float16)
    embedding[:10_000] = rng.standard_normal((10_000, WIDTH)) / np.sqrt(WIDTH)
    return Features(cluster, difficulty, embedding)


def opened(kind, rows, bins):
    kind, _, inside = kind.partition("-")
    cfg = SchedulerConfig(kind=kind, inside_bins=inside or "order", ads=AdsConfig(clusters=16))
    return Scheduler(cfg, bins, PROMPTS, 1000, 0, random_features(rows))


def one_step(scheduler, rewards, bins):
    selection = scheduler.next_prompts()
    solved = (rewards[:len(selection.rows)] < 0.9 - 0.8 * selection.bins[:, None] / bins).astype(np.float64)
    lengths = np.ones(solved.shape, np.int64)
    scheduler.observe(Outcomes(selection.rows, selection.bins, solved, lengths, lengths == 0), STATS)
    return scheduler.knobs()


def bytes_a_prompt(scheduler, rows):
    """Of every array over prompts that the sampler holds, features aside."""
    sampler = scheduler.sampler
    arrays = {id(a): a for part in (sampler, sampler.deck, getattr(sampler, "posterior", None)) if part
              for name, a in vars(part).items()
              if isinstance(a, np.ndarray) and a.shape[:1] == (rows,) and name != "embedding"}
    return sum(a.nbytes for a in arrays.values()) / rows


@pytest.mark.parametrize("bins", [4, 100])
@pytest.mark.parametrize("rows", [10**4, 10**6, 10**7])
@pytest.mark.parametrize("kind", KINDS)
def bench_step(benchmark, kind, rows, bins):
    scheduler = opened(kind, rows, random_bins(rows, bins))
    rewards = np.random.default_rng(1).random((4 * PROMPTS, RESPONSES))
    benchmark.pedantic(one_step, (scheduler, rewards, bins), rounds=200, warmup_rounds=5)
    benchmark.extra_info["prompts"] = PROMPTS
    assert benchmark.stats.stats.median < 5e-3


@pytest.mark.parametrize("rows", [10**4, 10**6, 10**7])
@pytest.mark.parametrize("kind", KINDS)
def bench_open(benchmark, kind, rows):
    bins = random_bins(rows, 4)
    random_features(rows)
    scheduler = benchmark.pedantic(opened, (kind, rows, bins), rounds=3, warmup_rounds=1)
    held = benchmark.extra_info["bytes_per_prompt"] = bytes_a_prompt(scheduler, rows)
    assert benchmark.stats.stats.median < 2.0 and held <= 16


@pytest.mark.parametrize("kind", KINDS)
def bench_state(benchmark, kind):
    """The state of 10 million prompts after 40 steps: only what was seen is written."""
    rows = 10**7
    scheduler, rewards = opened(kind, rows, random_bins(rows, 4)), np.random.default_rng(1).random((4 * PROMPTS, RESPONSES))
    for _ in range(40):
        one_step(scheduler, rewards, 4)
    text = benchmark.pedantic(lambda: json.dumps(scheduler.state_dict()), rounds=5, warmup_rounds=1)
    benchmark.extra_info["kilobytes"] = len(text) / 1000
    assert benchmark.stats.stats.median < 1.0 and len(text) < 60 * 4 * PROMPTS * 40


def see_everything(scheduler, rows):
    """As after long training: every prompt has a posterior or a streak of its own."""
    rng, sampler = np.random.default_rng(3), scheduler.sampler
    if posterior := getattr(sampler, "posterior", None):
        posterior.wins[:], posterior.losses[:] = (rng.gamma(2.0, size=rows).astype(np.float32) for _ in range(2))
    else:
        sampler.streak[:] = rng.integers(1, 9, rows)


@pytest.mark.parametrize("kind", ["mopps", "adaptive-posterior", "greso"])
def bench_resume(benchmark, kind):
    """From the state of 10 million prompts that were all seen, of the kinds that keep something of each."""
    rows = 10**7
    bins = random_bins(rows, 4)
    scheduler = opened(kind, rows, bins)
    see_everything(scheduler, rows)
    text = json.dumps(scheduler.state_dict())
    fresh = lambda: ((opened(kind, rows, bins),), {})
    benchmark.pedantic(lambda again: again.load_state_dict(json.loads(text)), setup=fresh, rounds=3, warmup_rounds=1)
    benchmark.extra_info["bytes_per_prompt"] = len(text) / rows
    assert benchmark.stats.stats.median < 2.0 and len(text) <= 16 * rows
