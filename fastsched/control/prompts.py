"""What the samplers by prompt have in common: all rows in deck order, one generator, the bins of a batch, the state. N rows."""

from typing import Optional

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.deck import Deck
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes, Selection


class PromptSampler:
    """Base of the samplers that choose single prompts; a subclass gives `draw`, `observe`, `own_state` and `load_own_state`."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Optional[Features] = None, parts: Optional[tuple[np.ndarray, np.ndarray]] = None):
        """bins: [N] unsigned integers in [0, K); sizes: [K] int64 rows in each bin; prompts: the batch size P, at most N.

        parts: [N] unsigned part of every row and [M] rows of each part, which then have an order each; by default one for all rows.
        """
        self.cfg, self.sizes, self.bins = cfg, sizes, bins
        self.deck = Deck(*(parts or (np.zeros_like(bins), np.array([len(bins)]))), seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = sizes / sizes.sum()

    def draw(self, count: int, success: Success) -> Selection:
        raise NotImplementedError

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        raise NotImplementedError

    def in_order(self, count: int, taken: np.ndarray) -> np.ndarray:
        """[count] distinct rows in deck order, none of `taken` ([M], which count as visited); count + M is at most N."""
        rows = np.zeros(0, np.int64)
        while len(rows) < count:
            found = self.deck.draw(np.array([count - len(rows)]))
            rows = np.concatenate([rows, found[~np.isin(found, np.concatenate([rows, taken]))]])
        return rows

    def dithered(self, share: float) -> int:
        """floor or ceil of `share`, that value on average."""
        return int(share + self.rng.random())

    def pool(self, size: int, taken: np.ndarray) -> np.ndarray:
        """[size, or what is left] distinct rows of all at random, none of `taken`."""
        total = len(self.bins)
        if total <= 4 * (size + len(taken)):
            return self.rng.permutation(np.setdiff1d(np.arange(total), taken))[:size]
        found = np.zeros(0, np.int64)
        while len(found) < size:
            more = np.setdiff1d(self.rng.integers(0, total, 2 * size), taken)
            found = np.union1d(found, more)
        return self.rng.permutation(found)[:size]

    def selection(self, rows: np.ndarray) -> Selection:
        """The batch in random order, so that every rank gets the same mix; `weights` become the bins' shares of it."""
        rows = self.rng.permutation(rows)
        bins = self.bins[rows].astype(np.int64)
        self.weights = np.bincount(bins, minlength=len(self.sizes)) / max(len(rows), 1)
        return Selection(rows=rows, bins=bins)

    def own_state(self) -> dict:
        """JSON-able; beside generator, deck and weights."""
        raise NotImplementedError

    def load_own_state(self, state: dict) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict:
        return {"weights": self.weights.tolist(), "rng": self.rng.bit_generator.state, "deck": self.deck.state_dict(), **self.own_state()}

    def load_state_dict(self, state: dict) -> None:
        self.weights = np.array(state["weights"], dtype=np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.deck.load_state_dict(state["deck"])
        self.load_own_state(state)
