"""Around one rollout batch: this rank's share, outcomes over all ranks, weight sync with its check, rows of the sample table."""

from dataclasses import dataclass
from typing import Sequence

import numpy as np

from fastsched.assemble import Run
from fastsched.engines.rollout import measure_sync, require_sync
from fastsched.engines.weights import layer_fingerprints
from fastsched.types import Outcomes, Prompt, Response, Sampling, Selection

SYNC_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.25}  # bf16 logits near 30 are 0.125 apart


@dataclass(frozen=True)
class Batch:
    """This rank's prompts of one step, every world-size-th of the selection, with the seed of each and how to sample."""

    prompts: list[Prompt]
    seeds: list[int]
    sampling: Sampling

    @classmethod
    def of(cls, run: Run, selection: Selection, step: int) -> "Batch":
        engine = run.learner.engine
        seeds = np.random.SeedSequence([run.cfg.train.seed, step]).generate_state(len(selection.rows))
        mine = range(engine.rank, len(selection.rows), engine.world_size)
        r = run.cfg.rollout
        sampling = Sampling(r.responses, r.max_new_tokens, r.temperature, r.top_p, r.top_k)
        return cls([run.train_set.prompt(int(selection.rows[i])) for i in mine], [int(seeds[i]) for i in mine], sampling)


def gather_outcomes(run: Run, selection: Selection, responses: Sequence[Response], rewards: np.ndarray) -> Outcomes:
    """Outcomes of all ranks in the order of `selection`."""
    lengths = np.array([len(r.token_ids) for r in responses], np.int64).reshape(rewards.shape)
    truncated = np.array([r.finish_reason == "length" for r in responses]).reshape(rewards.shape)
    parts = run.learner.engine.all_gather((rewards, lengths, truncated))
    merge = lambda k: np.stack([part[k] for part in parts], 1).reshape(len(selection.rows), -1)
    return Outcomes(selection.rows, selection.bins, merge(0), merge(1), merge(2))


def sync(run: Run, version: int, token_ids: Sequence[int]) -> None:
    """Give the sampler the learner's weights and compare both on `token_ids`; raises SyncError on every rank alike."""
    engine, tolerance = run.learner.engine, run.cfg.rollout.sync_tolerance
    run.rollout.load_weights(engine.named_weights(), version)
    check = measure_sync(run.rollout, token_ids, run.learner.logp(token_ids))
    worst = type(check)(*engine.all_reduce(np.array(check), op="max").tolist())
    if tolerance is None:
        tolerance = max(SYNC_TOLERANCE[str(run.rollout.dtype).removeprefix("torch.")], SYNC_TOLERANCE[run.cfg.model.dtype])
    require_sync(run.rollout, worst, tolerance, version, lambda: layer_fingerprints(engine.named_weights(), run.rollout.dtype))


def sample_rows(prompts: Sequence[Prompt], responses: Sequence[Response], rewards: np.ndarray, texts: Sequence[str]) -> list[dict]:
    """Rows of samples.jsonl: one response of each prompt, in turn."""
    group = rewards.shape[1]
    order = [p * group + p % group for p in range(len(prompts))]
    return [
        {"row": prompts[i // group].row, "prompt": prompts[i // group].text, "response": texts[i], "answer": prompts[i // group].answer,
         "reward": float(rewards.flat[i]), "finish_reason": responses[i].finish_reason, "length": len(responses[i].token_ids)}
        for i in order
    ]
