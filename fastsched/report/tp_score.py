"""The TP-Score of a run's tokens (algorithms.md 1.7), from the counts in its newest checkpoint and its tokenizer."""

from pathlib import Path

import numpy as np
import pandas as pd

from fastsched.config import ConfigError
from fastsched.config.arguments import run_config
from fastsched.engines.models.loading import load_tokenizer
from fastsched.learn.positions import BINS, RARE, TokenPositions
from fastsched.loop.prepare import prepare_model
from fastsched.record.checkpoint import checkpoints, load_state
from fastsched.report.runs import TOKEN_GROUPS, TokenScores


def read_token_scores(run_dir: Path) -> TokenScores:
    """Every token that the run sampled at least RARE times, earliest first. ConfigError when there is nothing to read."""
    found = checkpoints(run_dir)
    if not found or not (run_dir / "config.yaml").exists():
        raise ConfigError(f"--tp-score: {run_dir} holds no complete checkpoint, and the counts of tokens by position are part of it")
    positions = TokenPositions()
    positions.load_state_dict(load_state(found[-1])["learner"]["positions"])
    scores = positions.scores()
    if not len(scores.tokens):
        raise ConfigError(f"--tp-score: no token was counted {RARE} times by {found[-1].name}; train longer, with log.tp_score true")
    cfg = run_config(run_dir)
    tokenizer = load_tokenizer(prepare_model(cfg), cfg.model)
    table = pd.DataFrame({"token": scores.tokens, "text": [tokenizer.decode([t]) for t in scores.tokens.tolist()],
                          "tp_score": scores.score, "seen": scores.seen}).sort_values(["tp_score", "token"], ignore_index=True)
    return TokenScores(table, {name: _positions_of(positions, table["token"][table["tp_score"].between(low, high)].to_numpy())
                               for name, (low, high) in TOKEN_GROUPS.items()})


def _positions_of(positions: TokenPositions, tokens: np.ndarray) -> np.ndarray:
    """[BINS] share of the occurrences of `tokens` in each position bin; zeros without any."""
    mine = np.isin(positions.keys // BINS, tokens)
    counts = np.bincount(positions.keys[mine] % BINS, positions.counts[mine], BINS)
    return counts / max(counts.sum(), 1)
