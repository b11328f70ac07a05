"""Run by test_ranks.py under torch.distributed.run: every check of one rank count in one start.

distributed_worker.py OUT MODEL OTHER     OTHER: folder with the checkpoints of another rank count, which are resumed here
"""

import functools
import json
import resource
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from small_bf16 import error, length, micro_batches, sums

from fastsched.config import (
    CoefficientConfig,
    Config,
    KlGateConfig,
    LearnerConfig,
    LogConfig,
    ModelConfig,
    RolloutConfig,
    SchedulerConfig,
    TemporalConfig,
)
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.models.loading import load_policy
from fastsched.engines.ranks import init_distributed
from fastsched.learn.learner import Learner
from fastsched.learn.packing import Sample, pack
from fastsched.loop.guards import require_agreement
from fastsched.record.checkpoint import CheckpointError, newest_intact, restore, save_checkpoint
from fastsched.types import Disagreement, Knobs, Outcomes, Response

WORKER = Path(__file__)
STAGES, ACCUMULATIONS, BALANCED = (0, 1, 2, 3), (1, 4), (1, 3)
MODEL = ModelConfig(dtype="float32")
KNOBS = Knobs(weights=(0.5, 0.5), r_threshold=0.5, entropy_coef=0.01, kl_coef=0.02, ema_alpha=0.9, lr_scale=1.0, temporal_s=0.0, rule="")
P, G, STEPS = 6, 4, 4
TIMEOUT_S = 777.0
GATE = 5.7385  # nats; about what a random model's entropy is, so that tokens lie on both sides


def batch(step: int) -> tuple[list[Response], np.ndarray, Knobs]:
    """The global batch of a step: uneven lengths; step 2 also trains uneven shares of them; from step 3 on the odd prompts, which are
    all that rank 1 of 2 has, give no trained token: their scores failed (3), or they left with dynamic sampling (4)."""
    rng = np.random.default_rng(step)
    responses = []
    for row in range(P):
        prompt = tuple(rng.integers(5, 200, rng.integers(2, 9)).tolist())
        for _ in range(G):
            n = int(rng.integers(1, 10))
            responses.append(Response(row, prompt, tuple(rng.integers(5, 200, n).tolist()), rng.normal(-2, 1, n).astype(np.float32),
                                      "stop", step - 1))
    rewards = rng.random((P, G))
    if step == 3:
        rewards[1::2] = np.nan
    return responses, rewards, replace(KNOBS, temporal_s=0.6 if step == 2 else 0.0)


def share(step: int, rank: int, world: int) -> tuple[list[Response], np.ndarray, Knobs]:
    responses, rewards, knobs = batch(step)
    rows = [p for p in range(rank, P, world) if step != 4 or p % 2 == 0]
    return [r for p in rows for r in responses[p * G:(p + 1) * G]], rewards[rows], knobs


@functools.cache
def budget(world: int, accumulation: int) -> int:
    """The largest token budget under which the rank with most has `accumulation` micro-batches at step 1."""
    shares = [[Sample(r.row, r.prompt_ids, r.token_ids, r.logp, 1.0, np.ones(len(r.token_ids), bool), 1.0)
               for r in share(1, rank, world)[0]] for rank in range(world)]

    def most(tokens: int) -> int:
        return max(len(pack(samples, token_budget=tokens, share_prompts=False)) for samples in shares)

    return next(t for t in range(1024, 16, -1) if most(t) == accumulation)


def make(model: str, out: Path, stage: int, accumulation: int = 1, balance: bool = False) -> Learner:
    """By default without balance, so that a rank may have nothing to train."""
    cfg = LearnerConfig(zero_stage=stage, lr=1e-3, kl="exact", share_prompts=False, grad_clip=0.5, balance=balance,
                        micro_batch_tokens=budget(torch.distributed.get_world_size(), accumulation))
    engine = DeepSpeedLearner(load_policy(model, MODEL), cfg, MODEL)
    return Learner(engine, Config(model=MODEL, learner=cfg, rollout=RolloutConfig(responses=G, max_new_tokens=10)), out)


def train(learner: Learner, first: int = 1, last: int = STEPS, **changes) -> tuple[list[dict], list[int]]:
    """Statistics of every step, and how many micro-batches each had on this rank; `changes` are of the knobs."""
    engine, stats, counts = learner.engine, [], []
    for step in range(first, last + 1):
        calls, backward = [0], engine.backward

        def counted(*args, calls=calls, backward=backward, **options):
            calls[0] += 1
            return backward(*args, **options)

        engine.backward = counted
        responses, rewards, knobs = share(step, engine.ranks.rank, engine.ranks.world_size)
        stats.append(asdict(learner.update(responses, rewards, replace(knobs, **changes), step)))
        engine.backward = backward
        counts.append(calls[0])
    return stats, counts


def tensors(learner: Learner) -> dict[str, np.ndarray]:
    found = {}
    for name, w in learner.engine.named_weights():
        if learner.engine.ranks.rank == 0:
            time.sleep(0.001)  # G9: the others must wait inside the gather, not beside it
        found[f"policy.{name}"] = w.clone().numpy()
    return found | {f"average.{name}": w.clone().numpy() for name, w in learner.engine.average_weights()}


