"""Whether the golds of a data set accept themselves: one that its reward misreads teaches the opposite."""

from typing import Sequence

import numpy as np

from fastsched.config import Config, ConfigError, RewardPart
from fastsched.data.datasets import PromptSet
from fastsched.data.reward_worker import RewardItem
from fastsched.data.rewards import RewardPool
from fastsched.data.scorers import right_response
from fastsched.types import Prompt

CHECKED = 512  # rows, spread evenly over the set
SHOWN = 5


def gold_lines(cfg: Config, prompts: PromptSet, pool: RewardPool) -> list[str]:
    """What there is to say of rows whose gold, in the form that a reward reads, does not score 1 by it; [] where all do, or where nobody
    but the user's function knows that form. ConfigError where most do not.
    """
    asked = [part for part in cfg.reward.parts if part.own]
    if cfg.data.task in ("arithmetic", "chain") or not asked:
        return []
    rows = np.unique(np.linspace(0, len(prompts) - 1, min(CHECKED, len(prompts))).astype(int)).tolist()
    tried = [prompts.prompt(row) for row in rows]
    return [line for part in asked for line in _lines(part, tried, prompts.rows[rows]["source_row"], pool)]


def _lines(part: RewardPart, tried: Sequence[Prompt], source_rows: Sequence[int], pool: RewardPool) -> list[str]:
    right = [right_response(part.kind, p.answer, part.require) for p in tried]
    result = pool.score([RewardItem(text, p.text, p.answer, p.meta) for text, p in zip(right, tried, strict=True)])
    rewards = result.parts.get(part.label, result.rewards)
    bad = [f"row {row}: {p.answer[:60]!r}" for p, row, reward in zip(tried, source_rows, rewards, strict=True) if reward != 1.0]
    if not bad:
        return []
    shown = "; ".join(bad[:SHOWN])
    why = f" ({next(iter(result.messages.values()))})" if result.messages else ""
    if 2 * len(bad) > len(tried):
        accepted = f"only {len(tried) - len(bad)} of {len(tried)}" if len(bad) < len(tried) else "none"
        raise ConfigError(f"reward.kind: {part.kind} accepts {accepted} of the answers as right, {shown}{why}; give the column that holds "
                          "the final answer as data.answer_column, leave such rows out, or choose another reward.kind")
    return [f"golds: {len(bad)} of {len(tried)} rows that were tried do not accept their own answer under reward.kind {part.kind}, so "
            f"that no response to them can be right: {shown}{why}"]
