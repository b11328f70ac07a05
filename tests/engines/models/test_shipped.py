"""The warm-started policies of the package: found by what they were warmed up on, checked, the same on every machine."""

import pytest
import torch
from safetensors.torch import load_file

from fastsched.config import ConfigError
from fastsched.config.arguments import parse_config, preset_names, preset_path
from fastsched.engines.models import loading, shipped, tiny
from fastsched.loop.prepare import warm_start_rows

SHIPPED = shipped.FOLDER
PRESETS = {"tiny-cpu": "arithmetic.safetensors", "chain-tiny": "chain.safetensors"}


def preset(name):
    return parse_config(["--config", str(preset_path(name))])


@pytest.fixture(scope="module")
def recipes():
    """{preset of the tiny model: (rows, accuracy)}, rows generated once for each task."""
    found, rows = {}, {}
    for name in preset_names():
        cfg = preset(name)
        if cfg.model.name == "builtin:tiny":
            task = (cfg.data.task, cfg.data.digits, cfg.data.operators, cfg.data.negative)
            rows.setdefault(task, warm_start_rows(cfg.data))
            found[name] = rows[task], cfg.model.warm_start_accuracy
    return found


@pytest.fixture
def no_warm_start(monkeypatch):
    def warm_start(*_):
        raise AssertionError("made on this machine")

    monkeypatch.setattr(tiny, "warm_start", warm_start)


def test_every_tiny_preset_has_its_policy_in_the_package(recipes):
    found = {name: shipped.shipped(*recipe) for name, recipe in recipes.items()}
    assert all(found.values()) and len(found) > 5
    assert {name: found[name].file for name in PRESETS} == PRESETS
    assert all((shipped.FOLDER / policy.file).stat().st_size < 1_000_000 for policy in shipped.POLICIES)


@pytest.mark.parametrize("name", PRESETS)
def test_a_shipped_policy_is_taken_as_it_is(recipes, tmp_path, no_warm_start, name):
    rows, accuracy = recipes[name]
    cfg = preset(name).model
    path = loading.resolve_model(cfg, tmp_path, warm_start_rows=rows)
    model, half = loading.load_policy(path, cfg), load_file(shipped.FOLDER / PRESETS[name])
    assert all(p.dtype == torch.float32 and torch.equal(p, half[n].float()) for n, p in model.named_parameters())
    assert half.keys() == dict(model.named_parameters()).keys() and loading.stop_token_ids(path) == [2]
    tokenizer = loading.load_tokenizer(path, cfg)
    assert tokenizer.get_vocab() == tiny.tiny_tokenizer().get_vocab() and tokenizer.chat_template == tiny.CHAT_TEMPLATE
    easy = tiny.encode(tokenizer, [row for row in rows if row[2] == 0][: tiny.CHECK_ROWS])
    assert tiny.expected_accuracy(model, easy) == pytest.approx(accuracy, abs=0.12)  # at the check of the warm start that it passed


def test_another_warm_start_is_made_on_this_machine(recipes, tmp_path, no_warm_start):
    rows, accuracy = recipes["tiny-cpu"]
    assert shipped.shipped(rows[:-1], accuracy) is shipped.shipped(rows, accuracy - 0.01) is None
    with pytest.raises(AssertionError, match="made on this machine"):
        loading.resolve_model(preset("tiny-cpu").model, tmp_path, warm_start_rows=rows[:-1])


@pytest.mark.parametrize("file", ["arithmetic.safetensors", "tokenizer.json"])
def test_a_file_that_was_changed_is_named(recipes, tmp_path, monkeypatch, file):
    """The fault: one byte of a tensor, which loads without complaint; and a file that is gone."""
    monkeypatch.setattr(shipped, "FOLDER", tmp_path)
    for name in ("arithmetic.safetensors", "tokenizer.json"):
        (tmp_path / name).write_bytes((SHIPPED / name).read_bytes())
    assert shipped.shipped(*recipes["tiny-cpu"])
    content = bytearray((tmp_path / file).read_bytes())
    content[-1] ^= 1
    (tmp_path / file).write_bytes(content)
    with pytest.raises(ConfigError, match=f"model.name: {tmp_path / file} of the package is missing or damaged"):
        shipped.shipped(*recipes["tiny-cpu"])
    (tmp_path / file).unlink()
    with pytest.raises(ConfigError, match="missing or damaged"):
        shipped.shipped(*recipes["tiny-cpu"])


def test_what_is_packed_comes_back_within_half_precision(tmp_path):
    model = loading.load_policy(tiny.random_tiny(tmp_path / "m"), preset("tiny-cpu").model)
    shipped.pack(model, tmp_path / "half.safetensors")
    half = load_file(tmp_path / "half.safetensors")
    for name, weight in model.named_parameters():
        torch.testing.assert_close(half[name].float(), weight, rtol=2**-11, atol=2**-25)
