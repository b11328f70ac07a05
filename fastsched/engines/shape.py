"""What `--dry-run` learns of a model without loading weights, and without a hub where there is none."""

from pathlib import Path
from typing import Optional

from accelerate import init_empty_weights
from huggingface_hub.errors import OfflineModeIsEnabled
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from fastsched.config import ModelConfig, ModelShape
from fastsched.engines.models import require_backend


def hub_tokenizer(cfg: ModelConfig) -> Optional[PreTrainedTokenizerBase]:
    """The tokenizer of a hub model; None where the hub cannot be reached."""
    try:
        tokenizer = AutoTokenizer.from_pretrained(cfg.name, trust_remote_code=cfg.trust_remote_code)
    except (OSError, OfflineModeIsEnabled):
        return None
    require_backend(tokenizer, cfg.name)
    return tokenizer


def folder_shape(path: Path, trust_remote_code: bool) -> ModelShape:
    """From the config.json of a local model folder."""
    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    model.tie_weights()
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return ModelShape(model.num_parameters(), config.num_hidden_layers, config.hidden_size, config.vocab_size,
                      config.num_key_value_heads * head)
