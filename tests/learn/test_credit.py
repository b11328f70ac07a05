import numpy as np
import pytest
import torch
from fastsched_kernels.trajectory import trajectory_keep

from fastsched.config import KlGateConfig, SchedulerConfig, TemporalConfig
from fastsched.learn.credit import entropy_weighted, keep_mask, kl_gate, needs_entropy, token_credit
from fastsched.types import Knobs

LENGTHS = np.array([1, 4, 3])
KNOBS = Knobs(weights=(), r_threshold=0.5, entropy_coef=0.0, kl_coef=0.0, ema_alpha=0.9, lr_scale=1.0, temporal_s=0.5, rule="")


def test_entropy_weighted_advantage_of_the_release():
    """algorithms.md 1.4 with alpha 0.4, kappa 2: additive, bounded by |A| / 2, zero for A = 0, never turns the sign."""
    a, h = np.array([1.0, 1.0, -1.0, 0.0, -0.2]), np.array([0.5, 3.0, 3.0, 3.0, 3.0])
    np.testing.assert_allclose(entropy_weighted(a, h, 1.0), [1.2, 1.5, -0.5, 0.0, -0.1])
    np.testing.assert_allclose(entropy_weighted(a, h, 0.5), [1.1, 1.25, -0.75, 0.0, -0.15])
    np.testing.assert_array_equal(entropy_weighted(a, h, 0.0), a)


def test_the_kernels_proxies_and_the_end_of_the_schedule():
    for proxy in ("suffix", "prefix"):
        truth = trajectory_keep(torch.from_numpy(LENGTHS), 0.5, proxy=proxy).keep.numpy()
        np.testing.assert_array_equal(keep_mask(LENGTHS, 0.5, proxy), truth)
    for proxy in ("suffix", "prefix", "entropy", "random", "tp_score", "advantage"):
        assert keep_mask(LENGTHS, 0.0, proxy).all()
    assert keep_mask(LENGTHS, 0.9, "advantage").all()


def test_random_keeps_a_share_that_depends_on_the_response_alone():
    """Not on the rank it lies on, nor on what stands before it."""
    lengths, seeds = np.array([4000, 6000]), [(0, 3, 7, 0), (0, 3, 7, 1)]
    kept = keep_mask(lengths, 0.8, "random", seeds=seeds)
    assert abs(kept.mean() - 0.2) < 5 * np.sqrt(0.16 / 10000)
    np.testing.assert_array_equal(keep_mask(lengths[1:], 0.8, "random", seeds=seeds[1:]), kept[4000:])
    assert (keep_mask(lengths[:1], 0.8, "random", seeds=seeds[1:]) != kept[:4000]).any()
    assert keep_mask(lengths[:0], 0.8, "random", seeds=[]).shape == (0,)


def test_tp_score_keeps_late_tokens_and_never_none_of_a_response():
    score = np.array([0.1, 0.7, 0.2, 0.6, 0.1, 0.1, 0.2, 0.3])
    assert keep_mask(LENGTHS, 0.6, "tp_score", tp_score=score).tolist() == [True, True, False, True, False, False, False, True]


def test_kl_gate_is_a_sigmoid_of_the_entropy_below_its_threshold():
    entropy = np.array([2.0, 0.0, 1.0, 2.0, 3.0, 0.3, 0.1, 0.2], np.float32)
    sigmoid = lambda x: 1 / (1 + np.exp(-np.asarray(x)))
    for h0, width in ((1.0, 0.5), (0.5, 0.5), (1.0, 0.1)):
        np.testing.assert_allclose(kl_gate(entropy, h0, width), sigmoid((h0 - entropy) / width), rtol=1e-6)
    assert kl_gate(np.array([0.0, 1e4]), 1.0, 0.1).tolist() == pytest.approx([1.0, 0.0], abs=1e-4)


def test_the_gate_waits_for_its_threshold_and_asks_for_entropies():
    gate = SchedulerConfig(kl_gate=KlGateConfig(enabled=True))
    entropy = np.ones(8, np.float32)
    credit = lambda knobs: token_credit(gate, knobs, LENGTHS, np.ones(3), entropy=entropy, tp_score=None, seeds=[])
    assert credit(KNOBS).kl_scale is None
    opened = Knobs(**{**KNOBS.__dict__, "kl_gate": 1.0})
    assert credit(opened).kl_scale.tolist() == [0.5] * 8
    assert needs_entropy(gate, KNOBS) and not needs_entropy(SchedulerConfig(), KNOBS)
    for proxy, needed in (("advantage", True), ("entropy", True), ("suffix", False), ("tp_score", False)):
        assert needs_entropy(SchedulerConfig(temporal=TemporalConfig(mode="linear", proxy=proxy)), KNOBS) == needed
