"""Whether the golds of a data set accept themselves: one that its reward misreads teaches the opposite."""

import numpy as np

from fastsched.config import Config, ConfigError
from fastsched.data.datasets import PromptSet
from fastsched.data.rewards import RewardItem, RewardPool
from fastsched.data.scorers import right_response

CHECKED = 512  # rows, spread evenly over the set
SHOWN = 5


def gold_lines(cfg: Config, prompts: PromptSet, pool: RewardPool) -> list[str]:
    """What there is to say of rows whose gold, in the form that the reward reads, does not score 1; [] where all do, or where nobody but
    the user's function knows that form. ConfigError where none does.
    """
    if cfg.data.task in ("arithmetic", "chain") or right_response(cfg.reward.kind, "") is None:
        return []
    rows = np.unique(np.linspace(0, len(prompts) - 1, min(CHECKED, len(prompts))).astype(int)).tolist()
    asked = [prompts.prompt(row) for row in rows]
    right = [right_response(cfg.reward.kind, p.answer, cfg.reward.require) for p in asked]
    result = pool.score([RewardItem(text, p.text, p.answer, p.meta) for text, p in zip(right, asked, strict=True)])
    bad = [p for p, reward in zip(asked, result.rewards, strict=True) if reward != 1.0]
    if not bad:
        return []
    shown = "; ".join(f"row {p.row}: {p.answer[:60]!r}" for p in bad[:SHOWN])
    why = f" ({next(iter(result.messages.values()))})" if result.messages else ""
    if len(bad) == len(rows):
        raise ConfigError(f"reward.kind: {cfg.reward.kind} accepts none of the answers of data.source as right, {shown}{why}; give the "
                          "column that holds the final answer as data.answer_column, or another reward.kind")
    return [f"golds: {len(bad)} of {len(rows)} rows that were tried do not accept their own answer under reward.kind {cfg.reward.kind}, so "
            f"that no response to them can be right: {shown}{why}"]
