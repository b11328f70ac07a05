"""What `--dry-run` learns of a model without loading weights, and without a hub where there is none."""

from pathlib import Path
from typing import Optional

from accelerate import init_empty_weights
from huggingface_hub import snapshot_download
from huggingface_hub.errors import LocalEntryNotFoundError
from transformers import AutoModelForCausalLM

from fastsched.config import ModelConfig, ModelShape
from fastsched.engines.models.loading import hub_errors, load_config, loading

DESCRIPTION = ("*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py")
"""Everything in a hub model's repository but its weights."""


def hub_description(name: str) -> Optional[Path]:
    """A folder with configuration and tokenizer of a hub model, downloaded or cached; None where the hub cannot be reached.

    ConfigError for a name that the hub does not know or does not give out.
    """
    with hub_errors(name):
        try:
            return Path(snapshot_download(name, allow_patterns=list(DESCRIPTION)))
        except LocalEntryNotFoundError:
            return None


def folder_shape(path: Path, cfg: ModelConfig) -> ModelShape:
    """From the config.json of a model folder. ConfigError for an architecture that is unknown or no causal language model."""
    config = load_config(path, cfg)
    with loading(path, "config.json"), init_empty_weights():
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=cfg.trust_remote_code)
    model.tie_weights()
    text = config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    return ModelShape(model.num_parameters(), text.num_hidden_layers, text.hidden_size, text.vocab_size, heads * head)