def splits(model: str, out: Path, results: dict) -> None:
    """Every stage and accumulation through the same four updates; the one-micro-batch runs leave a checkpoint after the third."""
    for stage in STAGES:
        for accumulation in ACCUMULATIONS:
            learner = make(model, out, stage, accumulation)
            engine, name = learner.engine, f"stage {stage}, {accumulation} micro-batches"
            before = tensors(learner)
            stats, counts = train(learner, 1, 3)
            if accumulation == 1:
                np.savez(out / f"at-3-stage-{stage}-rank-{engine.ranks.rank}.npz", **tensors(learner))
                save_checkpoint(out / f"stage-{stage}", 3, engine, {}, keep=1)
            more, last = train(learner, 4, 4)
            after = tensors(learner)
            np.savez(out / f"{name} rank {engine.ranks.rank}.npz", **after)
            results[name] = {"stats": stats + more, "counts": counts + last,
                             "moved": {n: bool((after[n] != before[n]).any()) for n in after},
                             "reference": sum(p.numel() for p in engine.reference.policy.parameters())}
            engine.close()


def balances(model: str, out: Path, results: dict) -> None:
    """The same four updates with groups exchanged between the ranks."""
    for stage in BALANCED:
        learner = make(model, out, stage, 4, balance=True)
        results[f"balanced, stage {stage}"] = dict(zip(("stats", "counts"), train(learner), strict=True))
        np.savez(out / f"balanced, stage {stage} rank {learner.engine.ranks.rank}.npz", **tensors(learner))
        learner.engine.close()


def everything(model: str, out: Path, results: dict) -> None:
    """The same four updates with shared prompts, two optimizer steps a batch, random tokens masked, the KL gate, SNR by bin, and groups
    exchanged."""
    world = torch.distributed.get_world_size()
    learner_cfg = LearnerConfig(zero_stage=1, lr=1e-3, kl="exact", share_prompts=True, grad_clip=0.5, updates_per_batch=2,
                                micro_batch_tokens=budget(world, 4))
    cfg = Config(model=MODEL, learner=learner_cfg, rollout=RolloutConfig(responses=G, max_new_tokens=10), log=LogConfig(snr_bins=True),
                 scheduler=SchedulerConfig(kl_gate=KlGateConfig(enabled=True, quantile=0.3), kl=CoefficientConfig(0.0, 0.0, 1.0),
                                           temporal=TemporalConfig(mode="linear", proxy="random")))
    learner = Learner(DeepSpeedLearner(load_policy(model, MODEL), learner_cfg, MODEL), cfg, out, np.arange(P) % 2)
    results["everything"] = dict(zip(("stats", "counts"), train(learner, kl_gate=GATE, kl_coef=0.5), strict=True))
    np.savez(out / f"everything rank {learner.engine.ranks.rank}.npz", **tensors(learner))
    learner.engine.close()


def resumes(model: str, out: Path, source: Path, shift: int, results: dict) -> None:
    """Each stage's checkpoint of `source`, resumed here under the stage that is `shift` further, and the fourth update."""
    for stage in STAGES:
        learner = make(model, out, (stage + shift) % 4)
        folder = newest_intact(source / f"stage-{stage}", print)
        _, ranks = restore(folder, learner.engine)
        name = f"{ranks} ranks, stage {stage}"
        np.savez(out / f"loaded {name} rank {learner.engine.ranks.rank}.npz", **tensors(learner))
        results[f"resumed {name}"] = train(learner, 4, 4)[0]
        np.savez(out / f"resumed {name} rank {learner.engine.ranks.rank}.npz", **tensors(learner))
        learner.engine.close()


def refusals(model: str, out: Path, results: dict) -> None:
    """What one rank alone gets wrong, every rank must hear of."""
    learner = make(model, out, 3)
    engine, rank = learner.engine, learner.engine.ranks.rank
    rows = np.arange(P)
    outcomes = Outcomes(rows, rows % 2, np.ones((P, G)), np.ones((P, G), np.int64), np.zeros((P, G), bool))
    require_agreement(engine.ranks, KNOBS, outcomes, 1)
    cases = {"kl_coef": (replace(KNOBS, kl_coef=float(np.nextafter(0.02, 1)) if rank else 0.02), outcomes),
             "weights": (replace(KNOBS, weights=(0.5, 0.5 + rank)), outcomes), "rows": (KNOBS, replace(outcomes, rows=rows + rank))}
    for name, (knobs, seen) in cases.items():
        try:
            require_agreement(engine.ranks, knobs, seen, 7)
            results[f"differs: {name}"] = "accepted"
        except Disagreement as error:
            results[f"differs: {name}"] = str(error)
    run = out / "unwritable"
    save_checkpoint(run, 1, engine, {}, keep=2)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == engine.ranks.world_size - 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        save_checkpoint(run, 2, engine, {}, keep=2)
        results["unwritable"] = "written"
    except CheckpointError as error:
        results["unwritable"] = str(error)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    results["left"] = sorted(p.name for p in (run / "checkpoints").iterdir())
    engine.ranks.barrier()
    save_checkpoint(run, 3, engine, {}, keep=2)  # the same engine goes on
    engine.close()


def bf16_sums(results: dict) -> None:
    """Gradients of a bf16 model, each rank's own, over micro-batches and ranks."""
    for stage in STAGES[1:]:
        found = sums(stage, micro_batches(64, seed=torch.distributed.get_rank()))
        results[f"bf16, stage {stage}"] = [error(found), found.norm, length(found.truth.values())]


def main(out: str, model: str, other: str) -> None:
    init_distributed(TIMEOUT_S)
    backend = torch.distributed.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    results: dict = {"timeout": str(backend.options._timeout)}
    splits(model, Path(out), results)
    balances(model, Path(out), results)
    everything(model, Path(out), results)
    resumes(model, Path(out), Path(out), 0, results)
    resumes(model, Path(out), Path(other), 1, results)
    refusals(model, Path(out), results)
    bf16_sums(results)
    (Path(out) / f"results-{torch.distributed.get_rank()}.json").write_text(json.dumps(results))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
