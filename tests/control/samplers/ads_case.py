"""Samplers, features, outcomes and a second writing of the collision rule, for the tests of ADS."""

import numpy as np

from fastsched.config import AdsConfig, SchedulerConfig
from fastsched.control.samplers.ads import AdsSampler
from fastsched.control.window import unknown_success
from fastsched.types import Features, Outcomes

UNKNOWN = unknown_success(2, 0.5)
BAND = (0.33, 0.67)


def features(members, seed=0):
    """Clusters of the given sizes in random row order; some difficulties are equal."""
    rng = np.random.default_rng(seed)
    cluster = rng.permutation(np.repeat(np.arange(len(members)), members)).astype(np.int32)
    difficulty = rng.integers(-3, 40, len(cluster)).astype(np.float32) / 7
    return Features(cluster, difficulty, np.zeros((len(cluster), 1), np.float16))


def sampler(members, prompts, seed=0, floor=0.0, feats=None, **ads):
    feats = feats or features(members)
    bins = np.arange(len(feats.cluster)) % 2
    cfg = SchedulerConfig(kind="ads", weight_floor=floor, ads=AdsConfig(**ads))
    return AdsSampler(cfg, bins.astype(np.uint16), np.bincount(bins), prompts, seed, feats)


def outcomes(rows, rewards):
    rewards = np.asarray(rewards, dtype=float)
    counts = np.ones(rewards.shape, np.int64)
    return Outcomes(np.asarray(rows), np.asarray(rows) % 2, rewards, counts, counts == 0)


def graded(rows, correct, responses=8):
    """`correct` of 8 responses to every row."""
    return outcomes(rows, np.arange(responses) < np.broadcast_to(correct, len(rows))[:, None])


def by_hand(positions, rates, n, low, high):
    """The rule of algorithms.md 2.3 in the order and words of its text, over a list of slots."""
    if n <= len(positions):
        return sorted(positions)
    slots = [False] * n
    for p in positions:
        if p not in rates or low <= rates[p] <= high:
            slots[p] = True
    jobs = [(p, -1) for p in sorted(positions) if p in rates and rates[p] < low]
    jobs += [(p, +1) for p in sorted(positions)[::-1] if p in rates and rates[p] > high]
    for p, direction in jobs:
        target = min(n - 1, max(0, p + direction))
        tries = [target]
        for radius in range(1, n + 1):
            tries += [target + direction * radius, target - direction * radius]
        slots[next(t for t in tries if 0 <= t < n and not slots[t])] = True
    return [i for i, used in enumerate(slots) if used]
