"""DOTS (arXiv 2506.05316, algorithms.md 3): success of candidates predicted from prompts rolled out lately, nearest to 1/2 first.

The replay of past groups that goes with it: fastsched/batches.py. N prompts, D width of an embedding, R references.
State: the references, the recent outcomes and what the calibration was fitted on; nothing a prompt.
"""

from typing import Optional

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.prompts import PromptSampler
from fastsched.control.window import Success
from fastsched.groups import successes_by_row
from fastsched.types import Features, Outcomes, Selection

HISTORY = 1024  # pairs of prediction and outcome that the calibration is fitted on
PRIOR_PAIRS = 16  # how many pairs a slope of 0 counts in the fit


def attention(queries: np.ndarray, references: np.ndarray, success: np.ndarray) -> np.ndarray:
    """[M] sum_j softmax_j(<q, e_j> / sqrt(D)) p_j. queries: [M, D], references: [R, D] float32; success: [R] p_j."""
    scores = queries @ (references.T / np.sqrt(np.float32(references.shape[1])))
    weights = np.exp(scores - scores.max(1, keepdims=True))
    return ((weights @ success.astype(np.float32)) / weights.sum(1)).astype(np.float64)


def calibration(predicted: np.ndarray, observed: np.ndarray) -> tuple[float, float]:
    """(scale, bias) of the least-squares line through [n] pairs, its slope shrunk by n / (n + PRIOR_PAIRS); (1, 0) without any."""
    if len(predicted) == 0:
        return 1.0, 0.0
    x, n = predicted - predicted.mean(), len(predicted)
    variance = float(x @ x)
    scale = float(x @ observed) / variance * n / (n + PRIOR_PAIRS) if variance > 0 else 0.0
    return scale, float(observed.mean() - scale * predicted.mean())


class PredictingSampler(PromptSampler):
    """Of a random pool, prompts with weights softmax(-|p_hat - 1/2| / temperature); `weight_floor` of the batch in deck order."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Optional[Features] = None):
        """ConfigError without embeddings, or when they belong to other rows."""
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        require(features is not None, "scheduler.kind: dots needs the embeddings of the prompts; run `fastsched cluster` with this "
                                      "configuration first")
        require(len(features.embedding) == len(bins), f"scheduler.kind: dots has embeddings of {len(features.embedding)} prompts, the data "
                                                      f"has {len(bins)}; run `fastsched cluster` again")
        self.embedding = features.embedding
        self.recent: dict[int, float] = {}  # row -> success, the longest unvisited first
        self.pairs: list[tuple[float, float]] = []  # (uncalibrated prediction, observed success)
        self._refer(np.zeros(0, np.int64), np.zeros(0), (1.0, 0.0))

    def _refer(self, rows: np.ndarray, success: np.ndarray, line: tuple[float, float]) -> None:
        self.reference_rows, self.reference_success, self.line = rows, success, line
        self.reference_embedding = self._embedded(rows)

    def _embedded(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.embedding[rows], np.float32)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """[M] float64 success before calibration; needs references."""
        return attention(self._embedded(rows), self.reference_embedding, self.reference_success)

    def draw(self, count: int, success: Success) -> Selection:
        if success.steps % self.cfg.dots.refresh == 0:
            rows, p = np.array(list(self.recent), np.int64), np.array(list(self.recent.values()))
            self._refer(rows, p, calibration(*np.array(self.pairs).reshape(-1, 2).T))
        in_order = self.in_order(self.dithered(self.cfg.weight_floor * count), np.zeros(0, np.int64))
        pool, need = self.pool(min(self.cfg.dots.pool * count, len(self.bins)), in_order), count - len(in_order)
        keys = self.rng.gumbel(size=len(pool))
        if len(self.reference_rows):
            scale, bias = self.line
            keys -= np.abs(np.clip(scale * self.predict(pool) + bias, 0, 1) - 0.5) / self.cfg.dots.temperature
        best = np.argpartition(-keys, need - 1)[:need] if 0 < need < len(pool) else np.arange(need)
        return self.selection(np.concatenate([in_order, pool[best]]))

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        """Prompts without a score change nothing."""
        rows, good, scored = successes_by_row(outcomes.rows, outcomes.rewards, success.r_threshold)
        rates = (good / scored).tolist()
        if len(self.reference_rows) and len(rows):
            self.pairs += zip(self.predict(rows).tolist(), rates, strict=True)
            self.pairs = self.pairs[-HISTORY:]
        for row, p in zip(rows.tolist(), rates, strict=True):
            self.recent.pop(row, None)
            self.recent[row] = p
        for row in list(self.recent)[:max(len(self.recent) - self.cfg.dots.reference, 0)]:
            del self.recent[row]

    def own_state(self) -> dict:
        return {"recent": [list(entry) for entry in self.recent.items()], "pairs": [list(pair) for pair in self.pairs],
                "reference_rows": self.reference_rows.tolist(), "reference_success": self.reference_success.tolist(),
                "line": list(self.line)}

    def load_own_state(self, state: dict) -> None:
        self.recent, self.pairs = dict(state["recent"]), [tuple(pair) for pair in state["pairs"]]
        self._refer(np.array(state["reference_rows"], np.int64), np.array(state["reference_success"], np.float64), tuple(state["line"]))
