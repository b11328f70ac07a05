"""A Qwen3-architecture model of under 1 M parameters with a real tokenizer, and its supervised warm start.

Prompts and answers travel in chat form: the user asks "What is 37 + 8?", the assistant answers "45<|im_end|>".
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from fastsched.config import ConfigError

# N rows, B rows of one batch, T tokens of the longest row, V vocabulary

WarmStartRow = tuple[str, str, int]  # prompt, answer, difficulty bin
VOCAB = 320
IGNORE = -100
MIXTURE = (0.1, 0.6, 0.25, 0.05)  # share of each bin in the warm start, from easy to hard
BATCH = 64
MUON_LR, ADAMW_LR, WARMUP = 0.02, 3e-3, 50
MAX_STEPS, CHECK_EVERY, CHECK_ROWS = 3000, 10, 256
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
    """Two layers of width 128: 0.43 M parameters with a vocabulary of 320 and tied embeddings."""
    return Qwen3Config(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=384,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},  # sequences are some 25 tokens long
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
    return in_chat_form(bpe)


def in_chat_form(bpe: Tokenizer) -> PreTrainedTokenizerFast:
    """The BPE with the special tokens and the chat template of the tiny model."""
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
    """Writes a model folder with random float32 weights."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = Qwen3ForCausalLM(tiny_config(tied=tied))
    save(model, tiny_tokenizer(), path)
    return path


def _corpus() -> list[str]:
    rng = np.random.default_rng(0)
    numbers = rng.integers(0, 10_000, size=(200, 2)).tolist()
    return [s.format(a=a, b=b, c=a + b if "+" in s or "sum" in s else a - b) for a, b in numbers for s in SENTENCES]


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Writes the model folder."""
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


class Encoded(NamedTuple):
    """Prompts and answers as the model sees them."""

    ids: Tensor  # [N, T] int64, right-padded
    labels: Tensor  # [N, T] int64: the answer's tokens and its end token, IGNORE elsewhere

    def take(self, index: np.ndarray) -> "Encoded":
        return Encoded(self.ids[index], self.labels[index])


def recipe(rows: Sequence[WarmStartRow], accuracy: float) -> str:
    """Everything that the warm-started weights depend on, as a string to hash: this file, the rows, the aim."""
    return json.dumps([Path(__file__).read_text(), list(rows), accuracy])


def warm_start(path: Path, rows: Sequence[WarmStartRow], accuracy: float) -> list[float]:
    """Trains a tiny model on `rows` until its lowest bin is right with probability `accuracy`, and writes it to `path`.

    Stopped this early, the policy keeps the entropy that reinforcement learning needs. Returns the final accuracy of
    each bin. Runs on one thread: sums do not depend on the number of cores, and a busy machine costs no spinning. The
    global generator is left alone. Raises ConfigError when MAX_STEPS do not suffice.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _warm_start(path, rows, accuracy)
    finally:
        torch.set_num_threads(threads)


def _warm_start(path: Path, rows: Sequence[WarmStartRow], accuracy: float) -> list[float]:
    tokenizer = tiny_tokenizer()
    data = encode(tokenizer, rows)
    row_bins = np.array([row[2] for row in rows])
    bins = [np.flatnonzero(row_bins == b) for b in np.unique(row_bins)]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(tiny_config())
    rng = np.random.default_rng(0)
    optimizers = _optimizers(model)
    for step in range(1, MAX_STEPS + 1):
        _train_step(model, optimizers, data.take(_draw(bins, rng)), min(1.0, step / WARMUP))
        if step % CHECK_EVERY == 0 and expected_accuracy(model, data.take(bins[0][:CHECK_ROWS])) >= accuracy:
            save(model, tokenizer, path)
            return [expected_accuracy(model, data.take(index[:CHECK_ROWS])) for index in bins]
    raise ConfigError(f"model.warm_start_accuracy: {accuracy} was not reached in {MAX_STEPS} steps; lower it")


def encode(tokenizer: PreTrainedTokenizerFast, rows: Sequence[WarmStartRow]) -> Encoded:
    """Prompt in chat form up to the assistant's turn, then the answer and its end token."""
    chats = [[{"role": "user", "content": prompt}] for prompt, _, _ in rows]
    prompts = tokenizer.apply_chat_template(chats, add_generation_prompt=True, return_dict=False)
    answers = tokenizer([answer + tokenizer.eos_token for _, answer, _ in rows]).input_ids
    longest = max(len(p) + len(a) for p, a in zip(prompts, answers, strict=True))
    ids = np.full((len(rows), longest), tokenizer.pad_token_id)
    labels = np.full((len(rows), longest), IGNORE)
    for i, (p, a) in enumerate(zip(prompts, answers, strict=True)):
        ids[i, : len(p) + len(a)] = p + a
        labels[i, len(p) : len(p) + len(a)] = a
    return Encoded(torch.from_numpy(ids), torch.from_numpy(labels))


@torch.no_grad()
def expected_accuracy(model: Qwen3ForCausalLM, rows: Encoded) -> float:
    """Probability that a response sampled at temperature 1 is exactly the answer, mean over `rows`."""
    return torch.exp(-_answer_loss(model, rows).sum(dim=1)).mean().item()


def _answer_loss(model: Qwen3ForCausalLM, rows: Encoded) -> Tensor:
    """-log p of each answer token [B, T - 1], 0 elsewhere."""
    logits = model(input_ids=rows.ids, use_cache=False).logits[:, :-1]
    return F.cross_entropy(logits.transpose(1, 2), rows.labels[:, 1:], ignore_index=IGNORE, reduction="none")


def _draw(bins: Sequence[np.ndarray], rng: np.random.Generator) -> np.ndarray:
    """Rows of one batch [B], bins mixed as MIXTURE says (its last weight for every further bin)."""
    weights = np.array([MIXTURE[min(i, len(MIXTURE) - 1)] for i in range(len(bins))])
    counts = rng.multinomial(BATCH, weights / weights.sum())
    return np.concatenate([rng.choice(index, n) for index, n in zip(bins, counts, strict=True)])


def _optimizers(model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices, AdamW for embeddings and norms: a third of the steps that AdamW alone takes."""
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is m for m in matrices)]
    return [
        torch.optim.Muon(matrices, lr=MUON_LR, weight_decay=0.0),
        torch.optim.AdamW(others, lr=ADAMW_LR, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def _train_step(
    model: Qwen3ForCausalLM, optimizers: Sequence[torch.optim.Optimizer], batch: Encoded, lr_scale: float
) -> None:
    loss = _answer_loss(model, batch).sum() / (batch.labels != IGNORE).sum()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    for optimizer, lr in zip(optimizers, (MUON_LR, ADAMW_LR), strict=True):
        optimizer.param_groups[0]["lr"] = lr * lr_scale
        optimizer.step()
        optimizer.zero_grad()
