"""The base policy as a reader: embeddings of texts and the log-likelihood of reference answers, without gradients.

Rows are batched by length under a token budget; results come batch by batch, with the rows they belong to. B rows of a batch,
T tokens of its longest row, H hidden.
"""

from dataclasses import replace
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np
import torch
from fastsched_kernels.linear import linear_token_stats
from transformers.utils.logging import disable_progress_bar

from fastsched.config import ConfigError, ModelConfig
from fastsched.engines.models.loading import backbone_and_head, load_policy

Part = tuple[np.ndarray, np.ndarray]  # row numbers [B] int64, values of these rows


def by_length(lengths: Sequence[int], budget: int) -> Iterator[np.ndarray]:
    """Row numbers of each batch, short rows first: padded to its longest row a batch has at most `budget` tokens, or one row."""
    order, start = np.argsort(np.asarray(lengths), kind="stable"), 0
    for stop in range(1, len(order) + 1):
        if stop == len(order) or (stop + 1 - start) * max(lengths[order[stop]], 1) > budget:
            yield order[start:stop]
            start = stop


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class PolicyReader:
    """A causal language model in evaluation mode on the available device, in the dtype of `cfg`."""

    def __init__(self, model_path: Path, cfg: ModelConfig, max_tokens: int, batch_tokens: int):
        disable_progress_bar()  # that of loading; the rows have one of their own
        model = load_policy(model_path, replace(cfg, gradient_checkpointing=False)).eval().to(_device())
        self.split = backbone_and_head(model)
        self.max_tokens, self.batch_tokens = max_tokens, batch_tokens

    def embed(self, token_ids: Sequence[Sequence[int]]) -> Iterator[Part]:
        """[B, H] float32: mean of the last layer's hidden states over the first `max_tokens` tokens of each row."""
        rows = [ids[:self.max_tokens] for ids in token_ids]
        for batch in by_length([len(ids) for ids in rows], self.batch_tokens):
            hidden, mask = self._hidden([rows[i] for i in batch])
            total = hidden.float().masked_fill(~mask[:, :, None], 0.0).sum(1)
            yield batch, (total / mask.sum(1, keepdim=True).clamp(min=1)).cpu().numpy()

    def answer_nll(self, prompt_ids: Sequence[Sequence[int]], answer_ids: Sequence[Sequence[int]]) -> Iterator[Part]:
        """[B] float64 nats: mean over answer tokens of -log p(y_t | prompt, y_<t), prompt and answer cut to `max_tokens` together.

        NaN where no answer token is left.
        """
        rows = [[*prompt, *answer][:self.max_tokens] for prompt, answer in zip(prompt_ids, answer_ids, strict=True)]
        for batch in by_length([len(ids) for ids in rows], self.batch_tokens):
            first = np.maximum([len(prompt_ids[i]) for i in batch], 1)
            yield batch, self._mean_nll([rows[i] for i in batch], first)

    def _mean_nll(self, rows: list[list[int]], first: np.ndarray) -> np.ndarray:
        counts = np.maximum(np.array([len(ids) for ids in rows]) - first, 0)
        if not counts.any():
            return np.full(len(rows), np.nan)
        row = np.repeat(np.arange(len(rows)), counts)
        place = np.concatenate([np.arange(f, f + n) for f, n in zip(first, counts, strict=True)])
        target = torch.tensor([rows[r][t] for r, t in zip(row, place, strict=True)], device=_device())
        hidden, _ = self._hidden(rows)
        logp = self._logp(hidden[torch.from_numpy(row).to(hidden.device), torch.from_numpy(place - 1).to(hidden.device)], target)
        total = np.bincount(row, weights=-logp, minlength=len(rows))
        return np.where(counts > 0, total / np.maximum(counts, 1), np.nan)

    @torch.no_grad()
    def _logp(self, hidden: torch.Tensor, target: torch.Tensor) -> np.ndarray:
        """[R] of R hidden states [R, H]; the head forms its logits chunk by chunk."""
        stats = linear_token_stats(hidden, self.split.weight, target, softcap=self.split.softcap, bias=self.split.bias)
        return stats.logp.double().cpu().numpy()

    @torch.no_grad()
    def _hidden(self, rows: list[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """([B, T, H], [B, T] bool where there is a token), padded on the right, where causal attention does not look."""
        width = max(max(len(ids) for ids in rows), 1)
        ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width, dtype=torch.bool)
        for i, tokens in enumerate(rows):
            ids[i, :len(tokens)], mask[i, :len(tokens)] = torch.tensor(tokens, dtype=torch.long), True
        ids, mask = ids.to(_device()), mask.to(_device())
        return self.split.backbone(input_ids=ids, attention_mask=mask.long(), use_cache=False).last_hidden_state, mask


class SentenceEncoder:
    """A model of the optional package sentence-transformers."""

    def __init__(self, name: str, max_tokens: int, batch_tokens: int):
        try:
            from sentence_transformers import SentenceTransformer
        except ImportError as error:
            raise ConfigError(f"features.encoder: {error}; `pip install sentence-transformers`, or set features.encoder policy") from error
        try:
            self.model = SentenceTransformer(name, device=str(_device()))
        except OSError as error:
            raise ConfigError(f"features.encoder: sentence-transformers cannot load {name!r}: {error}") from error
        self.model.max_seq_length = min(self.model.max_seq_length or max_tokens, max_tokens)
        self.batch_tokens = batch_tokens

    def embed(self, texts: Sequence[str]) -> Iterator[Part]:
        """[B, H] float32."""
        limit = self.model.max_seq_length
        for batch in by_length([min(len(text), limit) for text in texts], self.batch_tokens):  # characters stand for tokens
            values = self.model.encode([texts[i] for i in batch], batch_size=len(batch), show_progress_bar=False)
            yield batch, np.asarray(values, np.float32)
