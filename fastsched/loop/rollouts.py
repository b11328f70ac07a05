"""Prompts of the scheduler -> scored responses: this rank's share, outcomes over all ranks, refills."""

from dataclasses import dataclass
from typing import NamedTuple, Sequence

import numpy as np

from fastsched.config import Config
from fastsched.control.scheduler import Scheduler
from fastsched.data.datasets import PromptSet
from fastsched.engines.rollout.contract import RolloutEngine
from fastsched.engines.rollout.weights import SyncError
from fastsched.groups import flat_groups
from fastsched.loop.outcomes import Scorer, gather_outcomes, join_outcomes
from fastsched.record.log import RunLog
from fastsched.types import Outcomes, Prompt, Ranks, Response, Sampling, Selection


@dataclass(frozen=True)
class Share:
    """This rank's prompts of one generation, every world-size-th of the selection, with the seed of each and how to sample."""

    prompts: list[Prompt]
    seeds: list[int]
    sampling: Sampling
    responses: list[int] | None = None  # of each prompt; None: the same number of every prompt


class Drawn(NamedTuple):
    """The prompts of one generation, the sampling weights that drew them, and this rank's share."""

    selection: Selection
    weights: tuple[float, ...]
    share: Share


@dataclass(frozen=True)
class Rollouts:
    """This rank's groups that are to be trained, prompt-major, and the outcomes of every prompt of all ranks."""

    prompts: list[Prompt]
    responses: list[Response]
    rewards: np.ndarray  # [P, G], NaN where scoring failed
    texts: list[str]
    outcomes: Outcomes
    probe: list[int]  # token ids of one prompt and response, for the check of the weight sync
    trained: int  # groups of all ranks
    weights: tuple[float, ...] = ()  # sampling weights of the bins that drew them; () where several draws did
    staleness: float = 0.0  # of `responses`, weight versions

    def columns(self) -> dict[str, float]:
        """Of metrics.csv. Where the next batch is drawn already, the scheduler's own weights are not those that drew this one."""
        unreadable = 0 if self.outcomes.unreadable is None else int(self.outcomes.unreadable.sum())
        parts = {f"reward_{name}": mean_of_scored(values) for name, values in self.outcomes.parts.items()}
        return {"staleness": self.staleness, "unreadable": unreadable} | parts | {f"w_{b}": w for b, w in enumerate(self.weights)}


def mean_of_scored(rewards: np.ndarray) -> float:
    """NaN where there is no score."""
    scored = rewards[np.isfinite(rewards)]
    return float(scored.mean()) if len(scored) else float("nan")


