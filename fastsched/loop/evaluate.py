"""Greedy accuracy on the held-out prompts. Changes no state of scheduler, learner or samplers of training."""

from collections import Counter
from typing import NamedTuple

import numpy as np

from fastsched.loop.assemble import Run
from fastsched.loop.rollouts import score
from fastsched.types import Sampling


class Accuracy(NamedTuple):
    overall: float  # all prompts alike
    by_bin: dict[str, float]


def evaluate(run: Run, step: int) -> Accuracy:
    """Accuracy on all held-out prompts, split over the ranks and written to the log by bin label."""
    prompts = [run.heldout.prompt(i) for i in run.ranks.mine(len(run.heldout))]
    sampling = Sampling(1, run.cfg.rollout.max_new_tokens, temperature=0.0)
    responses = run.rollout.generate(prompts, sampling, [0] * len(prompts))  # ranks that share an engine must all call it
    rewards, _, errors = score(run, prompts, responses) if prompts else (np.zeros((0, 1)), [], {})
    bins = int(run.heldout.bins.max(initial=0)) + 1
    local = np.zeros((2, bins))
    for prompt, reward in zip(prompts, rewards[:, 0], strict=True):
        local[:, prompt.bin] += 1, reward > run.cfg.scheduler.r_threshold
    total, right = run.ranks.all_reduce(local)
    labels = bin_labels(run, bins)
    accuracy = {labels[b]: right[b] / total[b] for b in range(bins) if total[b]}
    failed = _failures(run, errors, int(total.sum()), step)
    run.log.evaluation(step, accuracy, {labels[b]: int(total[b]) for b in range(bins) if total[b]}, failed)
    return Accuracy(float(right.sum() / total.sum()), accuracy)


def _failures(run: Run, errors: dict[str, int], prompts: int, step: int) -> int:
    """Responses of all ranks that could not be scored; the log hears of them by kind."""
    kinds: Counter[str] = Counter()
    for part in run.ranks.all_gather(errors):
        kinds.update(part)
    if kinds:
        listed = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
        run.log.warn(f"evaluation of step {step}: {kinds.total()} of {prompts} responses could not be scored ({listed}) and count as wrong")
    return kinds.total()


def bin_labels(run: Run, bins: int) -> list[str]:
    if run.cfg.data.task == "arithmetic":
        return [f"{d} digit{'s' if d > 1 else ''}" for d in run.cfg.data.digits]
    if run.cfg.data.task == "chain":
        return [f"{k} steps" for k in run.cfg.data.chain_steps]
    return ["all"] if bins == 1 else [f"bin {b}" for b in range(bins)]
