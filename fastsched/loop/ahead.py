"""Asynchronous rollouts, one step ahead (`rollout.ahead`): while the learner updates on batch t, the servers sample batch t + 1.

Batch t + 1 is drawn and sent off at the start of step t, so its responses are of weight version t - 1 and are trained at version t:
exactly one version old, except the first batch of a run. Weights are exchanged only when it has come back. A checkpoint holds the
batch that came back and is not yet trained, so that a resumed run trains on the same tokens.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Callable, Generic, Optional, Protocol, Sequence, TypeVar

import numpy as np

from fastsched.types import Prompt, Response, Sampling


class Batch(Protocol):
    prompts: Sequence[Prompt]
    seeds: Sequence[int]
    sampling: Sampling


class Drawn(Protocol):
    batch: Batch


D = TypeVar("D", bound=Drawn)


class LookAhead(Generic[D]):
    """At most one batch, on its way or back. `generate` is the rollout engine's, called in a thread of its own."""

    def __init__(self, generate: Callable[[Sequence[Prompt], Sampling, Sequence[int]], list[Response]]):
        self._generate = generate
        self._pool = ThreadPoolExecutor(1)
        self._next: Optional[tuple[int, D, Future]] = None

    def take(self, draw: Callable[[int], D], step: int) -> tuple[D, list[Response]]:
        """The batch of `step` and its responses; sends the batch of `step` + 1 off. `draw(step)` draws the prompts of a step."""
        if self._next is None:
            self._send(step, draw(step))
        number, drawn, responses = self._next
        if number != step:
            raise RuntimeError(f"step {step}: the batch sampled ahead is that of step {number}")
        done = responses.result()
        self._send(step + 1, draw(step + 1))
        return drawn, done

    def _send(self, step: int, drawn: D) -> None:
        batch = drawn.batch
        self._next = step, drawn, self._pool.submit(self._generate, batch.prompts, batch.sampling, batch.seeds)

    def wait(self) -> None:
        """Until nothing is being sampled; raises what the sampling raised."""
        if self._next:
            self._next[2].result()

    def waiting(self) -> Optional[tuple[int, D, list[Response]]]:
        """(step, batch, responses) of what is not trained yet."""
        return None if self._next is None else (*self._next[:2], self._next[2].result())

    def put_back(self, step: int, drawn: D, responses: list[Response]) -> None:
        """What `waiting` returned before a checkpoint."""
        back: Future = Future()
        back.set_result(responses)
        self._next = step, drawn, back

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


def listed(response: Response) -> list[Any]:
    """JSON of a response without its prompt; every bit of its log-probabilities survives."""
    return [list(response.token_ids), response.logp.astype(float).tolist(), response.finish_reason, response.weight_version]


def unlisted(prompt: Prompt, saved: list[Any]) -> Response:
    token_ids, logp, finish_reason, version = saved
    return Response(prompt.row, tuple(prompt.token_ids), tuple(token_ids), np.array(logp, np.float32), finish_reason, version)