@dataclass(frozen=True)
class RolloutSource:
    """Samples and scores what the scheduler draws. `ahead.AheadSource` is one that does so a step early."""

    cfg: Config
    train_set: PromptSet
    scheduler: Scheduler
    rollout: RolloutEngine
    scorer: Scorer
    ranks: Ranks
    log: RunLog

    def roll_out(self, step: int, wanted: int) -> Rollouts:
        """Sample and score `wanted` prompts, P.

        With `scheduler.refills`, DAPO's dynamic sampling (arXiv 2503.14476): as long as fewer than P groups of all ranks have two
        different rewards, another P prompts, at most `refills` times. The first P such groups are trained, and where there are
        fewer, groups without signal after them.
        """
        parts, with_signal = [], []
        for refill in range(1 + self.cfg.scheduler.refills):
            parts.append(self.generate(self.draw(step, wanted, refill), step))
            with_signal.append(~flat_groups(parts[-1].outcomes.rewards))
            if sum(s.sum() for s in with_signal) >= wanted:
                break
        chosen = np.sort(np.argsort(~np.concatenate(with_signal), kind="stable")[:wanted])
        return merge(parts, chosen, self.ranks)

    def draw(self, step: int, wanted: int, number: int = 0) -> Drawn:
        """The scheduler's prompts for one generation; `number` counts those of a step, so that each has seeds of its own."""
        with self.log.phase("control"):
            return self.drawn(self.scheduler.next_prompts(wanted), step, number)

    def drawn(self, selection: Selection, step: int, number: int = 0) -> Drawn:
        return Drawn(selection, self.scheduler.knobs().weights, self.share(selection, step, number))

    def share(self, selection: Selection, step: int, number: int = 0) -> Share:
        entropy = [self.cfg.train.seed, step] + [number] * (number > 0)
        seeds = np.random.SeedSequence(entropy).generate_state(len(selection.rows))
        mine, r = self.ranks.mine(len(selection.rows)), self.cfg.rollout
        each = None if selection.responses is None else [int(selection.responses[i]) for i in mine]
        return Share([self.train_set.prompt(int(selection.rows[i])) for i in mine], [int(seeds[i]) for i in mine],
                     Sampling(r.responses, r.max_new_tokens, r.temperature, r.top_p, r.top_k), each)

    def generate(self, drawn: Drawn, step: int) -> Rollouts:
        """One generation, scored."""
        share = drawn.share
        with self.log.phase("rollout"):
            asked = share.prompts or self.cfg.rollout.tensor_parallel > 1  # the ranks of one engine sample together
            responses = self.rollout.generate(share.prompts, share.sampling, share.seeds, share.responses) if asked else []
        return self.scored(drawn, responses, step)

    def scored(self, drawn: Drawn, responses: list[Response], step: int) -> Rollouts:
        selection, share, lag = drawn.selection, drawn.share, self._bounded_staleness(responses, step)
        with self.log.phase("reward"):
            each = share.responses or [share.sampling.responses] * len(share.prompts)
            scores = self.scorer.score([p for p, n in zip(share.prompts, each, strict=True) for _ in range(n)], responses)
            rewards, outcomes = gather_outcomes(self.ranks, selection, self.cfg.rollout.responses, responses, scores)
        first = self.train_set.prompt(int(selection.rows[0])).token_ids
        probe = [*responses[0].prompt_ids, *responses[0].token_ids] if responses else list(first)
        return Rollouts(share.prompts, responses, rewards, scores.texts, outcomes, probe, len(selection.rows), drawn.weights, lag)

    def staleness(self, responses: Sequence[Response], step: int) -> float:
        """Weight versions by which the oldest response of all ranks lags behind the policy of this step."""
        lag = max((step - 1 - r.weight_version for r in responses), default=0)
        return float(self.ranks.all_reduce(np.array([float(lag)]), op="max")[0])

    def _bounded_staleness(self, responses: Sequence[Response], step: int) -> float:
        lag, allowed = self.staleness(responses, step), self.cfg.rollout.ahead
        if lag > allowed:
            raise SyncError(f"step {step}: responses are {lag:.0f} weight versions old, rollout.ahead allows {allowed}")
        return lag

    def wait(self) -> None:
        """Until nothing is being sampled; raises what the sampling raised."""

    def state(self) -> dict | None:
        """JSON of what is sampled and not trained, with every rank's responses; every rank calls it."""
        return None

    def restore(self, state: dict | None) -> None:
        """Take up `state` of a checkpoint; here what it holds is sampled anew, and the log says so."""
        if state is not None:
            self.log.warn(f"rollout.ahead is off now: the batch sampled ahead for step {state['step']} is dropped, and its prompts with it")

    def close(self) -> None:
        """Before the sampler closes."""


def merge(parts: list[Rollouts], chosen: np.ndarray, ranks: Ranks) -> Rollouts:
    """The chosen of all parts' prompts, counted over the parts; of each part this rank holds every world-th."""
    if len(parts) == 1:
        return parts[0]
    size, group, world = len(parts[0].outcomes.rows), parts[0].rewards.shape[1], ranks.world_size
    mine = [(i // size, i % size // world) for i in chosen.tolist() if i % size % world == ranks.rank]
    of_group = lambda values, k: values[k * group:(k + 1) * group]
    return Rollouts([parts[p].prompts[k] for p, k in mine], [r for p, k in mine for r in of_group(parts[p].responses, k)],
                    np.array([parts[p].rewards[k] for p, k in mine]).reshape(len(mine), group),
                    [t for p, k in mine for t in of_group(parts[p].texts, k)], join_outcomes([p.outcomes for p in parts]), parts[-1].probe,
                    len(chosen))


def sample_rows(rolled: Rollouts) -> list[dict]:
    """Rows of samples.jsonl: one response of each prompt, in turn."""
    prompts, group = rolled.prompts, rolled.rewards.shape[1]
    order = [p * group + p % group for p in range(len(prompts))]
    return [
        {"row": prompts[i // group].row, "prompt": prompts[i // group].text, "response": rolled.texts[i],
         "answer": prompts[i // group].answer, "reward": float(rolled.rewards.flat[i]), "finish_reason": rolled.responses[i].finish_reason,
         "length": len(rolled.responses[i].token_ids)}
        for i in order
    ]
