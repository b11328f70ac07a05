"""Packed equals alone, tried on random models of many architectures."""

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    BloomConfig,
    GPT2Config,
    LlamaConfig,
    MambaConfig,
    OPTConfig,
    Phi3Config,
    PhiConfig,
    Qwen3Config,
    RecurrentGemmaConfig,
)

from fastsched.config import ConfigError
from fastsched.engines.learner.packing_check import require_packable_model

SIZES = dict(vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
LONGEST = 200
LONG = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
TAKEN = {
    "qwen3": Qwen3Config(**SIZES, num_key_value_heads=1, head_dim=16),
    "llama": LlamaConfig(**SIZES),
    "llama, scaled alike at every length": LlamaConfig(**SIZES, rope_parameters={"rope_type": "linear", "factor": 4.0, "rope_theta": 1e4}),
    "dynamic within its length": LlamaConfig(**SIZES, max_position_embeddings=LONGEST,
                                             rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "gpt2": GPT2Config(vocab_size=64, n_positions=LONGEST, n_embd=32, n_layer=2, n_head=2),
    "opt": OPTConfig(vocab_size=64, hidden_size=32, ffn_dim=64, num_hidden_layers=2, num_attention_heads=2, word_embed_proj_dim=32,
                     max_position_embeddings=LONGEST),
    "phi": PhiConfig(**SIZES),
}
REFUSED = {
    "dynamic": LlamaConfig(**SIZES, max_position_embeddings=64,
                           rope_parameters={"rope_type": "dynamic", "factor": 4.0, "rope_theta": 1e4}),
    "longrope": Phi3Config(**SIZES, num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=64,
                           rope_parameters=LONG, pad_token_id=0),
    "alibi": BloomConfig(vocab_size=64, hidden_size=32, n_layer=2, n_head=2),
    "mamba": MambaConfig(vocab_size=64, hidden_size=32, num_hidden_layers=2, state_size=8),
    "recurrent gemma": RecurrentGemmaConfig(vocab_size=64, hidden_size=32, intermediate_size=96, num_hidden_layers=3,
                                            num_attention_heads=2, lru_width=32, head_dim=16),
}


def model(config, dtype):
    torch.manual_seed(0)
    config.initializer_range = 0.2  # as large as weights of this width become: positions matter
    return AutoModelForCausalLM.from_config(config, dtype=dtype)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TAKEN)
def test_models_whose_sequences_do_not_see_one_another_are_taken(name, dtype, share):
    policy = model(TAKEN[name], dtype)
    require_packable_model(policy, LONGEST, share)


@pytest.mark.parametrize("share", [True, False], ids=["shared", "apart"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", REFUSED)
def test_models_whose_sequences_depend_on_their_row_are_refused(name, dtype, share):
    with pytest.raises(ConfigError, match=f"^learner.teacher: {REFUSED[name].model_type} .*packed row"):
        require_packable_model(model(REFUSED[name], dtype), LONGEST, share, "learner.teacher")


def test_the_attention_that_was_chosen_stays():
    policy = model(TAKEN["llama"], torch.float32)
    policy.set_attn_implementation("flex_attention")
    require_packable_model(policy, LONGEST, True)
    assert policy.config._attn_implementation == "flex_attention"
