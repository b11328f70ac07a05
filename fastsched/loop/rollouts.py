"""Around one rollout batch: this rank's share, rewards, outcomes over all ranks, refills, weight sync with its check, sample rows.

With `rollout.ahead` the batch of a step comes out of `ahead.LookAhead`, which has sampled it during the step before.
"""

from dataclasses import dataclass
from typing import NamedTuple, Optional, Sequence, TypeVar

import numpy as np

from fastsched.config import ConfigError, require
from fastsched.data.rewards import RewardItem
from fastsched.engines.rollout.contract import measure_sync, require_sync
from fastsched.engines.rollout.weights import SyncError, layer_fingerprints
from fastsched.groups import flat_groups
from fastsched.loop.ahead import listed, unlisted
from fastsched.loop.assemble import Run
from fastsched.types import SAMPLER_ERRORS, Outcomes, Prompt, Response, Sampling, Selection

T = TypeVar("T")
SYNC_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # bf16 logits near 30 are 0.125 apart


@dataclass(frozen=True)
class Batch:
    """This rank's prompts of one step, every world-size-th of the selection, with the seed of each and how to sample."""

    prompts: list[Prompt]
    seeds: list[int]
    sampling: Sampling
    responses: Optional[list[int]]  # of each prompt; None: the same number of every prompt

    @classmethod
    def of(cls, run: Run, selection: Selection, step: int, refill: int = 0) -> "Batch":
        ranks = run.ranks
        entropy = [run.cfg.train.seed, step] + [refill] * (refill > 0)
        seeds = np.random.SeedSequence(entropy).generate_state(len(selection.rows))
        mine = ranks.mine(len(selection.rows))
        r = run.cfg.rollout
        sampling = Sampling(r.responses, r.max_new_tokens, r.temperature, r.top_p, r.top_k)
        each = None if selection.responses is None else [int(selection.responses[i]) for i in mine]
        return cls([run.train_set.prompt(int(selection.rows[i])) for i in mine], [int(seeds[i]) for i in mine], sampling, each)


class Drawn(NamedTuple):
    """The prompts of one step, the sampling weights that drew them, and this rank's share."""

    selection: Selection
    weights: tuple[float, ...]
    batch: Batch


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
        return {"staleness": self.staleness} | {f"w_{b}": weight for b, weight in enumerate(self.weights)}


def roll_out(run: Run, step: int, wanted: int) -> Rollouts:
    """Sample and score `wanted` prompts, P.

    With `scheduler.refills`, DAPO's dynamic sampling (arXiv 2503.14476): as long as fewer than P groups of all ranks have two
    different rewards, another P prompts, at most `refills` times. The first P such groups are trained, and where there are
    fewer, groups without signal after them.
    """
    if run.ahead:
        with run.log.phase("rollout"):
            drawn, responses = run.ahead.take(lambda number: draw(run, number, wanted), step)
        return _scored(run, drawn, responses, step)
    parts, taken = [], []
    for refill in range(1 + run.cfg.scheduler.refills):
        with run.log.phase("control"):
            selection = run.scheduler.next_prompts(wanted)
        parts.append(one_batch(run, selection, step, refill))
        taken.append(~flat_groups(parts[-1].outcomes.rewards))
        if sum(t.sum() for t in taken) >= wanted:
            break
    chosen = np.sort(np.argsort(~np.concatenate(taken), kind="stable")[:wanted])
    return _merge(parts, chosen, run.ranks.rank, run.ranks.world_size)


def draw(run: Run, step: int, wanted: int) -> Drawn:
    with run.log.phase("control"):
        selection = run.scheduler.next_prompts(wanted)
        return Drawn(selection, run.scheduler.knobs().weights, Batch.of(run, selection, step))


def one_batch(run: Run, selection: Selection, step: int, number: int = 0) -> Rollouts:
    """One generation, scored; `number` counts those of a step, so that each has seeds of its own."""
    drawn = Drawn(selection, run.scheduler.knobs().weights, Batch.of(run, selection, step, number))
    batch = drawn.batch
    with run.log.phase("rollout"):
        asked = batch.prompts or run.cfg.rollout.tensor_parallel > 1  # the ranks of one engine sample together
        responses = run.rollout.generate(batch.prompts, batch.sampling, batch.seeds, batch.responses) if asked else []
    return _scored(run, drawn, responses, step)


