"""The order of prompts inside each bin: drawn without replacement until the bin is exhausted, then reshuffled.

Each pass over a bin is a keyed pseudo-random permutation, so the state is one (epoch, position) pair a bin; the only
array over prompts is the 4 (or 8) byte row index sorted by bin.
"""

import numpy as np

ROUNDS = 8


def permute(index: np.ndarray, size: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """Where each `index` in [0, size) goes under the permutation of [0, size) that its keys name.

    index, size: [M] uint64, size at least 1; keys: [M, ROUNDS] uint64. Generalised Feistel network on Z_a x Z_b with
    a = ceil(sqrt(size)), b = ceil(size / a), and cycle walking for the less than a values beyond `size`
    (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002).
    """
    a = np.ceil(np.sqrt(size.astype(np.float64))).astype(np.uint64)
    b = (size + a - np.uint64(1)) // a
    image = _feistel(index, a, b, keys)
    while (outside := np.flatnonzero(image >= size)).size:
        image[outside] = _feistel(image[outside], a[outside], b[outside], keys[outside])
    return image


def _feistel(x: np.ndarray, a: np.ndarray, b: np.ndarray, keys: np.ndarray) -> np.ndarray:
    left, right = x % a, x // a
    for i in range(0, ROUNDS, 2):
        left = (left + _mix(right + keys[:, i])) % a
        right = (right + _mix(left + keys[:, i + 1])) % b
    return left + a * right


def _mix(x: np.ndarray) -> np.ndarray:
    """[M] uint64, top 32 bits of the splitmix64 finaliser (Steele et al. 2014); small, so that a sum cannot wrap."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x >> np.uint64(32)


class Deck:
    """The rows of every bin in shuffled order. K bins, N rows."""

    def __init__(self, bins: np.ndarray, sizes: np.ndarray, seed: int):
        """bins: [N] unsigned integers in [0, K), 16 bits where they suffice (NumPy then sorts by radix);
        sizes: [K] int64 rows in each bin."""
        order = np.argsort(bins, kind="stable")
        self.rows = order.astype(np.int32) if len(bins) < 1 << 31 else order
        self.sizes, self.seed = sizes, seed
        self.starts = np.cumsum(sizes) - sizes
        self.position = np.zeros_like(sizes)
        self.deferred: dict[int, list[int]] = {}
        self.epoch = np.zeros_like(sizes)
        self.keys = np.stack([self._keys(b) for b in range(len(sizes))])

    def draw(self, counts: np.ndarray) -> np.ndarray:
        """[sum(counts)] int64 distinct rows, `counts[b]` of bin b. counts: [K] int64, at most `sizes`."""
        if np.any(counts > self.sizes):
            raise ValueError(f"draw of {counts.tolist()} rows from bins of {self.sizes.tolist()}")
        plain = self.position + counts <= self.sizes
        plain[list(self.deferred)] = False
        bins = np.repeat(np.arange(len(counts)), np.where(plain, counts, 0))
        within = np.arange(len(bins)) - np.searchsorted(bins, bins)
        drawn = [self._at(bins, self.position[bins] + within)]
        self.position += np.where(plain, counts, 0)
        for b in np.flatnonzero(~plain & (counts > 0)):
            drawn.append(np.array(self._draw_across(int(b), int(counts[b])), dtype=np.int64))
        return np.concatenate(drawn)

    def _draw_across(self, b: int, count: int) -> list[int]:
        """A draw that meets the end of the bin: a row this batch already has waits for the next batch."""
        waiting = self.deferred.pop(b, [])
        taken, waiting = waiting[:count], waiting[count:]
        while len(taken) < count:
            if self.position[b] == self.sizes[b]:
                self.epoch[b] += 1
                self.keys[b], self.position[b] = self._keys(b), 0
            stop = min(self.sizes[b], self.position[b] + count - len(taken))
            index = np.arange(self.position[b], stop)
            chunk, seen = self._at(np.full(len(index), b), index).tolist(), set(taken)
            self.position[b] = stop
            taken += [row for row in chunk if row not in seen]
            waiting += [row for row in chunk if row in seen]
        if waiting:
            self.deferred[b] = waiting
        return taken

    def _at(self, bins: np.ndarray, index: np.ndarray) -> np.ndarray:
        """[M] int64 rows at place `index` of the present pass over `bins`."""
        place = permute(index.astype(np.uint64), self.sizes[bins].astype(np.uint64), self.keys[bins])
        return self.rows[self.starts[bins] + place.astype(np.int64)].astype(np.int64)

    def _keys(self, b: int) -> np.ndarray:
        return np.random.SeedSequence((self.seed, b, int(self.epoch[b]))).generate_state(ROUNDS, np.uint64)

    def state_dict(self) -> dict:
        deferred = {str(b): list(rows) for b, rows in self.deferred.items()}
        return {"epoch": self.epoch.tolist(), "position": self.position.tolist(), "deferred": deferred}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = np.array(state["epoch"], dtype=np.int64)
        self.position = np.array(state["position"], dtype=np.int64)
        self.deferred = {int(b): list(rows) for b, rows in state["deferred"].items()}
        self.keys = np.stack([self._keys(b) for b in range(len(self.sizes))])
