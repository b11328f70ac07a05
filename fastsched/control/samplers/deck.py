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


def apportion(weights: np.ndarray, count: int, sizes: np.ndarray, offset: float) -> np.ndarray:
    """[K] int64 counts that sum to `count`, none above `sizes`; needs count <= sum(sizes).

    Systematic rounding: with `offset` uniform in [0, 1) each bin gets floor or ceil of count * weight and exactly
    that on average, so a batch carries no multinomial noise. What a small bin cannot hold goes to the others by
    weight, and to bins of weight 0 only when no other has room.
    """
    counts = np.zeros_like(sizes)
    while (left := count - counts.sum()) > 0:
        room = sizes - counts
        share = np.where(room > 0, weights, 0.0)
        total = np.cumsum(share if share.any() else room)
        edges = np.minimum(np.floor(left * (total / total[-1]) + offset), left).astype(np.int64)
        counts += np.minimum(np.diff(edges, prepend=0), room)
    return counts


class Deck:
    """The rows of every bin in shuffled order. K bins, N rows."""

    def __init__(self, bins: np.ndarray, sizes: np.ndarray, seed: int):
        """bins: [N] unsigned integers in [0, K), 16 bits where they suffice (NumPy then sorts by radix);
        sizes: [K] int64 rows in each bin."""
        order = np.argsort(bins, kind="stable")
        self.rows = order.astype(np.int32) if len(bins) < 1 << 31 else order
        self.bins, self.sizes, self.seed = bins, sizes, seed
        self.starts = np.cumsum(sizes) - sizes
        self.position = np.zeros_like(sizes)
        self.epoch = np.zeros_like(sizes)
        self.keys = np.stack([self._keys(b) for b in range(len(sizes))])
        self.waiting: list[int] = []

    def draw(self, counts: np.ndarray) -> np.ndarray:
        """[sum(counts)] int64 distinct rows, `counts[b]` of bin b. counts: [K] int64, at most `sizes`.

        Where a bin is reshuffled in mid-batch, a row that the batch already has waits for the next batch.
        """
        if np.any(counts > self.sizes):
            raise ValueError(f"draw of {counts.tolist()} rows from bins of {self.sizes.tolist()}")
        taken = self._take_waiting(counts)
        while (need := counts - np.bincount(self.bins[taken], minlength=len(counts))).any():
            both = np.concatenate([taken, self._advance(need)])
            first = np.zeros(len(both), dtype=bool)
            first[np.unique(both, return_index=True)[1]] = True
            self.waiting += both[~first].tolist()
            taken = both[first]
        return taken

    def draw_others(self, counts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """As `draw`, and none of the rows `drawn` ([M], which count as visited) of bins that hold enough others."""
        drawn, rows = self.avoidable(counts, drawn), np.zeros(0, np.int64)
        while (need := counts - np.bincount(self.bins[rows], minlength=len(counts))).any():
            found = self.draw(need)
            rows = np.concatenate([rows, found[~np.isin(found, np.concatenate([rows, drawn]))]])
        return rows

    def avoidable(self, counts: np.ndarray, drawn: np.ndarray) -> np.ndarray:
        """Those of the rows `drawn` whose bins hold `counts` others."""
        room = self.sizes - np.bincount(self.bins[drawn], minlength=len(counts)) >= counts
        return drawn[room[self.bins[drawn]]]

    def _take_waiting(self, counts: np.ndarray) -> np.ndarray:
        taken, kept, room = [], [], counts.copy()
        for row in self.waiting:
            b = self.bins[row]
            fits = room[b] > 0 and row not in taken
            room[b] -= fits
            (taken if fits else kept).append(row)
        self.waiting = kept
        return np.array(taken, dtype=np.int64)

    def _advance(self, counts: np.ndarray) -> np.ndarray:
        """[sum(counts)] int64, the next rows of every bin; a bin that ends on the way is reshuffled."""
        bins = np.repeat(np.arange(len(counts)), counts)
        index = self.position[bins] + np.arange(len(bins)) - np.searchsorted(bins, bins)
        keys, beyond = self.keys[bins], index >= self.sizes[bins]
        self.position += counts
        for b in np.flatnonzero(self.position > self.sizes):
            self.position[b] -= self.sizes[b]
            self.epoch[b] += 1
            self.keys[b] = self._keys(b)
        keys[beyond], index[beyond] = self.keys[bins[beyond]], index[beyond] - self.sizes[bins[beyond]]
        place = permute(index.astype(np.uint64), self.sizes[bins].astype(np.uint64), keys)
        return self.rows[self.starts[bins] + place.astype(np.int64)].astype(np.int64)

    def _keys(self, b: int) -> np.ndarray:
        return np.random.SeedSequence((self.seed, int(b), int(self.epoch[b]))).generate_state(ROUNDS, np.uint64)

    def state_dict(self) -> dict:
        return {"epoch": self.epoch.tolist(), "position": self.position.tolist(), "waiting": list(self.waiting)}

    def load_state_dict(self, state: dict) -> None:
        self.epoch = np.array(state["epoch"], dtype=np.int64)
        self.position = np.array(state["position"], dtype=np.int64)
        self.waiting = list(state["waiting"])
        self.keys = np.stack([self._keys(b) for b in range(len(self.sizes))])
