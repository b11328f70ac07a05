"""The parity reference: a sampling loop over a transformers model, slow and plain.

B rows of one batch (prompts repeated G times), V vocabulary.
"""

from pathlib import Path
from typing import Iterable, Optional, Sequence

import numpy as np
import torch
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, DynamicCache

from fastsched.config import RolloutConfig, require
from fastsched.engines.rollout.contract import check_request, each_response, require_usable
from fastsched.engines.rollout.fingerprints import fingerprints
from fastsched.engines.rollout.weights import checked, expected_shapes
from fastsched.types import Prompt, Response, Sampling


class TransformersRollout:
    """`RolloutEngine` on its own copy of the model; the contract is there. `cfg.max_num_seqs` rows run at a time."""

    def __init__(self, model_path: str | Path, cfg: RolloutConfig, *, dtype: str, max_model_len: int, seed: int,
                 stop_token_ids: Sequence[int], trust_remote_code: bool = False):
        self.weight_version = 0
        self.missing_logprobs = 0
        self.max_model_len = max_model_len
        self.dtype = getattr(torch, dtype)
        self._failed_version: int | None = None
        self._max_rows = cfg.max_num_seqs
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._stop_token_ids = torch.tensor(sorted(stop_token_ids), dtype=torch.long, device=self._device)
        self._shapes = expected_shapes(model_path, trust_remote_code)
        model = AutoModelForCausalLM.from_pretrained(model_path, dtype=self.dtype, trust_remote_code=trust_remote_code)
        self._model = model.to(self._device).eval()
        if cfg.head_dtype == "fp32":
            _widen_head(self._model)

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                 responses: Optional[Sequence[int]] = None) -> list[Response]:
        require_usable(self._failed_version)
        check_request(prompts, sampling, seeds, self.max_model_len, responses)
        rows, row_seeds = each_response(prompts, sampling, seeds, responses)
        sampled = []
        for start in range(0, len(rows), self._max_rows):
            chunk = slice(start, start + self._max_rows)
            sampled += self._sample(rows[chunk], sampling, row_seeds[chunk])
        return sampled

    @torch.no_grad()
    def _sample(self, rows: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int]) -> list[Response]:
        ids, mask = self._left_padded(rows)
        noise = uniform_noise(seeds, sampling.max_new_tokens).to(self._device)
        stopped = torch.zeros(len(rows), dtype=torch.bool, device=self._device)
        cache, tokens, logps = DynamicCache(config=self._model.config), [], []
        for step in range(sampling.max_new_tokens):
            positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1]:]
            logits = self._model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                                 logits_to_keep=1).logits[:, -1]
            logp = processed_logp(logits.float(), sampling)
            token = logp.argmax(1) if sampling.temperature == 0 else inverse_cdf(logp, noise[:, step])
            tokens.append(token)
            logps.append(logp.gather(1, token[:, None])[:, 0])
            stopped |= torch.isin(token, self._stop_token_ids)
            if stopped.all():
                break
            ids, mask = token[:, None], torch.cat([mask, mask.new_ones(len(rows), 1)], 1)
        return self._responses(rows, torch.stack(tokens, 1).cpu(), torch.stack(logps, 1).cpu())

    def _left_padded(self, rows: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
        """[B, longest] token ids, zero on the left, and their mask."""
        width = max(len(row.token_ids) for row in rows)
        ids = torch.zeros(len(rows), width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            ids[i, width - len(row.token_ids):] = torch.tensor(row.token_ids)
            mask[i, width - len(row.token_ids):] = 1
        return ids.to(self._device), mask.to(self._device)

    def _responses(self, rows: Sequence[Prompt], tokens: torch.Tensor, logps: torch.Tensor) -> list[Response]:
        responses = []
        ends = torch.isin(tokens, self._stop_token_ids.cpu())
        for row, ids, logp, end in zip(rows, tokens, logps, ends, strict=True):
            stop = bool(end.any())
            length = int(end.int().argmax()) + 1 if stop else len(ids)
            self.missing_logprobs += int(logp[:length].isnan().sum())
            responses.append(Response(row.row, tuple(row.token_ids), tuple(ids[:length].tolist()),
                                      logp[:length].numpy().copy(), "stop" if stop else "length", self.weight_version))
        return responses

    @torch.no_grad()
    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        require_usable(self._failed_version)
        self._failed_version = version
        parameters = dict(self._model.named_parameters())
        for name, tensor in checked(named_tensors, self._shapes, self.dtype):
            parameters[name].copy_(tensor)
        self.weight_version = version
        self._failed_version = None

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        require_usable(self._failed_version)
        require(2 <= len(token_ids) < self.max_model_len,
                f"score: {len(token_ids)} tokens; needs at least 2 and fewer than the engine's {self.max_model_len}")
        ids = torch.tensor(token_ids, device=self._device)
        logits = self._model(input_ids=ids[None], use_cache=False).logits[0, :-1].float()
        return torch.log_softmax(logits, 1).gather(1, ids[1:, None])[:, 0].cpu().numpy()

    def fingerprints(self) -> dict[str, dict[str, int | None]]:
        return {"the sampler": fingerprints(self._model.named_parameters(), self.dtype)}

    def close(self) -> None:
        self._model = None


def _widen_head(model: torch.nn.Module) -> None:
    """Logits in fp32 from the weights as they are."""
    head = model.get_output_embeddings()
    head.forward = lambda hidden: F.linear(hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float())


def uniform_noise(seeds: Sequence[int], length: int) -> torch.Tensor:
    """[B, length] float64 in [0, 1), row i from its own generator; 48 bits, so that u * total stays below the total."""
    rows = [torch.randint(2**48, (length,), generator=torch.Generator().manual_seed(seed)) for seed in seeds]
    return torch.stack(rows).double() / 2**48


def processed_logp(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """[B, V] log-probabilities after temperature, top-k, then top-p (smallest set of mass >= top_p), renormalised."""
    if sampling.temperature == 0:
        return logits.log_softmax(1)
    logits = logits / sampling.temperature
    if sampling.top_k != -1:
        kth = logits.topk(min(sampling.top_k, logits.shape[1]), 1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if sampling.top_p < 1:
        ordered, order = logits.softmax(1).sort(1, descending=True)
        outside = ordered.cumsum(1) - ordered >= sampling.top_p
        logits = logits.masked_fill(torch.zeros_like(outside).scatter(1, order, outside), -torch.inf)
    return logits.log_softmax(1)


def inverse_cdf(logp: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """[B] the first token whose cumulative probability exceeds `uniform` ([B] in [0, 1)) times the total."""
    cumulative = logp.double().exp().cumsum(1)
    token = torch.searchsorted(cumulative, uniform[:, None] * cumulative[:, -1:], right=True)[:, 0]
    return token.clamp(max=logp.shape[1] - 1)  # NaN lands past the end; its logp is NaN and counted
