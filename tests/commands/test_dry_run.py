"""`--dry-run` with and without a hub; the hub here is a folder in the layout of its cache."""

import shutil

import httpx
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, RepositoryNotFoundError

from fastsched.cli import main
from fastsched.engines.models import shape

BASE = ["train", "--dry-run", "--data.size", "200", "--data.eval_per_bin", "2"]


def unreachable(*_, **__):
    raise LocalEntryNotFoundError("no connection")


def unknown(*_, **__):
    raise RepositoryNotFoundError("404", response=httpx.Response(404, request=httpx.Request("GET", "https://hub")))


@pytest.fixture
def hub(monkeypatch, tmp_path, random_model):
    """A hub that gives out everything but weights."""
    snapshot = tmp_path / "models--some--model/snapshots/abc"
    shutil.copytree(random_model, snapshot, ignore=shutil.ignore_patterns("*.safetensors"))
    monkeypatch.setattr(shape, "snapshot_download", lambda name, allow_patterns: str(snapshot))


def test_a_hub_model_is_described_without_its_weights(hub, capsys):
    """The fault: memory unknown unless model.shape was given."""
    assert main([*BASE, "--model.name", "some/model"]) == 0
    out = capsys.readouterr().out
    assert "memory on each of 1 ranks" in out and "longest" in out and "memory: unknown" not in out
    assert main([*BASE, "--model.name", "some/model", "--rollout.max_new_tokens", "1000", "--learner.micro_batch_tokens", "99999"]) == 2
    assert "model.name: qwen3 has 512 positions" in capsys.readouterr().err


def test_a_hub_that_is_not_there_is_told_from_a_name_that_it_does_not_know(monkeypatch, capsys):
    monkeypatch.setattr(shape, "snapshot_download", unreachable)
    assert main([*BASE, "--model.name", "some/model"]) == 0
    out = capsys.readouterr().out
    assert "some/model cannot be read here (no hub)" in out and "memory: unknown" in out
    monkeypatch.setattr(shape, "snapshot_download", unknown)
    assert main([*BASE, "--model.name", "some/modle"]) == 2
    assert "model.name: the hub refuses 'some/modle' (RepositoryNotFoundError)" in capsys.readouterr().err
    for name, words in (("./no-such-folder", "there is no folder"), ("a b", "neither a folder nor a valid hub name")):
        monkeypatch.undo()
        assert main([*BASE, "--model.name", name]) == 2
        assert words in capsys.readouterr().err


def test_the_dry_run_checks_what_a_run_checks_of_packing(capsys, random_model):
    """With the longest prompt that there is, not with the longest that there might be."""
    base = [*BASE, "--model.name", str(random_model), "--rollout.responses", "4", "--rollout.max_new_tokens", "8"]
    assert main([*base, "--learner.micro_batch_tokens", "100"]) == 0
    assert main([*base, "--learner.micro_batch_tokens", "30"]) == 2
    assert "learner.micro_batch_tokens: 30 is less than the" in capsys.readouterr().err


@pytest.mark.parametrize("options, entry", [
    (("--learner.logits", "bf16", "--learner.kl", "exact"), 2 + 2), (("--learner.logits", "fp32", "--learner.kl", "exact"), 4 + 2 + 4),
    (("--learner.logits", "fp32", "--learner.kl", "k3"), 4 + 2), (("--model.dtype", "float32", "--learner.kl", "exact"), 4 + 4)])
def test_the_estimate_counts_what_the_head_holds(monkeypatch, capsys, options, entry):
    """Logits, their gradient where it is bf16 beside fp32, the reference's logits; 1000 rows of a vocabulary of 1,000,000."""
    monkeypatch.setattr(shape, "snapshot_download", unreachable)
    sizes = ("--model.shape.parameters", "1e9", "--model.shape.layers", "1", "--model.shape.hidden", "1", "--model.shape.vocab", "1000000",
             "--model.shape.kv_width", "1")
    assert main([*BASE, "--model.name", "some/model", "--model.dtype", "bfloat16", "--learner.chunk_rows", "1000", *sizes, *options]) == 0
    line = next(line for line in capsys.readouterr().out.splitlines() if "logits of one chunk" in line)
    assert float(line.split()[-2]) == pytest.approx((entry * 1e9 + 4e6) / 2**30, abs=0.01)
