"""NF4 export: what transformers loads back is the policy within the error of four bits, in a quarter of the bytes."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM

from fastsched.config import ConfigError
from fastsched.engines.models.quantize import quantize_nf4
from fastsched.engines.models.tiny import random_tiny

# QLoRA's table (arXiv 2305.14314, appendix E): 16 levels in [-1, 1], scaled by the largest magnitude of a block of 64 weights
NF4 = torch.tensor([-1.0, -0.6961928, -0.5250731, -0.3949175, -0.2844414, -0.1847734, -0.0910500, 0.0, 0.0795803, 0.1609302,
                    0.2461123, 0.3379152, 0.4407098, 0.5626170, 0.7229568, 1.0])


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def exported(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("nf4")
    plain = random_tiny(folder / "plain", tied=request.param, seed=0)
    return plain, folder / "nf4", quantize_nf4(plain, folder / "nf4", "float32")


def rounded(weight: torch.Tensor) -> torch.Tensor:
    """Every weight at its nearest level of NF4, by our own arithmetic."""
    blocks = weight.reshape(-1, 64)
    scale = blocks.abs().amax(1, keepdim=True)
    nearest = (blocks / scale).unsqueeze(-1).sub(NF4).abs().argmin(-1)
    return (NF4[nearest] * scale).reshape(weight.shape)


def test_reloaded_logits_are_those_of_weights_rounded_to_nf4(exported):
    plain, folder, _ = exported
    ids = torch.arange(3, 60)[None]
    model = AutoModelForCausalLM.from_pretrained(plain).eval()
    with torch.no_grad():
        exact = model(ids).logits
        for name, parameter in model.named_parameters():
            if "proj" in name:
                parameter.copy_(rounded(parameter))
        expected = model(ids).logits
        got = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(ids).logits
    error, quantisation = (got - expected).abs().mean(), (got - exact).abs().mean()
    assert error < 0.1 * quantisation and 0 < quantisation < 0.3 * exact.std()  # what is left is the scales' own 8 bits


def test_linear_weights_take_a_quarter_of_bfloat16_and_the_rest_is_untouched(exported):
    plain, folder, size = exported
    with safe_open(folder / "model.safetensors", "pt") as new, safe_open(plain / "model.safetensors", "pt") as old:
        linear = [n for n in old.keys() if "proj" in n]
        assert size.bfloat16 == sum(2 * old.get_tensor(n).numel() for n in linear)
        parts = [n for n in new.keys() if "proj" in n and n.endswith(("weight", "weight.absmax", "nested_absmax"))]
        stored = sum(new.get_tensor(n).nbytes for n in parts)
        assert stored == size.nf4 and 0.25 < size.nf4 / size.bfloat16 < 0.27
        assert all(torch.equal(new.get_tensor(n), old.get_tensor(n)) for n in old.keys() if n not in linear)
    scheme = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert scheme["quant_method"] == "bitsandbytes" and scheme["bnb_4bit_quant_type"] == "nf4" and scheme["load_in_4bit"]


def test_without_bitsandbytes_the_way_to_it_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="--quantize nf4: needs bitsandbytes; pip install"):
        quantize_nf4(tmp_path, tmp_path / "out", "float32")
