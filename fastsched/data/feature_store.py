"""Features of the training rows on disk: finished blocks while they are computed, memory-mapped arrays afterwards.

N rows in blocks of `BLOCK`. A folder of features appears complete or not at all.
"""

import json
import os
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fastsched.config import DataConfig, FeaturesConfig, require
from fastsched.data.clusters import fit_clusters, unit
from fastsched.data.datasets import PromptSet
from fastsched.data.difficulty import equal_count_bins
from fastsched.types import Features

BLOCK = 1024  # another size needs another FORMAT in loop/features.py
FIT_ROWS = 100_000  # at most so many random rows fit PCA and K-means; every row is then projected and assigned
MARKER = "features.json"
ARRAYS = ("cluster", "difficulty", "embedding")


@dataclass(frozen=True)
class Blocks:
    """Raw embeddings and log-likelihoods of consecutive rows, one file a block, each written at once or not at all."""

    folder: Path
    rows: int  # N

    def spans(self) -> list[tuple[int, int]]:
        return [(start, min(start + BLOCK, self.rows)) for start in range(0, self.rows, BLOCK)]

    def path(self, start: int) -> Path:
        return self.folder / f"block-{start:010}.npz"

    def missing(self) -> list[tuple[int, int]]:
        return [(start, stop) for start, stop in self.spans() if not self.path(start).exists()]

    def write(self, start: int, embedding: np.ndarray, nll: np.ndarray, unreferenced: int) -> None:
        """embedding [B, H] of any length; nll [B] float64, NaN where there is no answer; rows whose reference column is empty."""
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / "unfinished.npz"
        with temporary.open("wb") as file:
            np.savez(file, embedding=unit(embedding).astype(np.float16), nll=nll.astype(np.float32), unreferenced=unreferenced)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path(start))

    def read(self, start: int) -> tuple[np.ndarray, np.ndarray, int]:
        """([B, H] float16 unit vectors, [B] float32, unreferenced)."""
        with np.load(self.path(start)) as block:
            return block["embedding"], block["nll"], int(block["unreferenced"])

    def sample(self, count: int, seed: int) -> np.ndarray:
        """[at most `count`, H] float16, the embeddings of random rows in their order."""
        chosen = np.arange(self.rows)
        if count < self.rows:
            chosen = np.sort(np.random.default_rng(seed).choice(self.rows, count, replace=False))
        return np.concatenate([self.read(start)[0][chosen[(chosen >= start) & (chosen < stop)] - start] for start, stop in self.spans()])


def finish(blocks: Blocks, folder: Path, cfg: FeaturesConfig) -> None:
    """Cluster the blocks into `folder`, which appears by one rename, its marker written last; then the blocks are deleted.

    The difficulty of a row without a judged answer is the largest finite one plus 1 (algorithms.md 2.1).
    """
    require(blocks.rows >= 2, "features: needs at least two training rows")
    clusterer = fit_clusters(blocks.sample(FIT_ROWS, cfg.seed), cfg)
    partial = blocks.folder / "final"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    messages, unreferenced = clusterer.messages, 0
    shapes = {"cluster": ((), np.int32), "difficulty": ((), np.float32), "embedding": ((clusterer.pca.n_components_,), np.float16)}
    arrays = {name: np.lib.format.open_memmap(partial / f"{name}.npy", "w+", dtype, (blocks.rows, *shape))
              for name, (shape, dtype) in shapes.items()}
    for start, stop in blocks.spans():
        embedding, arrays["difficulty"][start:stop], empty = blocks.read(start)
        unreferenced += empty
        projected = clusterer.project(embedding)
        arrays["cluster"][start:stop] = clusterer.assign(projected)
        arrays["embedding"][start:stop] = unit(projected)
    unjudged = _fill_unjudged(arrays["difficulty"])
    if unjudged:
        messages.append(f"{unjudged:,} of {blocks.rows:,} rows have no answer within features.max_tokens; they count as the hardest")
    if unreferenced:
        messages.append(f"{unreferenced:,} of {blocks.rows:,} rows have no features.reference_column; their answer stands for it")
    for array in arrays.values():
        array.flush()
    (partial / MARKER).write_text(json.dumps({"rows": blocks.rows, "clusters": clusterer.kmeans.n_clusters, "messages": messages}))
    os.replace(partial, folder)
    shutil.rmtree(blocks.folder)


def _fill_unjudged(difficulty: np.ndarray) -> int:
    """Replace what is not finite in place by the largest finite value (0 where there is none) plus 1; returns how many."""
    finite = np.isfinite(difficulty)
    difficulty[~finite] = difficulty[finite].max(initial=0.0) + 1
    return int((~finite).sum())


def open_features(folder: Path) -> Features:
    """Memory-mapped."""
    return Features(*(np.load(folder / f"{name}.npy", mmap_mode="r") for name in ARRAYS))


def about_features(folder: Path) -> dict[str, Any]:
    """What was noted beside the arrays: rows, clusters asked for after clamping, messages."""
    return json.loads((folder / MARKER).read_text())


def cluster_table(features: Features, clusters: int) -> tuple[np.ndarray, np.ndarray]:
    """([K] int64 prompts of each cluster, [K] float64 their mean difficulty, NaN in empty ones)."""
    sizes = np.bincount(features.cluster, minlength=clusters)
    with np.errstate(invalid="ignore"):
        return sizes, np.bincount(features.cluster, weights=features.difficulty, minlength=clusters) / sizes


def with_feature_bins(prompts: PromptSet, features: Features, cfg: DataConfig) -> PromptSet:
    """The prompt set with the difficulty bins of `data.difficulty`, easiest first; `column` leaves it as it is."""
    if cfg.difficulty == "column":
        return prompts
    if cfg.difficulty == "nll":
        bins = equal_count_bins(features.difficulty, cfg.bins)
    else:
        sizes, mean = cluster_table(features, 0)
        rank = np.argsort(np.argsort(mean, kind="stable"), kind="stable")  # NaN, the empty clusters, last
        bins = rank[features.cluster]
    report = {**prompts.report, "train_per_bin": np.bincount(bins).tolist()}
    return replace(prompts, bins=bins, report=report)
