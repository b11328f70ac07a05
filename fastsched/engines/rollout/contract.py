"""The contract of a rollout engine, what its implementations share, and the check that it holds the learner's weights.

P prompts, G responses a prompt, L tokens of one response.
"""

import functools
import logging
from typing import Iterable, Mapping, NamedTuple, Optional, Protocol, Sequence

import numpy as np
import torch

from fastsched.config import LOWEST_TEMPERATURE, ConfigError, require
from fastsched.engines.rollout.fingerprints import differences
from fastsched.engines.rollout.weights import SyncError
from fastsched.types import Prompt, Response, Sampling


class RolloutEngine(Protocol):
    """Samples token ids from token ids. Construction takes the arguments of `open_rollout`."""

    weight_version: int  # 0 as loaded from the model folder
    missing_logprobs: int  # sampled tokens for which the engine gave no log-probability, so far
    max_model_len: int
    dtype: torch.dtype

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                 responses: Optional[Sequence[int]] = None) -> list[Response]:
        """G responses of every prompt, or `responses[p]` of prompt p; prompt-major.

        Response g of prompt p draws from a stream seeded by (seeds[p], g) alone, so order and company of the prompts
        change it only as far as matrix products round differently. `logp` is log softmax(z/T) after top-k and top-p
        in fp32; with temperature 0 (greedy) it is log softmax(z). A log-probability that the engine could not give is
        NaN and counted. The sampled stop token belongs to the response.
        ConfigError: a prompt that is empty or leaves no room for `max_new_tokens`; a seed missing or negative; not one
        positive number of responses for each prompt; a temperature in (0, 0.01). SyncError: an earlier `load_weights`
        failed half way.
        """

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Take over all weights, by Hugging Face name; `weight_version` becomes `version`, cached prefixes are dropped.

        A tensor may be freed as soon as the next one is asked for. SyncError: a name that is unknown or never came, or
        a wrong shape, or an earlier failure. Whatever is raised, the engine is half updated and unusable from then on.
        """

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """[len - 1] float32: log-probability (temperature 1) of each token after the first."""

    def fingerprints(self) -> dict[str, dict[str, int | None]]:
        """`fingerprints.fingerprints` of what the engine multiplies with, by its holder: 'the sampler', or a server's URL.

        None: ranks that hold the same tensor hold different values. A tensor that the engine keeps in a form of its own is left out.
        """

    def close(self) -> None:
        """Free the model; a second call does nothing. Call it before the process group is destroyed."""


def response_seed(seed: int, g: int) -> int:
    """63-bit seed of response g."""
    return int(np.random.SeedSequence((seed, g)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def each_response(prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                  responses: Optional[Sequence[int]] = None) -> tuple[list[Prompt], list[int]]:
    """The prompt and the `response_seed` of every response that `RolloutEngine.generate` is asked for, prompt-major."""
    counts = [sampling.responses] * len(prompts) if responses is None else responses
    rows = [prompt for prompt, count in zip(prompts, counts, strict=True) for _ in range(count)]
    return rows, [response_seed(seed, g) for seed, count in zip(seeds, counts, strict=True) for g in range(count)]


def check_request(prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int], max_model_len: int,
                  responses: Optional[Sequence[int]] = None) -> None:
    """ConfigError for whatever the engine could only fail on later (see `RolloutEngine.generate`)."""
    require(responses is None or len(responses) == len(prompts) and min(responses, default=1) >= 1,
            f"generate: {len(prompts)} prompts need one positive number of responses each")
    require(len(seeds) == len(prompts), f"generate: {len(prompts)} prompts but {len(seeds)} seeds")
    require(all(seed >= 0 for seed in seeds), "generate: seeds must not be negative")
    require(sampling.responses >= 1 and sampling.max_new_tokens >= 1,
            "sampling: responses and max_new_tokens must be positive")
    require(sampling.temperature == 0 or sampling.temperature >= LOWEST_TEMPERATURE,
            f"sampling.temperature: {sampling.temperature} is neither 0 (greedy) nor at least {LOWEST_TEMPERATURE}")
    require(0 < sampling.top_p <= 1, f"sampling.top_p: {sampling.top_p} does not lie in (0, 1]")
    require(sampling.top_k == -1 or sampling.top_k >= 1,
            f"sampling.top_k: {sampling.top_k} is neither -1 (off) nor positive")
    for prompt in prompts:
        require(len(prompt.token_ids) > 0, f"row {prompt.row}: the prompt is empty")
        if len(prompt.token_ids) + sampling.max_new_tokens > max_model_len:
            raise ConfigError(f"row {prompt.row}: {len(prompt.token_ids)} prompt tokens and {sampling.max_new_tokens} "
                              f"new ones exceed the engine's {max_model_len}; lower data.max_prompt_tokens or "
                              "rollout.max_new_tokens")


def require_usable(failed_version: int | None) -> None:
    if failed_version is not None:
        raise SyncError(f"the sampler is unusable: loading weight version {failed_version} failed half way; "
                        "stop and resume from a checkpoint")


class SyncCheck(NamedTuple):
    """|logp(sampler) - logp(learner)| over the tokens of one re-scored sequence, nats."""

    mean: float
    max: float


def measure_sync(engine: RolloutEngine, token_ids: Sequence[int], learner_logp: np.ndarray) -> SyncCheck:
    """Re-score `token_ids` ([n]) and compare with the learner's `learner_logp` ([n - 1], temperature 1).

    What exceeds the engine's length is left out. No collective: over several ranks reduce both numbers by max before
    `require_sync`, so that all of them raise or none.
    """
    require(len(learner_logp) == len(token_ids) - 1,
            f"measure_sync: {len(token_ids)} tokens have {len(token_ids) - 1} scores, got {len(learner_logp)}")
    n = min(len(token_ids), engine.max_model_len - 1)
    difference = np.abs(engine.score(token_ids[:n]).astype(np.float64) - np.asarray(learner_logp[: n - 1], np.float64))
    return SyncCheck(float(difference.mean()), float(difference.max()))


def require_weights(engine: RolloutEngine, sent: Mapping[str, int], version: int) -> None:
    """SyncError if `engine` does not hold, bit for bit, the tensors whose fingerprints are `sent`, or says another version.

    No collective but that of a tensor parallel engine: a run lets its ranks agree on the outcome.
    """
    if engine.weight_version != version:
        raise SyncError(f"weight sync, version {version}: the sampler says that its weights are version {engine.weight_version}")
    for holder, held in engine.fingerprints().items():
        wrong, known = differences(sent, held), len(sent.keys() & held.keys())
        if wrong or not known:
            what = f"{len(wrong)} of {known} tensors differ, first {wrong[0]}" if wrong else "none of its tensors has a name that was sent"
            raise SyncError(f"weight sync, version {version}: {holder} does not hold the weights that the learner sent: {what}")
        if known < len(sent):
            _say_once(f"weight sync: {holder} keeps {len(sent) - known} of {len(sent)} tensors in a form of its own, first "
                      f"{next(name for name in sent if name not in held)}; only the log-probabilities show whether they arrived")


@functools.cache
def _say_once(message: str) -> None:
    logging.getLogger(__name__).warning(message)


def require_sync(check: SyncCheck, tolerance: float, version: int) -> None:
    """SyncError if `check.mean` is above `tolerance` or NaN; the weights were found equal before (`require_weights`)."""
    if not check.mean <= tolerance:
        raise SyncError(f"sampler and learner (weight version {version}) disagree on the re-scored prompt: |difference of logp| "
                        f"mean {check.mean:.3g}, max {check.max:.3g}, tolerance {tolerance:.3g} (rollout.sync_tolerance); the weights "
                        "agree: suspect cached prefixes, positions or dtype")
