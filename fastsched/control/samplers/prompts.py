"""What the samplers by prompt have in common: all rows in deck order, one generator, the bins of a batch, the state. N rows."""

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.samplers.deck import Deck
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes, Selection


def one_part(what: str, sizes: np.ndarray) -> list[str]:
    """A line for the log where `what` weighs parts of the data and only one of them, [K] rows in each, holds any."""
    if np.count_nonzero(sizes) > 1:
        return []
    return [f"{what} weighs difficulty bins or clusters, and the data has one, so prompts are drawn evenly; give data.difficulty_column, "
            "or data.difficulty nll or cluster, or take a sampler by prompt (mopps, greso, vcrl, replay, speed, dots)"]


class PromptSampler:
    """Base of the samplers that choose single prompts; a subclass gives `draw`, `learn`, `own_state` and `load_own_state`.

    What was drawn since the last `observe` (refills of one step) is not drawn again, as long as enough other rows are left.
    """

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None, parts: tuple[np.ndarray, np.ndarray] | None = None):
        """bins: [N] unsigned integers in [0, K); sizes: [K] int64 rows in each bin; prompts: the batch size P, at most N.

        parts: [N] unsigned part of every row and [M] rows of each part, which then have an order each; by default one for all rows.
        """
        self.cfg, self.sizes, self.bins = cfg, sizes, bins
        self.deck = Deck(*(parts or (np.zeros_like(bins), np.array([len(bins)]))), seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = sizes / sizes.sum()
        self.drawn = np.zeros(0, np.int64)  # rows since the last `observe`

    def draw(self, count: int, success: Success) -> Selection:
        raise NotImplementedError

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        self.drawn = np.zeros(0, np.int64)
        self.learn(outcomes, success)

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        raise NotImplementedError

    def avoided(self, count: int, taken: np.ndarray) -> np.ndarray:
        """`taken` and the rows of this step, or `taken` alone where fewer than `count` others would be left."""
        both = np.union1d(taken, self.drawn)
        return both if len(self.bins) - len(both) >= count else taken

    def notes(self) -> list[str]:
        """What differs from what the configuration seems to ask for, for the log."""
        return []

    def fixed_options(self) -> dict:
        """JSON of the options that give the state its meaning, by key: a resumed run needs the same."""
        return {}

    def in_order(self, count: int, taken: np.ndarray) -> np.ndarray:
        """[count] distinct rows in deck order, none of `taken` ([M], which count as visited); count + M is at most N."""
        return self.deck.draw_others(np.array([count]), self.avoided(count, taken))

    def dithered(self, share: float) -> int:
        """floor or ceil of `share`, that value on average."""
        return int(share + self.rng.random())

    def pool(self, size: int, taken: np.ndarray, need: int) -> np.ndarray:
        """[size, or what is left, at least `need`] distinct rows of all at random, none of `taken`."""
        total, taken = len(self.bins), self.avoided(need, taken)
        if total <= 4 * (size + len(taken)):
            return self.rng.permutation(np.setdiff1d(np.arange(total), taken))[:size]
        found = np.zeros(0, np.int64)
        while len(found) < size:
            found = np.union1d(found, np.setdiff1d(self.rng.integers(0, total, 2 * size), taken))
        return self.rng.permutation(found)[:size]

    def selection(self, rows: np.ndarray) -> Selection:
        """The batch in random order, so that every rank gets the same mix; `weights` become the bins' shares of it."""
        rows = self.rng.permutation(rows)
        bins, self.drawn = self.bins[rows].astype(np.int64), np.concatenate([self.drawn, rows])
        self.weights = np.bincount(bins, minlength=len(self.sizes)) / max(len(rows), 1)
        return Selection(rows=rows, bins=bins)

    def own_state(self) -> dict:
        """JSON-able; beside generator, deck and weights."""
        raise NotImplementedError

    def load_own_state(self, state: dict) -> None:
        raise NotImplementedError

    def state_dict(self) -> dict:
        return {"weights": self.weights.tolist(), "rng": self.rng.bit_generator.state, "deck": self.deck.state_dict(),
                "drawn": self.drawn.tolist(), **self.own_state()}

    def load_state_dict(self, state: dict) -> None:
        self.weights = np.array(state["weights"], dtype=np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.deck.load_state_dict(state["deck"])
        self.drawn = np.array(state["drawn"], np.int64)
        self.load_own_state(state)
