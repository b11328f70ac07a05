"""A rank's responses -> samples -> mini-batches, one for each optimizer step -> packed micro-batches, equally many on every rank.

P prompts, G responses a prompt, T response tokens of this rank, one response after another.
"""

from dataclasses import replace
from typing import Sequence

import numpy as np

from fastsched.config import Config
from fastsched.learn.balance import balanced
from fastsched.learn.credit import Credit
from fastsched.learn.losses import LOSSES, token_weights
from fastsched.learn.packing import Sample, blank, dummy, pack
from fastsched.learn.snr import split_by_bin
from fastsched.types import Knobs, MicroBatch, Ranks, Response


def scored_samples(responses: Sequence[Response], rewards: np.ndarray, credit: Credit, old_logp: np.ndarray | None,
                   bins: np.ndarray | None) -> list[Sample]:
    """Responses that have a reward [P, G], with what each of their tokens counts; no weights yet.

    old_logp [T] or None, bins [N] difficulty bin of every dataset row or None.
    """
    cuts, group = np.cumsum(np.array([len(r.token_ids) for r in responses], np.int64))[:-1], rewards.shape[1]
    split = lambda values: [None] * len(responses) if values is None else np.split(values, cuts)[:len(responses)]  # [] of no response
    columns = zip(split(credit.keep), split(credit.advantage), split(old_logp), split(credit.kl_scale), strict=True)
    return [
        Sample(i // group, r.prompt_ids, r.token_ids, r.logp, advantage, keep, 0.0, old, kl_scale, -1 if bins is None else int(bins[r.row]))
        for i, (r, (keep, advantage, old, kl_scale)) in enumerate(zip(responses, columns, strict=True)) if np.isfinite(rewards.flat[i])
    ]


def mini_batches(samples: Sequence[Sample], groups: Sequence[int], cfg: Config, ranks: Ranks, knobs: Knobs,
                 step: int) -> list[list[MicroBatch]]:
    """The micro-batches of each optimizer step, which takes a random share of the groups of all ranks; every rank calls it.

    groups: this rank's groups with a score.
    """
    if cfg.learner.updates_per_batch == 1:
        return [micro_batches(samples, cfg, ranks, knobs)]
    everywhere = sorted(index for part in ranks.all_gather([global_index(g, ranks) for g in groups]) for index in part)
    order = np.random.default_rng([cfg.train.seed, step]).permutation(everywhere)
    parts = [set(part.tolist()) for part in np.array_split(order, cfg.learner.updates_per_batch)]
    return [micro_batches([s for s in samples if global_index(s.group, ranks) in part], cfg, ranks, knobs) for part in parts]


def global_index(group: int, ranks: Ranks) -> int:
    """Of this rank's group in the batch of all ranks, which is dealt out in turn; where refills or DOTS compose it otherwise, still
    a number of its own, but one that depends on the number of ranks."""
    return group * ranks.world_size + ranks.rank


def micro_batches(samples: Sequence[Sample], cfg: Config, ranks: Ranks, knobs: Knobs) -> list[MicroBatch]:
    """Of one optimizer step, weighted by denominators that are summed over all ranks once; every rank calls it."""
    skips_flat = cfg.skips_flat(knobs.entropy_coef, knobs.kl_coef)
    kept = np.array([s.keep.sum() for s in samples], np.int64)
    total_kept, total_responses = ranks.all_reduce(np.array([kept.sum(), len(samples)], np.float64))
    weights = token_weights(LOSSES[cfg.learner.loss], kept, total_kept, total_responses, cfg.rollout.max_new_tokens)
    trained = [replace(s, weight=w) for s, w in zip(samples, weights, strict=True) if not (skips_flat and s.flat)]
    if cfg.learner.balance and ranks.world_size > 1:
        trained = balanced(trained, cfg.learner.share_prompts, ranks.rank, ranks.all_gather)
    return packed(trained, cfg, ranks, by_bin=cfg.log.snr_bins)


def packed(samples: Sequence[Sample], cfg: Config, ranks: Ranks, by_bin: bool = False) -> list[MicroBatch]:
    """As many micro-batches as on the rank that has most; those that only even out the number carry no group."""
    budget = cfg.learner.micro_batch_tokens
    width = budget if cfg.model.attention == "flash_attention_2" else None
    parts = split_by_bin(samples) if by_bin else [samples]
    micro = [m for part in parts for m in pack(part, token_budget=budget, share_prompts=cfg.learner.share_prompts, row_width=width)]
    count = int(ranks.all_reduce(np.array([len(micro)], np.float64), op="max")[0])
    return micro + [dummy(micro[0] if micro else blank())] * (max(count, 1) - len(micro))
