"""Calls into a sampler that lives in this process: a time limit for each, and one named error for whatever it raises."""

import logging
import os
import threading
from contextlib import contextmanager
from typing import Callable, Iterable, Iterator, Optional, Sequence

import numpy as np
import torch

from fastsched.config import GUARD, ConfigError
from fastsched.engines.rollout.contract import RolloutEngine
from fastsched.types import SAMPLER_ERRORS, EngineError, Prompt, Response, Sampling


class LimitedRollout:
    """`RolloutEngine` around one of this process.

    What sampling and scoring raise becomes an EngineError that names the call; ConfigError and EngineError pass. What `load_weights`
    raises is left to the caller, who knows which weight was on its way. A call that lasts longer than
    `timeout_s` cannot be taken back, since it may be inside a kernel or wait for a rank that is gone: `say` is told, and the process
    ends at once with exit code 3, without cleaning up. Checkpoints are complete or not there, so `--resume` goes on.
    """

    def __init__(self, engine: RolloutEngine, timeout_s: float, say: Callable[[str], None]):
        self._engine, self._timeout_s, self._say = engine, timeout_s, say

    @property
    def weight_version(self) -> int:
        return self._engine.weight_version

    @property
    def missing_logprobs(self) -> int:
        return self._engine.missing_logprobs

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    @property
    def dtype(self) -> torch.dtype:
        return self._engine.dtype

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                 responses: Optional[Sequence[int]] = None) -> list[Response]:
        with self._named(f"generate ({len(prompts)} prompts)"):
            return self._engine.generate(prompts, sampling, seeds, responses)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        with self._limited(f"load_weights (version {version})"):
            self._engine.load_weights(named_tensors, version)

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        with self._named(f"score ({len(token_ids)} tokens)"):
            return self._engine.score(token_ids)

    def fingerprints(self) -> dict[str, dict[str, int | None]]:
        with self._named("fingerprints"):
            return self._engine.fingerprints()

    def sleep(self) -> None:
        with self._named("sleep"):
            self._engine.sleep()

    def close(self) -> None:
        self._engine.close()

    @contextmanager
    def _limited(self, call: str) -> Iterator[None]:
        timer = threading.Timer(self._timeout_s, self._give_up, [call])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    @contextmanager
    def _named(self, call: str) -> Iterator[None]:
        try:
            with self._limited(call):
                yield
        except (ConfigError, EngineError):
            raise
        except SAMPLER_ERRORS as error:
            logging.getLogger(__name__).exception("sampler: %s", call)
            raise EngineError(f"sampler: {call} failed ({type(error).__name__}: {error})") from error

    def _give_up(self, call: str) -> None:
        try:
            self._say(f"sampler: {call} took longer than {self._timeout_s:g} s (rollout.timeout_s)")
        finally:
            os._exit(GUARD)
