"""Clusters and their files: against plain linear algebra, for odd data, and after a kill between two blocks."""

import json
from dataclasses import replace

import numpy as np
import pytest

from fastsched.config import ConfigError, DataConfig, FeaturesConfig
from fastsched.data import feature_store as store
from fastsched.data.clusters import fit_clusters, unit
from fastsched.data.feature_store import Blocks, about_features, cluster_table, finish, open_features, with_feature_bins
from fastsched.types import Features

CFG = FeaturesConfig(clusters=5, dims=8)


def blobs(rows=300, groups=5, width=24, seed=0):
    """Embeddings around `groups` directions, and which of them each row belongs to."""
    rng = np.random.default_rng(seed)
    label = rng.integers(0, groups, rows)
    return unit(rng.normal(size=(groups, width))[label] + 0.05 * rng.normal(size=(rows, width))), label


def same_partition(a, b) -> bool:
    return len(set(zip(a.tolist(), b.tolist(), strict=True))) == len(set(a.tolist())) == len(set(b.tolist()))


def write(folder, embedding, nll, empty=0):
    blocks = Blocks(folder, len(embedding))
    for start, stop in blocks.spans():
        blocks.write(start, embedding[start:stop], nll[start:stop], empty)
    return blocks


def test_separate_groups_become_clusters_and_the_projection_is_pca():
    points, label = blobs()
    clusterer = fit_clusters(points, CFG)
    projected = clusterer.project(points)
    assert same_partition(clusterer.assign(projected), label) and not clusterer.messages
    centred = points - points.mean(0)
    truth = np.linalg.svd(centred.astype(np.float64), full_matrices=False)[2][:4]  # the four directions that separate five groups
    np.testing.assert_allclose(np.abs((centred @ truth.T)), np.abs(projected[:, :4]), atol=2e-3)


def test_length_does_not_matter_and_zero_stays_zero():
    points, _ = blobs()
    np.testing.assert_allclose(unit(points * np.linspace(1, 1000, len(points))[:, None]), points, rtol=1e-5, atol=1e-7)
    assert not unit(np.zeros((2, 3))).any()


def test_the_seed_decides_and_options_count():
    points, _ = blobs(groups=40)
    labels = lambda **changes: fit_clusters(points, replace(CFG, **changes)).kmeans.labels_.tolist()
    assert labels() == labels() != labels(seed=1)
    assert len(set(labels(clusters=9))) == 9 and fit_clusters(points, replace(CFG, dims=3)).pca.n_components_ == 3


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("points, changes, dims, clusters, empty, words", [
    (blobs(3)[0], {}, 3, 3, 0, ["features.dims: 8 asked for", "features.clusters: 5 asked for, there are only 3 rows"]),
    (blobs(50)[0], dict(clusters=1), 8, 1, 0, []),
    (np.repeat(blobs(3)[0], 20, 0), {}, 8, 5, 2, ["2 of 5 are empty", "the same embedding"]),
    (np.ones((30, 24), np.float32) / 24**0.5, {}, 8, 5, 4, ["4 of 5 are empty"]),
    (np.zeros((30, 24), np.float32), {}, 8, 5, 4, ["4 of 5 are empty"]),
], ids=["few rows", "one cluster", "duplicates", "all equal", "all zero"])
def test_odd_data_is_clamped_and_said(tmp_path, points, changes, dims, clusters, empty, words):
    finish(write(tmp_path / "b", points, np.ones(len(points))), tmp_path / "out", replace(CFG, **changes))
    features, about = open_features(tmp_path / "out"), about_features(tmp_path / "out")
    assert features.embedding.shape == (len(points), dims) and about["clusters"] == clusters
    sizes, difficulty = cluster_table(features, clusters)
    assert sizes.sum() == len(points) and (sizes == 0).sum() == empty and (np.isnan(difficulty) == (sizes == 0)).all()
    said = " ".join(about["messages"])
    assert bool(said) == bool(words) and all(word in said for word in words), said
    lengths = np.linalg.norm(features.embedding.astype(np.float32), axis=1)
    assert np.all((np.abs(lengths - 1) < 2e-3) | (lengths == 0))


def test_one_row_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="at least two training rows"):
        finish(write(tmp_path / "b", blobs(1)[0], np.ones(1)), tmp_path / "out", CFG)


