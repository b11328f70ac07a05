"""Greedy accuracy on the held-out prompts. Changes no state of scheduler, learner or samplers of training."""

from collections import Counter
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from fastsched.config import Config, DataConfig
from fastsched.data.datasets import PromptSet
from fastsched.engines.rollout.contract import RolloutEngine
from fastsched.loop.outcomes import Scorer
from fastsched.record.log import RunLog
from fastsched.types import Ranks, Sampling


class Accuracy(NamedTuple):
    overall: float  # all prompts alike
    by_bin: dict[str, float]


@dataclass(frozen=True)
class Evaluator:
    cfg: Config
    heldout: PromptSet
    rollout: RolloutEngine
    scorer: Scorer
    ranks: Ranks
    log: RunLog

    def evaluate(self, step: int) -> Accuracy:
        """Accuracy on all held-out prompts, split over the ranks and written to the log by bin label."""
        prompts = [self.heldout.prompt(i) for i in self.ranks.mine(len(self.heldout))]
        sampling = Sampling(1, self.cfg.rollout.max_new_tokens, temperature=0.0)
        responses = self.rollout.generate(prompts, sampling, [0] * len(prompts))  # ranks that share an engine must all call it
        scores = self.scorer.score(prompts, responses)
        bins = int(self.heldout.bins.max(initial=0)) + 1
        local = np.zeros((2, bins))
        for prompt, reward in zip(prompts, scores.rewards, strict=True):
            local[:, prompt.bin] += 1, reward > self.cfg.scheduler.r_threshold
        total, right = self.ranks.all_reduce(local)
        labels = bin_labels(self.cfg.data, bins)
        accuracy = {labels[b]: right[b] / total[b] for b in range(bins) if total[b]}
        failed = self._failures(scores.errors, int(total.sum()), step)
        self.log.evaluation(step, accuracy, {labels[b]: int(total[b]) for b in range(bins) if total[b]}, failed)
        return Accuracy(float(right.sum() / total.sum()), accuracy)

    def _failures(self, errors: dict[str, int], prompts: int, step: int) -> int:
        """Responses of all ranks that could not be scored; the log hears of them by kind."""
        kinds: Counter[str] = Counter()
        for part in self.ranks.all_gather(errors):
            kinds.update(part)
        if kinds:
            by_kind = ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
            self.log.warn(f"evaluation of step {step}: {kinds.total()} of {prompts} responses could not be scored ({by_kind}) "
                          "and count as wrong")
        return kinds.total()


def bin_labels(cfg: DataConfig, bins: int) -> list[str]:
    if cfg.task == "arithmetic":
        return [f"{d} digit{'s' if d > 1 else ''}" for d in cfg.digits]
    if cfg.task == "chain":
        return [f"{k} steps" for k in cfg.chain_steps]
    return ["all"] if bins == 1 else [f"bin {b}" for b in range(bins)]
