"""DOTS (arXiv 2506.05316, algorithms.md 3): success of candidates predicted from prompts rolled out lately, nearest to 1/2 first.

The replay of past groups that goes with it: loop/batches.py. N prompts, D width of an embedding, R references.
State: the references and the recent outcomes; nothing a prompt.
"""

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.samplers.prompts import PromptSampler
from fastsched.control.window import Success
from fastsched.groups import successes_by_row
from fastsched.types import Features, Outcomes, Selection

REFERENCES = 256  # prompts rolled out last whose success predicts that of others; published
REFRESH = 2  # steps between two looks at the references and two fits of the calibration; published
TEMPERATURE = 1e-3  # of the softmax over candidates by distance of predicted success to 1/2; published
CANDIDATES = 1024  # predicted for a batch at most, unless twice the batch is more: a step of 512 prompts then stays below 5 ms
PRIOR_REFERENCES = 16  # how many references a slope of 0 counts in the fit of the calibration


def attention(queries: np.ndarray, references: np.ndarray, success: np.ndarray, *, itself: bool = True) -> np.ndarray:
    """[M] sum_j softmax_j(<q, e_j> / sqrt(D)) p_j. queries: [M, D], references: [R, D] float32, of unit length; success: [R] p_j.

    Unit length bounds the exponent, so that the softmax needs no maximum. Without `itself` query i leaves out reference i.
    """
    weights = queries @ (references.T / np.sqrt(np.float32(references.shape[1])))
    np.exp(weights, out=weights)
    if not itself:
        np.fill_diagonal(weights, 0.0)
    total = weights @ np.stack([success, np.ones_like(success)], axis=1).astype(np.float32)
    return (total[:, 0] / total[:, 1]).astype(np.float64)


def calibration(references: np.ndarray, success: np.ndarray) -> tuple[float, float]:
    """(scale, bias) with which an attention over the references becomes their success, by least squares.

    Every reference is predicted from the others. Regressed on is the distance of that prediction to their plain mean, since the
    mean alone falls where the success left out is high. The slope is shrunk by R / (R + PRIOR_REFERENCES); a negative one, where
    embeddings say nothing, is taken as 0. (1, 0) for fewer than three references.
    """
    count, mean = len(success), success.mean() if len(success) else 0.0
    if count < 3:
        return 1.0, 0.0
    x = attention(references, references, success, itself=False) - (count * mean - success) / (count - 1)
    centred = x - x.mean()
    variance = float(centred @ centred)
    slope = float(centred @ success) / variance * count / (count + PRIOR_REFERENCES) if variance > count * 1e-12 else 0.0
    scale = max(slope, 0.0)
    return scale, float(mean - scale * (x.mean() + mean))


class PredictingSampler(PromptSampler):
    """Of a random pool, prompts with weights softmax(-|p_hat - 1/2| / TEMPERATURE); `weight_floor` of the batch in deck order."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        """ConfigError without embeddings, or when they belong to other rows."""
        super().__init__(cfg, bins, sizes, prompts, seed, features)
        require(features is not None, "scheduler.kind: dots needs the embeddings of the prompts; run `fastsched cluster` with this "
                                      "configuration first")
        require(len(features.embedding) == len(bins), f"scheduler.kind: dots has embeddings of {len(features.embedding)} prompts, the data "
                                                      f"has {len(bins)}; run `fastsched cluster` again")
        self.embedding = features.embedding
        self.recent: dict[int, float] = {}  # row -> success, the longest unvisited first
        self._refer(np.zeros(0, np.int64), np.zeros(0))

    def _refer(self, rows: np.ndarray, success: np.ndarray) -> None:
        self.reference_rows, self.reference_success, self.reference_embedding = rows, success, self._embedded(rows)
        self.line = calibration(self.reference_embedding, success)

    def _embedded(self, rows: np.ndarray) -> np.ndarray:
        return np.asarray(self.embedding[rows], np.float32)

    def predict(self, rows: np.ndarray) -> np.ndarray:
        """[M] float64 success before calibration; needs references."""
        return attention(self._embedded(rows), self.reference_embedding, self.reference_success)

    def draw(self, count: int, success: Success) -> Selection:
        if success.steps % REFRESH == 0:
            self._refer(np.array(list(self.recent), np.int64), np.array(list(self.recent.values())))
        in_order = self.in_order(self.dithered(self.cfg.weight_floor * count), np.zeros(0, np.int64))
        size = min(self.cfg.dots.pool * count, max(CANDIDATES, 2 * count), len(self.bins))
        need = count - len(in_order)
        pool = self.pool(size, in_order, need)
        keys = self.rng.gumbel(size=len(pool))
        if len(self.reference_rows):
            scale, bias = self.line
            keys -= np.abs(np.clip(scale * self.predict(pool) + bias, 0, 1) - 0.5) / TEMPERATURE
        best = np.argpartition(-keys, need - 1)[:need] if 0 < need < len(pool) else np.arange(need)
        return self.selection(np.concatenate([in_order, pool[best]]))

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Prompts without a score change nothing."""
        rows, good, scored = successes_by_row(outcomes.rows, outcomes.rewards, success.r_threshold)
        for row, p in zip(rows.tolist(), (good / scored).tolist(), strict=True):
            self.recent.pop(row, None)
            self.recent[row] = p
        for row in list(self.recent)[:max(len(self.recent) - REFERENCES, 0)]:
            del self.recent[row]

    def own_state(self) -> dict:
        return {"recent": [list(entry) for entry in self.recent.items()], "reference_rows": self.reference_rows.tolist(),
                "reference_success": self.reference_success.tolist()}

    def load_own_state(self, state: dict) -> None:
        self.recent = dict(state["recent"])
        self._refer(np.array(state["reference_rows"], np.int64), np.array(state["reference_success"], np.float64))