def test_files_are_mapped_and_hold_what_was_computed(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "BLOCK", 64)
    points, label = blobs()
    nll = np.linspace(0, 5, 300)
    nll[[7, 200]] = np.nan
    finish(write(tmp_path / "b", points * 3, nll, empty=2), tmp_path / "out", CFG)
    features = open_features(tmp_path / "out")
    assert isinstance(features.cluster, np.memmap) and not (tmp_path / "b").exists()
    assert (features.cluster.dtype, features.difficulty.dtype, features.embedding.dtype) == (np.int32, np.float32, np.float16)
    assert same_partition(features.cluster, label)
    np.testing.assert_allclose(features.difficulty, np.where(np.isnan(nll), 6.0, nll), rtol=1e-6)  # the largest finite one plus 1
    messages = about_features(tmp_path / "out")["messages"]
    assert any("2 of 300 rows have no answer" in m for m in messages) and any("10 of 300 rows have no features.reference_column" in m
                                                                             for m in messages)


def test_no_answer_at_all_is_one_difficulty(tmp_path):
    finish(write(tmp_path / "b", blobs()[0], np.full(300, np.nan)), tmp_path / "out", CFG)
    assert set(open_features(tmp_path / "out").difficulty.tolist()) == {1.0}


def test_fitting_on_a_part_serves_all_rows(tmp_path, monkeypatch):
    """PCA and K-means see FIT_ROWS random rows; every row gets a cluster."""
    monkeypatch.setattr(store, "BLOCK", 64)
    monkeypatch.setattr(store, "FIT_ROWS", 100)
    points, label = blobs(1000)
    blocks = write(tmp_path / "b", points, np.ones(1000))
    sample = blocks.sample(100, 42)
    assert sample.shape == (100, 24) and len(np.unique(sample, axis=0)) == 100
    assert {row.tobytes() for row in sample} <= {row.tobytes() for row in unit(points).astype(np.float16)}
    fitted = []
    monkeypatch.setattr(store, "fit_clusters", lambda rows, cfg: fitted.append(len(rows)) or fit_clusters(rows, cfg))
    finish(blocks, tmp_path / "out", CFG)
    assert fitted == [100]
    assert same_partition(open_features(tmp_path / "out").cluster, label)


def test_a_block_that_was_not_finished_is_missing_and_nothing_is_half_done(tmp_path, monkeypatch):
    """The fault: the disk is full in the middle of a block, then in the middle of the arrays."""
    monkeypatch.setattr(store, "BLOCK", 64)
    points, _ = blobs()
    blocks = write(tmp_path / "b", points, np.ones(300))
    blocks.path(128).unlink()
    with monkeypatch.context() as fault:
        fault.setattr(store.os, "fsync", lambda fd: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            blocks.write(128, points[128:192], np.ones(64), 0)
    assert blocks.missing() == [(128, 192)]
    blocks.write(128, points[128:192], np.ones(64), 0)
    with monkeypatch.context() as fault:
        fault.setattr(store.json, "dumps", lambda value: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            finish(blocks, tmp_path / "out", CFG)
    assert not (tmp_path / "out").exists() and blocks.missing() == []
    finish(blocks, tmp_path / "out", CFG)
    finish(write(tmp_path / "b", points, np.ones(300)), tmp_path / "straight", CFG)
    for name in ("cluster.npy", "difficulty.npy", "embedding.npy", "features.json"):
        assert (tmp_path / "out" / name).read_bytes() == (tmp_path / "straight" / name).read_bytes()


def test_bins_from_features(load):
    train, _ = load(digits=(1,), size=40)
    n = len(train)
    features = Features(np.array([3, 0, 5, 5] * 10, np.int32), np.tile(np.float32([0.5, 9.0, 1.0, 2.0]), 10) + np.arange(n) * 1e-3,
                        np.zeros((n, 1), np.float16))
    assert with_feature_bins(train, features, DataConfig()) is train
    by_nll = with_feature_bins(train, features, DataConfig(difficulty="nll", bins=4))
    assert by_nll.bins[:4].tolist() == [0, 3, 1, 2] and by_nll.report["train_per_bin"] == [10] * 4
    assert with_feature_bins(train, features, DataConfig(difficulty="nll", bins=2)).report["train_per_bin"] == [20, 20]
    by_cluster = with_feature_bins(train, features, DataConfig(difficulty="cluster"))
    assert by_cluster.bins[:4].tolist() == [0, 2, 1, 1] and by_cluster.report["train_per_bin"] == [10, 20, 10]  # easiest first, none empty
    assert by_cluster.prompt(1).bin == 2 and by_cluster.digest == train.digest
    with pytest.raises(ConfigError, match="data.difficulty_column"):
        DataConfig(difficulty="nll", difficulty_column="level")
    assert json.dumps(by_nll.report)
