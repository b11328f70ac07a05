"""Asynchronous rollouts, one step ahead (`rollout.ahead`): while the learner updates on batch t, the servers sample batch t + 1.

Batch t + 1 is drawn and sent off at the start of step t, so its responses are of weight version t - 1 and are trained at version t:
exactly one version old, except the first batch of a run. Weights are exchanged only when it has come back. A checkpoint holds the
batch that came back and is not yet trained, so that a resumed run trains on the same tokens.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Callable, Sequence, TypeVar

import numpy as np

from fastsched.config import require
from fastsched.loop.rollouts import Drawn, Rollouts, RolloutSource
from fastsched.types import Prompt, Response, Sampling, Selection

T = TypeVar("T")


class LookAhead:
    """At most one batch, on its way or back. `generate` is the rollout engine's, called in a thread of its own."""

    def __init__(self, generate: Callable[[Sequence[Prompt], Sampling, Sequence[int]], list[Response]]):
        self._generate = generate
        self._pool = ThreadPoolExecutor(1)
        self._next: tuple[int, Drawn, Future] | None = None

    def take(self, draw: Callable[[int], Drawn], step: int) -> tuple[Drawn, list[Response]]:
        """The batch of `step` and its responses; sends the batch of `step` + 1 off. `draw(step)` draws the prompts of a step."""
        if self._next is None:
            self._send(step, draw(step))
        number, drawn, responses = self._next
        if number != step:
            raise RuntimeError(f"step {step}: the batch sampled ahead is that of step {number}")
        done = responses.result()
        self._send(step + 1, draw(step + 1))
        return drawn, done

    def _send(self, step: int, drawn: Drawn) -> None:
        share = drawn.share
        self._next = step, drawn, self._pool.submit(self._generate, share.prompts, share.sampling, share.seeds)

    def wait(self) -> None:
        """Until nothing is being sampled; raises what the sampling raised."""
        if self._next:
            self._next[2].result()

    def pending(self) -> tuple[int, Drawn, list[Response]] | None:
        """(step, batch, responses) of what is not trained yet."""
        return None if self._next is None else (*self._next[:2], self._next[2].result())

    def put_back(self, step: int, drawn: Drawn, responses: list[Response]) -> None:
        """What `pending` returned before a checkpoint."""
        back: Future = Future()
        back.set_result(responses)
        self._next = step, drawn, back

    def close(self) -> None:
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass(frozen=True)
class AheadSource(RolloutSource):
    """Each batch comes out of `ahead`, which has sampled it during the step before."""

    ahead: LookAhead

    def roll_out(self, step: int, wanted: int) -> Rollouts:
        with self.log.phase("rollout"):
            drawn, responses = self.ahead.take(lambda number: self.draw(number, wanted), step)
        return self.scored(drawn, responses, step)

    def wait(self) -> None:
        with self.log.phase("rollout"):
            self.ahead.wait()

    def state(self) -> dict | None:
        pending = self.ahead.pending()
        if pending is None:
            return None
        step, drawn, responses = pending
        return {"step": step, "rows": drawn.selection.rows.tolist(), "bins": drawn.selection.bins.tolist(), "weights": list(drawn.weights),
                "responses": self.ranks.all_gather([response_to_json(r) for r in responses])}

    def restore(self, state: dict | None) -> None:
        """ConfigError where the checkpoint's groups are of another size."""
        if state is None:
            return
        selection = Selection(np.array(state["rows"], np.int64), np.array(state["bins"], np.int64))
        share, prompts, group = self.share(selection, state["step"]), len(selection.rows), self.cfg.rollout.responses
        held = sum(len(part) for part in state["responses"])
        require(held == prompts * group,
                f"rollout.responses: {group}, but the batch sampled ahead for step {state['step']} holds {held} responses to "
                f"{prompts} prompts; resume with {held // prompts}, or with rollout.ahead 0, which samples it anew")
        saved = [group_of(state["responses"], i, group) for i in self.ranks.mine(prompts)]
        responses = [response_from_json(prompt, one) for prompt, replies in zip(share.prompts, saved, strict=True) for one in replies]
        self.ahead.put_back(state["step"], Drawn(selection, tuple(state["weights"]), share), responses)

    def close(self) -> None:
        self.ahead.close()


def group_of(ranks: Sequence[Sequence[T]], place: int, group: int) -> Sequence[T]:
    """The `group` responses of prompt `place` of a selection, from what each of any number of ranks holds of it, dealt out in turn."""
    held, number = ranks[place % len(ranks)], place // len(ranks)
    return held[number * group:(number + 1) * group]


def response_to_json(response: Response) -> list[Any]:
    """Without its prompt; every bit of its log-probabilities survives."""
    return [list(response.token_ids), response.logp.astype(float).tolist(), response.finish_reason, response.weight_version]


def response_from_json(prompt: Prompt, saved: list[Any]) -> Response:
    token_ids, logp, finish_reason, version = saved
    return Response(prompt.row, tuple(prompt.token_ids), tuple(token_ids), np.array(logp, np.float32), finish_reason, version)