def _scored(run: Run, drawn: Drawn, responses: list[Response], step: int) -> Rollouts:
    selection, batch, lag = drawn.selection, drawn.batch, _bounded_staleness(run, responses, step)
    with run.log.phase("reward"):
        each = batch.responses or [batch.sampling.responses] * len(batch.prompts)
        scores, texts, _ = score_each(run, [p for p, n in zip(batch.prompts, each, strict=True) for _ in range(n)], responses)
        rewards, outcomes = gather_outcomes(run, selection, responses, scores)
    probe = [*responses[0].prompt_ids, *responses[0].token_ids] if responses else run.train_set.prompt(int(selection.rows[0])).token_ids
    return Rollouts(batch.prompts, responses, rewards, texts, outcomes, list(probe), len(selection.rows), drawn.weights, lag)


def _merge(parts: list[Rollouts], chosen: np.ndarray, rank: int, world: int) -> Rollouts:
    """The chosen of all parts' prompts, counted over the parts; of each part this rank holds every world-th."""
    if len(parts) == 1:
        return parts[0]
    size, group = len(parts[0].outcomes.rows), parts[0].rewards.shape[1]
    mine = [(i // size, i % size // world) for i in chosen.tolist() if i % size % world == rank]
    pick = lambda values, k: values[k * group:(k + 1) * group]
    return Rollouts([parts[p].prompts[k] for p, k in mine], [r for p, k in mine for r in pick(parts[p].responses, k)],
                    np.array([parts[p].rewards[k] for p, k in mine]).reshape(len(mine), group),
                    [t for p, k in mine for t in pick(parts[p].texts, k)], join_outcomes([p.outcomes for p in parts]), parts[-1].probe,
                    len(chosen))


def join_outcomes(parts: Sequence[Outcomes]) -> Outcomes:
    """One after another; narrower ones are widened by responses that were not sampled."""
    width = max(part.rewards.shape[1] for part in parts)
    widen = lambda values, empty: np.pad(values, ((0, 0), (0, width - values.shape[1])), constant_values=empty)
    continued = [np.zeros(len(p.rows), bool) if p.continued is None else p.continued for p in parts]
    return Outcomes(np.concatenate([p.rows for p in parts]), np.concatenate([p.bins for p in parts]),
                    np.concatenate([widen(p.rewards, np.nan) for p in parts]), np.concatenate([widen(p.lengths, 0) for p in parts]),
                    np.concatenate([widen(p.truncated, False) for p in parts]),
                    None if all(p.continued is None for p in parts) else np.concatenate(continued))


def ahead_state(run: Run) -> Optional[dict]:
    """JSON of the batch that is sampled and not trained, with every rank's responses; None without one. Every rank calls it."""
    waiting = run.ahead.waiting() if run.ahead else None
    if waiting is None:
        return None
    step, drawn, responses = waiting
    return {"step": step, "rows": drawn.selection.rows.tolist(), "bins": drawn.selection.bins.tolist(), "weights": list(drawn.weights),
            "responses": run.ranks.all_gather([listed(r) for r in responses])}


def restore_ahead(run: Run, state: Optional[dict]) -> None:
    """Take up the batch of a checkpoint where `rollout.ahead` is still set; without it that batch is sampled anew, and said so."""
    if state is None:
        return
    if not run.ahead:
        run.log.warn(f"rollout.ahead is off now: the batch sampled ahead for step {state['step']} is dropped, and its prompts with it")
        return
    selection = Selection(np.array(state["rows"], np.int64), np.array(state["bins"], np.int64))
    batch, ranks = Batch.of(run, selection, state["step"]), run.ranks
    mine = ranks.mine(len(selection.rows))
    held, group = sum(len(part) for part in state["responses"]), batch.sampling.responses
    require(held == len(selection.rows) * group,
            f"rollout.responses: {group}, but the batch sampled ahead for step {state['step']} holds {held} responses to "
            f"{len(selection.rows)} prompts; resume with {held // len(selection.rows)}, or with rollout.ahead 0, which samples it anew")
    saved = [group_of(state["responses"], i, group) for i in mine]
    responses = [unlisted(prompt, one) for prompt, replies in zip(batch.prompts, saved, strict=True) for one in replies]
    run.ahead.put_back(state["step"], Drawn(selection, tuple(state["weights"]), batch), responses)


def group_of(ranks: Sequence[Sequence[T]], place: int, group: int) -> Sequence[T]:
    """The `group` responses of prompt `place` of a selection, from what each of any number of ranks holds of it, dealt out in turn."""
    held, number = ranks[place % len(ranks)], place // len(ranks)
    return held[number * group:(number + 1) * group]


def _bounded_staleness(run: Run, responses: Sequence[Response], step: int) -> float:
    lag = staleness(run, responses, step)
    if lag > run.cfg.rollout.ahead:
        raise SyncError(f"step {step}: responses are {lag:.0f} weight versions old, rollout.ahead allows {run.cfg.rollout.ahead}")
    return lag


def staleness(run: Run, responses: Sequence[Response], step: int) -> float:
    """Weight versions by which the oldest response of all ranks lags behind the policy of this step."""
    lag = max((step - 1 - r.weight_version for r in responses), default=0)
    return float(run.ranks.all_reduce(np.array([float(lag)]), op="max")[0])


def score(run: Run, prompts: list[Prompt], responses: Sequence[Response]) -> tuple[np.ndarray, list[str], dict[str, int]]:
    """Rewards [P, G] (NaN: failed), decoded responses in the same order, and failures by kind."""
    group = len(responses) // len(prompts)
    rewards, texts, errors = score_each(run, [prompt for prompt in prompts for _ in range(group)], responses)
    return rewards.reshape(len(prompts), group), texts, errors


def score_each(run: Run, prompts: Sequence[Prompt], responses: Sequence[Response]) -> tuple[np.ndarray, list[str], dict[str, int]]:
    """As `score`, with the prompt of every response: rewards [n]."""
    texts = run.tokenizer.batch_decode([r.token_ids for r in responses], skip_special_tokens=True) if responses else []
    items = [RewardItem(text, p.text, p.answer, p.meta) for text, p in zip(texts, prompts, strict=True)]
    result = run.rewards.score(items)
    for kind, message in result.messages.items():
        run.log.note_once(f"WARNING: reward failed ({kind}), its response is left out: {message}", key=f"reward failed ({kind})")
    return np.asarray(result.rewards, np.float64), texts, dict(result.errors)


def gather_outcomes(run: Run, selection: Selection, responses: Sequence[Response], rewards: np.ndarray) -> tuple[np.ndarray, Outcomes]:
    """(this rank's rewards [P, G], outcomes of all ranks in the order of `selection`) from the rewards of this rank's responses [n].

    G is the largest number of responses of any prompt; what was not sampled has reward NaN and length 0.
    """
    ranks, prompts = run.ranks, len(selection.rows)
    counts = np.full(prompts, run.cfg.rollout.responses) if selection.responses is None else selection.responses
    place = np.arange(counts.max()) < counts[ranks.rank::ranks.world_size, None]
    local = [np.full(place.shape, empty) for empty in (np.nan, 0, False)]
    local[0][place], local[1][place] = rewards, [len(r.token_ids) for r in responses]
    local[2][place] = [r.finish_reason == "length" for r in responses]
    merged = [np.empty((prompts, values.shape[1]), values.dtype) for values in local]
    for rank, part in enumerate(ranks.all_gather(local)):
        for whole, values in zip(merged, part, strict=True):
            whole[rank::ranks.world_size] = values
    return local[0], Outcomes(selection.rows, selection.bins, *merged)


def sync(run: Run, version: int, token_ids: Sequence[int]) -> None:
    """Give the sampler the learner's weights and compare both on `token_ids`; raises SyncError on every rank alike."""
    engine, ranks, tolerance = run.learner.engine, run.ranks, run.cfg.rollout.sync_tolerance
    if run.ahead:
        with run.log.phase("rollout"):
            run.ahead.wait()
    _load_weights(run, version)
    check = measure_sync(run.rollout, token_ids, run.learner.logp(token_ids))
    worst = type(check)(*ranks.all_reduce(np.array(check), op="max").tolist())
    if tolerance is None:
        tolerance = max(SYNC_TOLERANCE[str(run.rollout.dtype).removeprefix("torch.")], SYNC_TOLERANCE[run.cfg.model.dtype])
    require_sync(run.rollout, worst, tolerance, version, lambda: layer_fingerprints(engine.named_weights(), run.rollout.dtype))


def _load_weights(run: Run, version: int) -> None:
    """Whatever the sampler raises half way becomes a SyncError that names the parameter."""
    sent = ["nothing"]

    def named():
        for name, weight in run.learner.engine.named_weights():
            sent.append(name)
            yield name, weight

    try:
        run.rollout.load_weights(named(), version)
    except (SyncError, ConfigError):
        raise
    except SAMPLER_ERRORS as error:
        raise SyncError(f"weight sync, version {version}: the sampler failed at {sent[-1]} ({type(error).__name__}: {error}); what it "
                        "holds now is unusable, the learner and its checkpoints are not touched: continue with --resume") from error


def sample_rows(prompts: Sequence[Prompt], responses: Sequence[Response], rewards: np.ndarray, texts: Sequence[str]) -> list[dict]:
    """Rows of samples.jsonl: one response of each prompt, in turn."""
    group = rewards.shape[1]
    order = [p * group + p % group for p in range(len(prompts))]
    return [
        {"row": prompts[i // group].row, "prompt": prompts[i // group].text, "response": texts[i], "answer": prompts[i // group].answer,
         "reward": float(rewards.flat[i]), "finish_reason": responses[i].finish_reason, "length": len(responses[i].token_ids)}
        for i in order
    ]
