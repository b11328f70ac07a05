"""The greedy evaluation, where some responses cannot be scored."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from fastsched.config import Config, LogConfig
from fastsched.loop.evaluate import evaluate
from fastsched.loop.rollouts import score_each
from fastsched.record.log import RunLog
from fastsched.types import Prompt, Response


class Pool:
    """Scores the first response of a call with 1 and fails on the others as it is told."""

    def __init__(self, *kinds: str):
        self.kinds = kinds

    def score(self, items):
        rewards = [1.0] + [np.nan] * (len(items) - 1)
        errors = {kind: self.kinds.count(kind) for kind in self.kinds}
        return SimpleNamespace(rewards=rewards, errors=errors, messages={k: f"response {len(items)}: odd" for k in errors})


def run_of(tmp_path, log, pool, others=None):
    prompts = [Prompt(i, (1, 2), "p", "a", 0) for i in range(4)]
    reply = lambda p: Response(p.row, p.token_ids, (3,), np.zeros(1, np.float32), "stop", 0)
    heldout = type("Heldout", (), {"bins": np.zeros(4, np.int64), "prompt": lambda self, i: prompts[i], "__len__": lambda self: 4})()
    engine = SimpleNamespace(rank=0, world_size=1, all_reduce=lambda values: values, all_gather=lambda value: [value, *(others or [])])
    return SimpleNamespace(cfg=Config(), log=log, heldout=heldout, rewards=pool,
                           learner=others is not None and SimpleNamespace(engine=engine),
                           rollout=SimpleNamespace(generate=lambda prompts, *_: [reply(p) for p in prompts]),
                           tokenizer=SimpleNamespace(batch_decode=lambda ids, **_: ["x"] * len(ids)))


@pytest.mark.parametrize("others, failed, listed", [(None, 3, "2 raised, 1 timeout"),
                                                    ([{"raised": 1}, {"died": 4}], 8, "4 died, 3 raised, 1 timeout")])
def test_failed_scores_of_all_ranks_are_counted(tmp_path, others, failed, listed):
    """They count as wrong; the fault was that nothing said so."""
    with RunLog(tmp_path, LogConfig(tensorboard=False), 1) as log:
        found = evaluate(run_of(tmp_path, log, Pool("raised", "raised", "timeout"), others), 7)
    record, = map(json.loads, (tmp_path / "evals.jsonl").read_text().splitlines())
    assert found.overall == 0.25 and record["failed"] == failed
    words = f"evaluation of step 7: {failed} of 4 responses could not be scored ({listed}) and count as wrong"
    assert words in (tmp_path / "log.txt").read_text()


def test_an_evaluation_without_failures_says_nothing_of_them(tmp_path):
    with RunLog(tmp_path, LogConfig(tensorboard=False), 1) as log:
        evaluate(run_of(tmp_path, log, Pool()), 7)
    assert "could not be scored" not in (tmp_path / "log.txt").read_text()
    assert json.loads((tmp_path / "evals.jsonl").read_text())["failed"] == 0


def test_a_kind_of_failure_is_told_once(tmp_path):
    """Its message holds the number of the response, which differs from call to call."""
    with RunLog(tmp_path, LogConfig(tensorboard=False), 1) as log:
        run = run_of(tmp_path, log, Pool("raised", "timeout"))
        for count in (2, 3, 4):
            prompts = [run.heldout.prompt(0)] * count
            score_each(run, prompts, run.rollout.generate(prompts))
    assert [(tmp_path / "log.txt").read_text().count(f"reward failed ({kind})") for kind in ("raised", "timeout")] == [1, 1]
