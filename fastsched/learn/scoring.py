"""What the policy says of tokens without learning from them. T response tokens of B responses, one after another."""

from typing import NamedTuple, Sequence

import numpy as np
import torch
from fastsched_kernels.linear import linear_token_stats

from fastsched.config import Config
from fastsched.learn.batching import packed
from fastsched.learn.contract import LearnerEngine
from fastsched.learn.objective import StepObjective
from fastsched.learn.packing import Sample, pack
from fastsched.types import Response


class PolicyScores(NamedTuple):
    """Of the policy before the update; 0 where it was not asked for."""

    logp: np.ndarray  # [T] float32, at the sampling temperature
    entropy: np.ndarray  # [T] float32, nats


def score_responses(engine: LearnerEngine, cfg: Config, objective: StepObjective, responses: Sequence[Response],
                    keep: np.ndarray | None = None) -> PolicyScores:
    """One pass without gradient over every response token, or those of `keep` [T] bool; every rank calls it."""
    lengths = np.array([len(r.token_ids) for r in responses], np.int64)
    keep = np.ones(lengths.sum(), bool) if keep is None else keep
    starts = np.cumsum(lengths) - lengths
    samples = [Sample(i // cfg.rollout.responses, r.prompt_ids, r.token_ids, r.logp, 0.0, kept, 1.0)
               for i, (r, kept) in enumerate(zip(responses, np.split(keep, starts[1:])[:len(lengths)], strict=True))]
    out = PolicyScores(np.zeros(len(keep), np.float32), np.zeros(len(keep), np.float32))
    for micro in packed(samples, cfg, engine.ranks):
        target = torch.from_numpy(micro.targets).to(engine.device)
        found = engine.score(micro, lambda head, target=target: objective.score(head, target))
        if micro.groups:
            at = starts[micro.responses] + micro.offsets
            out.logp[at], out.entropy[at] = found.logp.float().cpu().numpy(), found.entropy.float().cpu().numpy()
    return out


def old_logp(engine: LearnerEngine, cfg: Config, objective: StepObjective, responses: Sequence[Response], scores: PolicyScores | None,
             keep: np.ndarray) -> np.ndarray | None:
    """Log-probabilities [T] float32 that ratios are taken against; None: the policy's own, so that every ratio is one.

    `scores` are those of every token where the step has them; without, tokens of `keep` [T] bool are scored where it is needed.
    """
    if objective.bypass:
        return np.concatenate([np.asarray(r.logp, np.float32) for r in responses] or [np.zeros(0, np.float32)])
    if cfg.learner.updates_per_batch == 1 and not objective.divides:
        return None
    return (scores or score_responses(engine, cfg, objective, responses, keep)).logp


def sequence_logp(engine: LearnerEngine, token_ids: Sequence[int]) -> np.ndarray:
    """[len - 1] float32 log-probability (temperature 1) of each token after the first."""
    n = len(token_ids) - 1
    sample = Sample(0, token_ids[:1], token_ids[1:], np.zeros(n, np.float32), 0.0, np.ones(n, bool), 1.0)
    micro = pack([sample], token_budget=len(token_ids), share_prompts=False)[0]
    target = torch.from_numpy(micro.targets).to(engine.device)
    score = lambda head: linear_token_stats(head.hidden, head.weight, target, softcap=head.softcap, bias=head.bias).logp
    return engine.score(micro, score).float().cpu().numpy()
