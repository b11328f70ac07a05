"""Where in a response each token usually occurs: TP-Score (algorithms.md 1.7, control_plane.md 7).

T tokens of B responses one after another, L tokens of one response.
"""

from typing import NamedTuple, Sequence

import numpy as np

from fastsched.arrays import from_text, to_text

BINS = 100
RARE = 20  # tokens seen fewer times have no score


class Scores(NamedTuple):
    """Of the M tokens seen at least RARE times, ascending by id."""

    tokens: np.ndarray  # [M] int64
    score: np.ndarray  # [M] float64 in (0, 1)
    seen: np.ndarray  # [M] int64


def position_bin(lengths: np.ndarray) -> np.ndarray:
    """[T] int64: bin of t / (L - 1) for each token, the last bin for the end; a single token is an end."""
    lengths = np.asarray(lengths, np.int64)
    length = np.repeat(lengths, lengths)
    t = np.arange(len(length)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    return np.where(length == 1, BINS - 1, np.minimum(t * BINS // np.maximum(length - 1, 1), BINS - 1))


def count_positions(responses: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """(token * BINS + bin, ascending, and how often), int64, of token ids of responses."""
    tokens = np.concatenate([np.asarray(r, np.int64) for r in responses] or [np.zeros(0, np.int64)])
    return np.unique(tokens * BINS + position_bin(np.array([len(r) for r in responses])), return_counts=True)


class TokenPositions:
    """Sparse counts of every token by position bin, over all responses seen so far."""

    def __init__(self):
        self.keys, self.counts = np.zeros(0, np.int64), np.zeros(0, np.int64)  # token * BINS + bin, ascending

    def add(self, parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> None:
        """Add what `count_positions` found on each rank."""
        keys, inverse = np.unique(np.concatenate([self.keys, *(k for k, _ in parts)]), return_inverse=True)
        counts = np.zeros(len(keys), np.int64)
        np.add.at(counts, inverse, np.concatenate([self.counts, *(c for _, c in parts)]))
        self.keys, self.counts = keys, counts

    def frequencies(self) -> np.ndarray:
        """f_b(v) of each key: count of token v in bin b over all tokens in bin b."""
        bins = self.keys % BINS
        return self.counts / np.bincount(bins, self.counts, BINS)[bins]

    def scores(self) -> Scores:
        """TP(v) = sum_b c_b f_b(v) / sum_b f_b(v) with c_b the centre of bin b."""
        tokens, inverse = np.unique(self.keys // BINS, return_inverse=True)
        seen = np.bincount(inverse, self.counts, len(tokens)).astype(np.int64)
        f = self.frequencies()
        centre = (self.keys % BINS + 0.5) / BINS
        score = np.bincount(inverse, centre * f, len(tokens)) / np.bincount(inverse, f, len(tokens))
        known = seen >= RARE
        return Scores(tokens[known], score[known], seen[known])

    def score_tokens(self, responses: Sequence[Sequence[int]]) -> np.ndarray:
        """[T] TP-Score of every token; a token without one counts as where it stands, the centre of its own bin."""
        known = self.scores()
        tokens = np.concatenate([np.asarray(r, np.int64) for r in responses] or [np.zeros(0, np.int64)])
        own = (position_bin(np.array([len(r) for r in responses])) + 0.5) / BINS
        if not len(known.tokens):
            return own
        place = np.minimum(np.searchsorted(known.tokens, tokens), len(known.tokens) - 1)
        return np.where(known.tokens[place] == tokens, known.score[place], own)

    def state_dict(self) -> dict[str, str]:
        """JSON-able, exact: int64, compressed, base64."""
        return {name: to_text(v, "<i8") for name, v in (("keys", self.keys), ("counts", self.counts))}

    def load_state_dict(self, state: dict[str, str]) -> None:
        self.keys, self.counts = (from_text(state[name], "<i8").astype(np.int64) for name in ("keys", "counts"))
