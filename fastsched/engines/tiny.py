"""A Qwen3-architecture model of under 1 M parameters with a real tokenizer, and its supervised warm start.

Prompts and answers travel in chat form: the user asks "What is 37 + 8?", the assistant answers "45<|im_end|>".
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fastsched.config import ConfigError

# B sequences, T tokens of the longest, V vocabulary

WarmStartRow = tuple[str, str, int]  # prompt, answer, difficulty bin
VOCAB = 320
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SENTENCES = (
    "What is {a} + {b}?", "What is {a} - {b}?", "Answer with only the number.", "{a} + {b} = {c}", "{a} - {b} = {c}",
    "user\nHow much is {a} and {b}?", "user\nAdd {a} and {b}.", "user\nGive the sum of {a} and {b}.",
    "assistant\nThe answer is {c}.", "assistant\nThe sum of {a} and {b} is {c}.", "assistant\n{c}",
    "system\nYou are a helpful assistant that adds and subtracts.",
    "system\nWrite the result as a whole number, without any other text.",
)


def tiny_config(vocab: int = VOCAB, tied: bool = True) -> Qwen3Config:
    """Four layers of width 128: 0.83 M parameters with a vocabulary of 320 and tied embeddings."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        bos_token_id=None,
        eos_token_id=SPECIAL.index("<|im_end|>"),
        pad_token_id=SPECIAL.index("<|endoftext|>"),
    )


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens, trained on generated sentences; a digit is its own token wherever it stands."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
        chat_template=CHAT_TEMPLATE,
        model_max_length=512,
        clean_up_tokenization_spaces=False,
    )


def random_tiny(path: Path, tied: bool = True, seed: int = 0) -> Path:
    """Writes a model folder with random float32 weights of sizes that make every token's distribution distinct."""
    torch.manual_seed(seed)
    _save(Qwen3ForCausalLM(tiny_config(tied=tied)), tiny_tokenizer(), path)
    return path


def _corpus() -> list[str]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 10_000, size=(200, 2)).tolist()
    return [s.format(a=a, b=b, c=a + b if "+" in s or "sum" in s else a - b) for a, b in numbers for s in SENTENCES]


def _save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def recipe(rows: Sequence[WarmStartRow], accuracy: float) -> str:
    """Everything that the warm-started weights depend on, as a string to hash."""
    return ""


def warm_start(path: Path, rows: Sequence[WarmStartRow], accuracy: float) -> None:
    raise ConfigError("model.name: builtin:tiny has no warm start yet")
