"""Gradient SNR: its formulas against known signals, and by difficulty bin on real DeepSpeed."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from plain import BASE, KNOBS, P, batch, gradient, make

from fastsched.config import SchedulerConfig
from fastsched.learn.packing import Sample, pack
from fastsched.learn.snr import BinGradients, GradientSnr, bin_snr, gradient_snr, split_by_bin


@pytest.mark.parametrize("sizes", [[4] * 12, [1, 2, 5, 8] * 4])
@pytest.mark.parametrize("noise", [0.5, 3.0])
def test_recovers_signal_and_noise_of_synthetic_gradients(sizes, noise):
    """The mean of numerator and denominator over many batches against the known |G|^2 and tr(Sigma)."""
    rng, sizes, dim = np.random.default_rng(0), np.array(sizes), 20
    truth = rng.normal(size=dim)
    ratios = []
    for _ in range(400):
        groups = truth + noise * rng.normal(size=(sizes.sum(), dim))
        shares = [part.sum(0) / sizes.sum() for part in np.split(groups, np.cumsum(sizes)[:-1])]
        squares = np.array([s @ s for s in shares])
        ratios.append(gradient_snr(squares, sizes, float(np.linalg.norm(sum(shares)))))
    expected = truth @ truth / (noise**2 * dim)
    assert np.nanmedian(ratios) == pytest.approx(expected, rel=0.2)


def test_groups_that_are_left_out_count_as_the_zeros_they_are():
    """A third of the groups has a gradient; leaving the others out tells the same ratio, and without `share` another."""
    rng, dim, ratios, bare, kept = np.random.default_rng(0), 20, [], [], []
    truth = rng.normal(size=dim)
    for _ in range(600):
        groups = (truth + 2.0 * rng.normal(size=(120, dim))) * (rng.random(120) < 1 / 3)[:, None]
        for found, left in ((kept, groups), (ratios, groups[groups.any(1)])):
            parts = np.array_split(left / 120, 8)
            sizes, squares = np.array([len(p) for p in parts]), np.array([p.sum(0) @ p.sum(0) for p in parts])
            norm = float(np.linalg.norm(left.sum(0) / 120))
            found.append(gradient_snr(squares, sizes, norm, len(left) / 120))
        bare.append(gradient_snr(squares, sizes, norm))
    expected = (truth @ truth / 9) / (4 * dim / 3 + truth @ truth * (1 / 3 - 1 / 9))
    assert np.median(kept) == pytest.approx(expected, rel=0.1) and np.median(ratios) == pytest.approx(expected, rel=0.1)
    assert np.median(bare) > 2.5 * expected


def test_undefined_is_nan_not_a_number_to_steer_by():
    assert np.isnan(gradient_snr(np.array([1.0]), np.array([8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, np.nan]), np.array([8, 8]), 1.0))
    assert np.isnan(gradient_snr(np.array([1.0, 1.0]), np.array([8, 8]), float("nan")))


def samples(groups: int, responses: int = 4, length: int = 6) -> list[Sample]:
    """Prompts of 4 tokens, two difficulty bins in turn."""
    return [Sample(g, (g, 1, 2, 3), tuple(range(length)), np.zeros(length, np.float32), 1.0, np.ones(length, bool), 1.0, bin=g % 2)
            for g in range(groups) for _ in range(responses)]


ALONE = SimpleNamespace(all_gather=lambda own: [own])


def test_a_group_over_several_micro_batches_has_no_snr():
    """Unshared responses are packed one by one: then the gradients of two micro-batches may be of one group and are not independent."""
    apart = pack(samples(3), token_budget=20, share_prompts=False)
    assert len(apart) > 3
    whole = pack(samples(3), token_budget=30, share_prompts=True)
    assert [len(m.groups) for m in whole] == [1] * 3
    ratio = lambda micro: GradientSnr(np.ones(1), ALONE, [1.0] * len(micro), {}, micro).ratio(1.0)
    assert np.isnan(ratio(apart)) and np.isfinite(ratio(whole))


def test_a_bin_is_unknown_where_one_of_its_groups_lies_in_several_micro_batches():
    """Four groups a bin in halves of two; only the groups of bin 0 are cut over micro-batches."""
    micro = [m for part in split_by_bin(samples(8))
             for m in pack(part, token_budget=27 if part[0].bin == 0 else 200, share_prompts=part[0].bin == 1)]
    assert [m.bin for m in micro] == sorted(m.bin for m in micro) and sum(m.bin == 1 for m in micro) == 2
    found = GradientSnr(np.ones(3), ALONE, [1.0] * len(micro), {0: 3.0, 1: 3.0}, micro).by_bin()
    assert np.isnan(found[0]) and np.isfinite(found[1])


def synthetic(rng, truth, noise, sizes):
    groups = truth + noise * rng.normal(size=(sum(sizes), len(truth)))
    shares = [part.sum(0) / 100 for part in np.split(groups, np.cumsum(sizes)[:-1])]
    total = sum(shares)
    return BinGradients(np.array([s @ s for s in shares]), np.array(sizes), float(total @ total))


def test_bin_snr_recovers_known_signal_and_noise_over_ranks():
    """Two ranks with unequal numbers of groups: the ratio of the averaged estimates against |G|^2 / tr(Sigma)."""
    rng = np.random.default_rng(0)
    truth = rng.normal(size=20)
    found = [bin_snr([synthetic(rng, truth, 2.0, [3, 3, 2]), synthetic(rng, truth, 2.0, [4, 4])]) for _ in range(800)]
    assert np.median(found) == pytest.approx(truth @ truth / (4.0 * 20), rel=0.15)
    assert np.isnan(bin_snr([synthetic(rng, truth, 2.0, [5])])) and np.isnan(bin_snr([]))


def test_snr_by_bin_comes_from_micro_batches_of_one_bin(model_path, tmp_path):
    """Squares and sums against the gradients that the hooks saw; the update itself is that of a run without it."""
    responses, rewards = batch(model_path)
    plain, split = make(model_path, tmp_path), make(model_path, tmp_path, snr_bins=True)
    (without, a), (stats, b) = gradient(plain, responses, rewards, KNOBS), gradient(split, responses, rewards, KNOBS)
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-3, atol=1e-6)
    assert without.snr_bins == () and len(stats.snr_bins) == 2
    single = {}
    for group in range(P):  # the gradient of one prompt, in the global denominators
        alone = np.full_like(rewards, np.nan)
        alone[group] = rewards[group]
        kept = sum(len(responses[i].token_ids) for i in range(len(responses)) if np.isfinite(alone.flat[i]))
        total = sum(len(responses[i].token_ids) for i in range(len(responses)) if np.isfinite(rewards.flat[i]))
        g = gradient(make(model_path, tmp_path), responses, alone, KNOBS)[1]
        single[group] = torch.cat([v.flatten() for v in g.values()]).double() * kept / total
    for b in range(2):  # groups b and b + 2
        pair = [single[b], single[b + 2]]
        squares = [float(x @ x) for x in pair]
        truth = bin_snr([BinGradients(np.array(squares), np.array([1, 1]), float(sum(pair) @ sum(pair)))])
        trace = float((pair[0] - pair[1]).square().sum()) / 2
        assert stats.snr_bins[b] == pytest.approx(truth, rel=1e-4, abs=1e-4 * sum(squares) / trace)  # fp32 norms, of which most cancels


def test_bins_and_copies_are_the_same_at_every_zero_stage(model_path, tmp_path):
    found = []
    for stage in (0, 1, 3):
        cfg = replace(BASE, zero_stage=stage, kl="exact", reference="copy")
        learner = make(model_path, tmp_path, cfg, scheduler=SchedulerConfig(copy_every=2), snr_bins=True)
        learner.update(*batch(model_path, 1), KNOBS, 1)
        found.append(learner.update(*batch(model_path, 2), replace(KNOBS, copy_reference=True), 2))
    for stats in found:
        assert stats.snr_bins == pytest.approx(found[0].snr_bins, rel=1e-3) and stats.kl < 1e-6
