"""The greedy evaluation, where some responses cannot be scored."""

import json
from dataclasses import dataclass, field

import numpy as np
import pytest

from fastsched.config import DataConfig
from fastsched.data.rewards import RewardResult
from fastsched.engines.ranks import Ranks
from fastsched.loop.evaluation import Evaluator, bin_labels
from fastsched.loop.outcomes import Scorer
from fastsched.types import Response


class Pool:
    """The fault: scores the first response of a call with 1 and fails on the others as it is told."""

    def __init__(self, *kinds: str):
        self.kinds = kinds

    def score(self, items):
        rewards = [1.0] + [np.nan] * (len(items) - 1)
        errors = {kind: self.kinds.count(kind) for kind in self.kinds}
        return RewardResult(np.array(rewards), errors, {k: f"response {len(items)}: odd" for k in errors}, np.zeros(len(items), bool))


@dataclass(frozen=True)
class WithOthers(Ranks):
    """One rank that hears what others gather."""

    others: list = field(default_factory=list)

    def all_gather(self, value):
        return [value, *self.others]


@pytest.fixture
def evaluator(parts, log):
    """On a random model's `generate` and four held-out prompts."""
    return lambda pool, *others: Evaluator(parts.cfg, parts.heldout, parts.rollout, Scorer(parts.tokenizer, pool, log),
                                           WithOthers(others=list(others)), log)


def text_of(log) -> str:
    return (log.run_dir / "log.txt").read_text()


@pytest.mark.parametrize("others, failed, by_kind", [([], 3, "2 raised, 1 timeout"),
                                                     ([{"raised": 1}, {"died": 4}], 8, "4 died, 3 raised, 1 timeout")])
def test_failed_scores_of_all_ranks_are_counted(evaluator, log, others, failed, by_kind):
    """They count as wrong; the fault was that nothing said so."""
    found = evaluator(Pool("raised", "raised", "timeout"), *others).evaluate(7)
    record, = map(json.loads, (log.run_dir / "evals.jsonl").read_text().splitlines())
    assert found.overall == 0.25 and found.by_bin == record["accuracy"] == {"1 digit": 0.25} and record["failed"] == failed
    words = f"evaluation of step 7: {failed} of 4 responses could not be scored ({by_kind}) and count as wrong"
    assert words in text_of(log)


def test_an_evaluation_without_failures_says_nothing_of_them(evaluator, log):
    evaluator(Pool()).evaluate(7)
    assert "could not be scored" not in text_of(log)
    assert json.loads((log.run_dir / "evals.jsonl").read_text())["failed"] == 0


def test_a_kind_of_failure_is_told_once(evaluator, log):
    """Its message holds the number of the response, which differs from call to call."""
    one = evaluator(Pool("raised", "timeout"))
    for count in (2, 3, 4):
        one.scorer.score([one.heldout.prompt(0)] * count, [Response(0, (1,), (5,), np.zeros(1, np.float32), "stop", 0)] * count)
    assert [text_of(log).count(f"reward failed ({kind})") for kind in ("raised", "timeout")] == [1, 1]


def test_what_bins_are_called():
    assert bin_labels(DataConfig(digits=(1, 2)), 2) == ["1 digit", "2 digits"]
    assert bin_labels(DataConfig(task="chain", chain_steps=(5, 6)), 2) == ["5 steps", "6 steps"]
    dataset = DataConfig(task="dataset", source="x.jsonl")
    assert bin_labels(dataset, 1) == ["all"] and bin_labels(dataset, 2) == ["bin 0", "bin 1"]
