"""Groups that outlive their step: SPEED's prompts that wait for their other responses, DOTS' groups that are trained again.

Every rank holds the same groups. They are part of every checkpoint as plain arrays, which keep every bit.
"""

from dataclasses import dataclass
from typing import Collection, Iterable, Mapping

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.types import Response


@dataclass(frozen=True)
class Group:
    """Some responses of one prompt with their rewards."""

    row: int
    responses: tuple[Response, ...]
    rewards: np.ndarray  # [n] float64, NaN where scoring failed

    @property
    def usable(self) -> bool:
        """Every log-probability is finite: only then can the group be trained under later weights."""
        return all(np.isfinite(r.logp).all() for r in self.responses)


class GroupBuffer:
    """At most `capacity` groups, one a prompt, oldest first: `complete` ones of G = `responses` responses each, or ones that lack some."""

    def __init__(self, capacity: int, responses: int, *, complete: bool):
        self.capacity, self.responses, self.complete = capacity, responses, complete
        self.groups: dict[int, Group] = {}

    def __len__(self) -> int:
        return len(self.groups)

    def put(self, groups: Iterable[Group]) -> None:
        """Append; a prompt's earlier group is replaced, then the oldest groups leave until `capacity` holds."""
        for group in groups:
            self.groups.pop(group.row, None)
            self.groups[group.row] = group
        for row in list(self.groups)[:max(len(self.groups) - self.capacity, 0)]:
            del self.groups[row]

    def take(self, count: int) -> list[Group]:
        """Remove and return the oldest `count` groups, fewer when there are not so many."""
        return [self.groups.pop(row) for row in list(self.groups)[:count]]

    def forget(self, version: int) -> None:
        """Remove the groups of which a response was sampled by weights before `version`."""
        self.groups = {row: g for row, g in self.groups.items() if min(r.weight_version for r in g.responses) >= version}

    def sample(self, count: int, without: Collection[int], rng: np.random.Generator) -> list[Group]:
        """At most `count` distinct groups at random, none of the rows `without`; they stay."""
        rows = [row for row in self.groups if row not in without]
        return [self.groups[rows[i]] for i in rng.permutation(len(rows))[:count]]

    def arrays(self) -> dict[str, np.ndarray]:
        """All groups as arrays of numbers and text; nothing when empty. Prompt and response tokens stand one after another."""
        if not self.groups:
            return {}
        groups = list(self.groups.values())
        responses = [r for g in groups for r in g.responses]
        prompts = [g.responses[0].prompt_ids for g in groups]
        return {
            "rows": np.array([g.row for g in groups], np.int64), "sizes": np.array([len(g.responses) for g in groups], np.int64),
            "rewards": np.concatenate([g.rewards for g in groups]), "prompt_lengths": np.array([len(p) for p in prompts], np.int64),
            "prompt_ids": np.array([t for p in prompts for t in p], np.int64),
            "lengths": np.array([len(r.token_ids) for r in responses], np.int64),
            "token_ids": np.array([t for r in responses for t in r.token_ids], np.int64),
            "logp": np.concatenate([r.logp for r in responses]).astype(np.float32),
            "finish_reasons": np.array([r.finish_reason for r in responses]),
            "versions": np.array([r.weight_version for r in responses], np.int64),
        }

    def load(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Become what `arrays()` was taken of. ConfigError where its groups were of another G."""
        self.groups = {}
        if not arrays:
            return
        sizes = arrays["sizes"]
        require(bool((sizes == self.responses if self.complete else sizes < self.responses).all()),
                f"rollout.responses: {self.responses}, but the checkpoint keeps groups of up to {sizes.max()} responses for later steps; "
                "resume with the number of before")
        pieces = lambda values, lengths: np.split(arrays[values], np.cumsum(arrays[lengths])[:-1])
        tokens, logps = pieces("token_ids", "lengths"), pieces("logp", "lengths")
        ends = np.cumsum(arrays["sizes"]).tolist()
        for row, prompt, rewards, end in zip(arrays["rows"].tolist(), pieces("prompt_ids", "prompt_lengths"), pieces("rewards", "sizes"),
                                             ends, strict=True):
            prompt_ids = tuple(prompt.tolist())
            self.groups[row] = Group(row, tuple(
                Response(row, prompt_ids, tuple(tokens[i].tolist()), logps[i], str(arrays["finish_reasons"][i]), int(arrays["versions"][i]))
                for i in range(end - len(rewards), end)), rewards)


def make_buffer(cfg: SchedulerConfig, prompts: int, responses: int) -> GroupBuffer:
    """The buffer of `scheduler.kind` for a batch of `prompts` with `responses` each; of no capacity where the kind needs none."""
    return GroupBuffer(cfg.traits.buffer(cfg, prompts), responses, complete=cfg.traits.batch == "replayed")
