"""Clusters of embeddings: L2-normalise, PCA, K-means (algorithms.md 2.1), by scikit-learn.

N rows, H the embedding's width, D dimensions that PCA keeps, K clusters.
"""

import warnings
from typing import NamedTuple

import numpy as np
from sklearn.cluster import KMeans
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from threadpoolctl import threadpool_limits

from fastsched.config import FeaturesConfig


class Clusterer(NamedTuple):
    pca: PCA
    kmeans: KMeans
    messages: list[str]  # what differs from what was asked for

    def project(self, embeddings: np.ndarray) -> np.ndarray:
        """[N, H] unit vectors -> [N, D] float32."""
        return self.pca.transform(embeddings.astype(np.float32))

    def assign(self, projected: np.ndarray) -> np.ndarray:
        """[N] int32 cluster of each projected row."""
        return self.kmeans.predict(projected).astype(np.int32)


def unit(vectors: np.ndarray) -> np.ndarray:
    """[N, H] float32 of length 1; a zero vector stays zero."""
    vectors = np.asarray(vectors, np.float32)
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.finfo(np.float32).tiny)


def fit_clusters(sample: np.ndarray, cfg: FeaturesConfig) -> Clusterer:
    """Fit both on `sample` [n, H] unit vectors, n at least 2.

    Fewer rows than `features.dims` or `features.clusters` lower them. Rows with equal embeddings can leave clusters empty:
    they keep their numbers. One thread: the sums do not depend on the number of cores.
    """
    sample = np.asarray(sample, np.float32)
    dims, clusters, messages = min(cfg.dims, *sample.shape), min(cfg.clusters, len(sample)), []
    pca = PCA(dims, svd_solver="randomized", random_state=cfg.seed)
    kmeans = KMeans(clusters, random_state=cfg.seed)
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # equal rows: said below
        with np.errstate(invalid="ignore"):  # rows that are all equal have no variance to explain
            projected = pca.fit(sample).transform(sample)
        found = len(np.unique(kmeans.fit(projected).labels_))
    if dims < cfg.dims:
        messages.append(f"features.dims: {cfg.dims} asked for, {len(sample):,} rows of width {sample.shape[1]} give {dims}")
    if clusters < cfg.clusters:
        messages.append(f"features.clusters: {cfg.clusters} asked for, there are only {len(sample):,} rows")
    if found < clusters:
        messages.append(f"features.clusters: {clusters - found} of {clusters} are empty: too many rows have the same embedding")
    return Clusterer(pca, kmeans, messages)
