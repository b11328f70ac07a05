"""Four-bit weights through bitsandbytes, in the layout that transformers loads (QLoRA's NF4, arXiv 2305.14314)."""

import importlib.util
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from fastsched.config import require


class Size(NamedTuple):
    """Bytes of the linear layers' weights that were quantised, scales included."""

    bfloat16: int
    nf4: int


def quantize_nf4(model_path: Path, out: Path, dtype: str) -> Size:
    """Write the model of `model_path` to `out` with its linear layers in NF4; embeddings, norms and the head stay in `dtype`.

    One scale for 64 weights, itself quantised to 8 bits (double quantisation). Products are formed in `dtype`.
    ConfigError when bitsandbytes is not installed.
    """
    require(importlib.util.find_spec("bitsandbytes") is not None, "--quantize nf4: needs bitsandbytes; pip install bitsandbytes==0.50.2")
    compute = getattr(torch, dtype)
    scheme = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True,
                                bnb_4bit_compute_dtype=compute)
    model = AutoModelForCausalLM.from_pretrained(model_path, quantization_config=scheme, dtype=compute)
    size = linear_size(model)
    require(size.nf4 > 0, f"--quantize nf4: {model_path} has no linear layer that bitsandbytes quantises")
    model.save_pretrained(out)
    return size


def linear_size(model: nn.Module) -> Size:
    from bitsandbytes.nn import Linear4bit

    weights = [module.weight for module in model.modules() if isinstance(module, Linear4bit)]
    states = [(w.quant_state, w.quant_state.state2) for w in weights]
    scales = sum(tensor.nbytes for state, outer in states for tensor in (state.absmax, outer.absmax))
    return Size(sum(2 * state.shape.numel() for state, _ in states), sum(w.nbytes for w in weights) + scales)
