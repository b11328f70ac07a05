"""`fastsched cluster` and the runs that use it, through the command line."""

import json
import re
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from command_line import ROOT, environment
from whole_run import graded, rows

from fastsched.cli import main
from fastsched.config import ConfigError, ModelConfig
from fastsched.config.arguments import parse_config
from fastsched.data.datasets import load_prompts
from fastsched.data.feature_store import Blocks, open_features
from fastsched.engines.models.loading import load_tokenizer
from fastsched.loop.features import compute_features, feature_user, features_folder, model_digest

SMALL = ["--rollout.engine", "transformers", "--data.size", "200", "--data.eval_per_bin", "4", "--rollout.responses", "4",
         "--train.steps", "3", "--log.plots", "false"]


@pytest.fixture(autouse=True)
def one_thread():
    """Threads of tiny products cost more than they save, and many times more while anything else runs."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def only_folder(cache):
    (folder,) = [p for p in (cache / "features").iterdir() if p.is_dir()]
    return folder


def test_ads_tiny_needs_clusters_and_trains_with_them(fastsched, tmp_path, random_model, capsys, monkeypatch):
    """The preset on a random model: the error names the command, which computes once; the run cuts its bins from it and samples by it."""
    options = ["--preset", "ads-tiny", "--model.name", str(random_model), *SMALL, "--data.difficulty", "nll", "--data.bins", "3",
               "--reward.kind", "graded:score"]
    train = ["train", *options, "--run_dir", str(tmp_path / "run")]
    own = {"FASTSCHED_CACHE": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1", **graded(tmp_path)}
    monkeypatch.setenv("FASTSCHED_CACHE", own["FASTSCHED_CACHE"])
    monkeypatch.setenv("COLUMNS", "200")
    refused = fastsched(*train, **own)
    assert refused.returncode == 2 and "scheduler.kind ads: needs" in refused.stderr, refused.stdout + refused.stderr
    command = re.search(r"run `fastsched (cluster .*)`", refused.stderr)[1].split()
    assert command == ["cluster", *options]
    monkeypatch.setattr("fastsched.commands.cluster.INTERVAL", 0.0)
    assert main(command) == 0
    first = capsys.readouterr().out
    assert "written: " in first and "mean difficulty" in first and "rows/s" in first and "200/200" in first
    assert "... 100 of 200 rows, " in first and "s left" in first
    features = open_features(only_folder(tmp_path / "cache"))
    assert len(features.cluster) == len(features.difficulty) == len(features.embedding) == 200
    for k, n in enumerate(np.bincount(features.cluster)):
        assert re.search(rf"│ +{k} │ +{n} │ +{features.difficulty[features.cluster == k].mean():.3f} │", first)
    assert main(command) == 0
    again = capsys.readouterr().out
    assert "cached: " in again and "rows/s" not in again and "mean difficulty" in again
    done = fastsched(*train, **own)
    assert done.returncode == 0 and "features: 200 prompts in 16 clusters" in done.stdout, done.stdout + done.stderr
    last = rows(tmp_path / "run")[-1]
    assert "w_2" in last and "w_3" not in last and sum(float(last[f"w_{b}"]) for b in range(3)) == pytest.approx(1)
    evaluated = fastsched("eval", str(tmp_path / "run"), **own)  # another model.name: needs no features; held-out bins are digits
    assert evaluated.returncode == 0 and "4 digits" in evaluated.stdout, evaluated.stdout + evaluated.stderr
    assert main(["train", *options, "--dry-run"]) == 0 and "features: 200 prompts in 16 clusters" in capsys.readouterr().out
    assert main(["train", *options, "--train.seed", "1", "--dry-run"]) == 0
    assert "features: scheduler.kind ads: needs" in capsys.readouterr().out


@pytest.mark.slow
def test_a_killed_run_goes_on_from_its_blocks(tmp_path, random_model, capsys, monkeypatch):
    """kill -9 in the middle of the rows; then the same files as an uninterrupted run, with the finished blocks not computed again."""
    command = ["cluster", "--model.name", str(random_model), "--data.size", "3500", "--features.clusters", "4", "--features.dims", "8"]
    caches = [tmp_path / "killed", tmp_path / "straight"]
    env = {**environment(), "FASTSCHED_CACHE": str(caches[0]), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([sys.executable, "-m", "fastsched.cli", *command], cwd=ROOT, env=env, stdout=subprocess.PIPE,
                               stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 200
    while not list(caches[0].glob("features/*.partial/block-*.npz")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    finished = len(list(caches[0].glob("features/*.partial/block-*.npz")))
    assert 1 <= finished < 4 and not [p for p in caches[0].glob("features/*") if p.is_dir() and p.suffix != ".partial"]
    computed, write = [], Blocks.write
    monkeypatch.setattr(Blocks, "write", lambda blocks, start, *values: (computed.append(start), write(blocks, start, *values)))
    for cache, blocks in zip(caches, (4 - finished, 4), strict=True):
        monkeypatch.setenv("FASTSCHED_CACHE", str(cache))
        computed.clear()
        assert main(command) == 0 and len(computed) == blocks
    assert "written: " in capsys.readouterr().out and not list(caches[0].glob("features/*.partial"))
    for name in ("cluster.npy", "difficulty.npy", "embedding.npy", "features.json"):
        assert (only_folder(caches[0]) / name).read_bytes() == (only_folder(caches[1]) / name).read_bytes()


def test_what_needs_features():
    for kind in ("adaptive", "mopps", "learned"):
        assert feature_user(parse_config(["--scheduler.kind", kind])) is None
    assert feature_user(parse_config(["--scheduler.kind", "dots"])) == "scheduler.kind dots"
    learned = parse_config(["--scheduler.kind", "learned", "--scheduler.learned.arms", "clusters"])
    assert feature_user(learned) == "scheduler.learned.arms clusters"
    assert feature_user(parse_config(["--data.difficulty", "cluster"])) == "data.difficulty cluster"
    assert feature_user(parse_config(["--scheduler.kind", "ads", "--train.prompts_per_step", "128"])) == "scheduler.kind ads"


def test_a_model_is_known_by_its_content(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")
    one, two = tmp_path / "a", tmp_path / "b"
    assert model_digest(str(one), one) == model_digest(str(two), two)
    (two / "model.safetensors").write_bytes(b"Weights")
    assert model_digest(str(one), one) != model_digest(str(two), two)
    (two / "model.safetensors").write_bytes(b"weights")
    (two / "model.safetensors").rename(two / "other.safetensors")
    assert model_digest(str(one), one) != model_digest(str(two), two)
    hub = tmp_path / "snapshots" / "0123abc"
    hub.mkdir(parents=True)
    assert model_digest("owner/model", hub) == "owner/model@0123abc" and model_digest("builtin:tiny", one) == "a"


@pytest.fixture
def computed(tmp_path, random_model, monkeypatch):
    """Features of 60 rows with the given feature options, and their folder."""
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path / "cache"))
    lines = [{"prompt": f"What is {i} + {i % 7}?", "answer": str(i + i % 7), "solution": f"The sum of {i % 5} is {i}."} for i in range(64)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = load_tokenizer(random_model, ModelConfig())
    base = ["--model.name", str(random_model), "--data.task", "dataset", "--data.source", str(tmp_path / "rows.jsonl"),
            "--data.eval_per_bin", "4", "--features.clusters", "4", "--features.dims", "8"]

    def call(*options):
        cfg = parse_config([*base, *options])
        train, _ = load_prompts(cfg.data, model, 0)
        folder = features_folder(cfg, random_model, train)
        compute_features(cfg, random_model, model, train, folder, lambda rows: None)
        return open_features(folder), folder

    return call


@pytest.mark.parametrize("options, changed", [
    (["--features.reference_column", "solution"], {"embedding"}),
    (["--features.max_tokens", "18"], {"embedding", "difficulty"}),
    (["--features.clusters", "6"], {"cluster"}),
    (["--features.dims", "5"], {"embedding"}),
    (["--model.dtype", "bfloat16"], {"embedding", "difficulty"}),
])
def test_every_feature_option_counts(computed, options, changed):
    (before, folder), (after, other) = computed(), computed(*options)
    assert folder != other
    different = {name for name in ("cluster", "difficulty", "embedding")
                 if getattr(before, name).shape != getattr(after, name).shape or (getattr(before, name) != getattr(after, name)).any()}
    assert changed <= different and ("difficulty" in different) == ("difficulty" in changed)


def test_the_seed_and_the_encoder_name_other_features_and_the_batching_does_not(computed):
    folders = {computed(*options)[1] for options in ([], ["--features.seed", "7"], ["--features.batch_tokens", "64"])}
    assert len(folders) == 2


def test_batching_changes_rounding_only(computed, tmp_path, monkeypatch):
    big, _ = computed()
    monkeypatch.setenv("FASTSCHED_CACHE", str(tmp_path / "again"))
    small, _ = computed("--features.batch_tokens", "40")
    np.testing.assert_allclose(big.difficulty, small.difficulty, rtol=1e-5)


def test_a_missing_optional_package_is_one_line(computed, monkeypatch):
    monkeypatch.setitem(sys.modules, "sentence_transformers", None)  # the fault: not installed
    with pytest.raises(ConfigError, match="features.encoder: .*pip install sentence-transformers"):
        computed("--features.encoder", "sentence-transformers:all-MiniLM-L6-v2")


@pytest.mark.parametrize("arguments, words", [
    (["--features.encoder", "bert"], "features.encoder"),
    (["--features.clusters", "0"], "features"),
    (["--preset", "ads-tiny", "--config", "x.yaml"], "exclude each other"),
    (["--run_dir", "x"], "unknown option --run_dir"),
])
def test_bad_arguments(capsys, arguments, words):
    assert main(["cluster", *arguments]) == 2
    assert words in capsys.readouterr().err


def test_help(capsys):
    assert main(["cluster", "--help"]) == 0 and "features.*" in capsys.readouterr().out
