"""ADS (arXiv 2606.22305, algorithms.md 2.2 and 2.3): clusters by success, prompts inside a cluster by nearness to one half.

N prompts, P of them a batch, C clusters. Every cluster holds its prompts in order of difficulty; its mini-cluster is a set of
positions in that order, which moves by at most one rank a visit. State: 14 bytes a prompt, all of it fixed, beside C mini-clusters.
"""

import zlib
from typing import Mapping

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.samplers.deck import Deck
from fastsched.control.window import Success
from fastsched.types import Features, Outcomes, Selection

START = 0.5  # success of a cluster before its first visit


def without_empty(cluster: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """([N] unsigned, 16 bits where they suffice, clusters numbered without gaps; [C] int64 prompts in each)."""
    counts = np.bincount(cluster)
    number = np.cumsum(counts > 0) - 1
    members = counts[counts > 0]
    return number.astype(np.uint16 if len(members) <= 1 << 16 else np.uint32)[cluster], members


def order_by_difficulty(cluster: np.ndarray, difficulty: np.ndarray) -> np.ndarray:
    """[N] rows by cluster, then from easy to hard, then by row number. cluster: [N] unsigned; difficulty: [N] float32, finite.

    Two stable radix sorts of 16 bits for the difficulty: a tenth of the time of comparing floats.
    """
    bits = np.asarray(difficulty, np.float32).view(np.uint32)
    bits = np.where(bits >> 31, ~bits, bits | np.uint32(1 << 31))  # unsigned in the order of the floats
    order = np.lexsort(((bits & 0xFFFF).astype(np.uint16), (bits >> 16).astype(np.uint16), cluster))
    return order.astype(np.int32) if len(order) < 1 << 31 else order


def mini_cluster_size(members: np.ndarray, prompts: int, size: int) -> int:
    """The least size, at least `size`, at which all mini-clusters together hold a batch. members: [C], their sum at least `prompts`."""
    while np.minimum(members, size).sum() < prompts:
        size += 1
    return size


def moved(positions: np.ndarray, success: Mapping[int, float], members: int, band: tuple[float, float]) -> np.ndarray:
    """Sorted positions after one visit: below the band one easier, above it one harder, each to a place of its own.

    `success` of the positions that have feedback; the others stay. Keepers are placed first, then easier-movers in ascending,
    then harder-movers in descending order, each at the free place nearest to its aim, further on in its own direction first.
    """
    if members <= len(positions):
        return positions
    low, high = band
    easier = [p for p in positions.tolist() if success.get(p, low) < low]
    harder = [p for p in reversed(positions.tolist()) if success.get(p, high) > high]
    new = set(positions.tolist()) - set(easier) - set(harder)
    for p in easier:
        new.add(_free(p - 1, -1, new, members))
    for p in harder:
        new.add(_free(p + 1, 1, new, members))
    return np.array(sorted(new), dtype=np.int64)


def _free(aim: int, direction: int, taken: set[int], members: int) -> int:
    aim = min(max(aim, 0), members - 1)
    for radius in range(members):
        for place in (aim + direction * radius, aim - direction * radius):
            if 0 <= place < members and place not in taken:
                return place
    raise ValueError(f"all {members} positions are taken")


def followed(p: np.ndarray, r: np.ndarray, alpha: float) -> np.ndarray:
    """[C] p <- (1 - alpha) p + alpha r / sum(r), renormalised; towards equal weights where no cluster has any success."""
    total = r.sum()
    new = (1 - alpha) * p + alpha * (r / total if total > 0 else np.full(len(r), 1 / len(r)))
    return new / new.sum()


class AdsSampler:
    """Draws clusters without replacement with weights p and takes the whole mini-cluster of each, until P rows are found.

    What a cluster smaller than its mini-cluster lacks comes from the next cluster drawn; the last one gives a random part of its
    mini-cluster, and the rest of it has no feedback. Where all mini-clusters together cannot fill a batch, all are enlarged.
    With `weight_floor` that share of the batch comes in deck order, so that every prompt is visited, and that share of the weights
    is spread over the clusters; only rows of a mini-cluster of a drawn cluster count as feedback. Empty clusters have no weight.
    """

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int, features: Features | None):
        """As PromptSampler; of `features` the clusters and the difficulty."""
        require(features is not None, "scheduler.kind: ads needs the clusters and difficulties that `fastsched cluster` computes")
        require(len(features.cluster) == len(bins), f"scheduler.kind: ads has features of {len(features.cluster)} rows for {len(bins)}")
        self.cfg, self.bins, self.sizes, self.prompts = cfg, bins, sizes, prompts
        self.cluster, self.members = without_empty(features.cluster)
        self.starts = np.cumsum(self.members) - self.members
        self.order = order_by_difficulty(self.cluster, features.difficulty)
        self.checksum = zlib.crc32(self.order.tobytes(), zlib.crc32(self.members.tobytes()))
        self.size = mini_cluster_size(self.members, prompts, cfg.ads.size)
        self.period = len(bins) // prompts
        self.deck = Deck(np.zeros_like(bins), np.array([len(bins)]), seed)
        self.rng = np.random.Generator(np.random.PCG64(seed))
        self.weights = sizes / sizes.sum()
        self.drawn: list[int] = []  # clusters since the last `observe`; a refill prefers others
        self._reset()

    def _reset(self) -> None:
        count = len(self.members)
        self.p, self.r, self.steps = np.full(count, 1 / count), np.full(count, START), 0
        self.positions = [np.arange(min(self.size, n)) for n in self.members.tolist()]

    def notes(self) -> list[str]:
        """What differs from the configuration, for the log."""
        lines = []
        if self.size != self.cfg.ads.size:
            lines.append(f"scheduler.ads.size: {len(self.members)} clusters of {self.members.min()} to {self.members.max()} prompts cannot "
                         f"fill a batch with {self.cfg.ads.size} each; {self.size} are taken")
        if self.cfg.ads.reset and self.period == 1:
            lines.append("scheduler.ads.reset: the data holds fewer than two batches, so every step starts again from the easiest prompts "
                         "and equal weights; set it to false, or lower train.prompts_per_step")
        return lines

    def fixed_options(self) -> dict:
        """JSON of the options that give the state its meaning, by key: a resumed run needs the same."""
        return {"scheduler.ads.clusters": self.cfg.ads.clusters, "scheduler.ads.size": self.cfg.ads.size,
                "train.prompts_per_step": self.prompts}

    def draw(self, count: int, success: Success) -> Selection:
        """`count` distinct rows, at most P, in random order; `weights` become the bins' shares of this batch."""
        rows = self.deck.draw(np.array([int(self.cfg.weight_floor * count + self.rng.random())]))
        for k in self._sequence():
            if (need := count - len(rows)) == 0:
                break
            mine = np.setdiff1d(self.rows_of(k), rows)
            rows = np.concatenate([rows, mine if len(mine) <= need else self.rng.permutation(mine)[:need]])
            self.drawn.append(k)
        rows = self.rng.permutation(rows)
        bins = self.bins[rows].astype(np.int64)
        self.weights = np.bincount(bins, minlength=len(self.sizes)) / count
        return Selection(rows=rows, bins=bins)

    def cluster_weights(self) -> np.ndarray:
        """[C] float64, what clusters are drawn with; they sum to 1."""
        return (1 - self.cfg.weight_floor) * self.p + self.cfg.weight_floor / len(self.p)

    def rows_of(self, k: int) -> np.ndarray:
        """[at most `size`] int64, the rows of the mini-cluster of cluster k, from easy to hard."""
        return self.order[self.starts[k] + self.positions[k]].astype(np.int64)

    def _sequence(self) -> list[int]:
        """All clusters as drawn one after another without replacement, those of this step last.

        Exponential waiting times at rates w arrive in the order of successive draws with weights w (Efraimidis and Spirakis, 2006).
        """
        with np.errstate(divide="ignore"):
            arrival = self.rng.exponential(size=len(self.p)) / self.cluster_weights()
        late = np.zeros(len(self.p), bool)
        late[self.drawn] = True
        return np.lexsort((arrival, late)).tolist()

    def observe(self, outcomes: Outcomes, success: Success) -> None:
        """Success of the drawn clusters, then their mini-clusters, then the weights of all clusters, then the reset."""
        rows, rho = _prompt_success(outcomes, success.r_threshold)
        for k in set(self.drawn):
            mine = self.cluster[rows] == k
            place = dict(zip(self.rows_of(k).tolist(), self.positions[k].tolist(), strict=True))
            seen = {place[row]: value for row, value in zip(rows[mine].tolist(), rho[mine].tolist(), strict=True) if row in place}
            if seen:
                self.r[k] = sum(seen.values()) / len(seen)
                self.positions[k] = moved(self.positions[k], seen, int(self.members[k]), self.cfg.ads.band)
        self.p, self.drawn, self.steps = followed(self.p, self.r, self.cfg.ads.alpha), [], self.steps + 1
        if self.cfg.ads.reset and self.steps >= self.period:
            self._reset()

    def state_dict(self) -> dict:
        return {"weights": self.weights.tolist(), "rng": self.rng.bit_generator.state, "deck": self.deck.state_dict(),
                "p": self.p.tolist(), "r": self.r.tolist(), "positions": [m.tolist() for m in self.positions],
                "steps": self.steps, "drawn": list(self.drawn), "features": self.checksum}

    def load_state_dict(self, state: dict) -> None:
        require(state["features"] == self.checksum, "resume: the clusters or difficulties are others than the checkpoint's; "
                                                     "use the model, the data and the features of the checkpoint")
        self.weights = np.array(state["weights"], dtype=np.float64)
        self.rng.bit_generator.state = state["rng"]
        self.deck.load_state_dict(state["deck"])
        self.p, self.r = np.array(state["p"]), np.array(state["r"])
        self.positions = [np.array(m, dtype=np.int64) for m in state["positions"]]
        self.steps, self.drawn = state["steps"], list(state["drawn"])


def _prompt_success(outcomes: Outcomes, r_threshold: float) -> tuple[np.ndarray, np.ndarray]:
    """(rows, share of successes among its scored responses) of every prompt with a score; a prompt rolled out twice counts once."""
    finite = np.isfinite(outcomes.rewards)
    rows, place = np.unique(outcomes.rows, return_inverse=True)
    scored = np.bincount(place, weights=finite.sum(1), minlength=len(rows))
    good = np.bincount(place, weights=(finite & (outcomes.rewards > r_threshold)).sum(1), minlength=len(rows))
    return rows[scored > 0], good[scored > 0] / scored[scored > 0]
