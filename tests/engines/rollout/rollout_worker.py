"""Run by test_rollout_engines.py in processes of its own.

generate KIND FOLDER OUT     a fresh engine samples the batch of `batch()` into OUT.npz
ranks FOLDER                 under torchrun: one vLLM engine a rank beside a gloo group, twice in a row
shared FOLDER                under torchrun: one tensor parallel engine that two ranks share
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM

from fastsched.config import RolloutConfig
from fastsched.engines.rollout.contract import SyncCheck, measure_sync, require_sync, require_weights
from fastsched.engines.rollout.fingerprints import fingerprints
from fastsched.engines.rollout.opening import open_rollout
from fastsched.types import Prompt, Sampling

WORKER = Path(__file__)
STOP = tuple(range(20, 36))


def synced(engine, weights, version, token_ids, learner_logp, tolerance=1e-4) -> SyncCheck:
    """Both checks of a weight sync as a run makes them, on one rank."""
    require_weights(engine, fingerprints(weights, engine.dtype), version)
    check = measure_sync(engine, token_ids, learner_logp)
    require_sync(check, tolerance, version)
    return check


def prompt(row: int, length: int) -> Prompt:
    ids = np.random.default_rng(row).integers(3, 320, length)
    return Prompt(row=row, token_ids=tuple(ids.tolist()), text="", answer="", bin=0)


def batch() -> tuple[list[Prompt], Sampling, list[int]]:
    """Prompts of different lengths, one longer than a cache block."""
    return [prompt(0, 5), prompt(1, 11), prompt(2, 140), prompt(3, 1)], Sampling(3, 12, 0.8), [11, 12, 13, 14]


def open_engine(kind: str, folder, dtype: str | None = None, tensor_parallel: int = 1, head_dtype: str | None = None):
    cfg = RolloutConfig(engine=kind, kv_cache_gb=0.125, max_num_seqs=8, dtype=dtype, tensor_parallel=tensor_parallel,
                        head_dtype=head_dtype)
    return open_rollout(folder, cfg, dtype="float32", max_model_len=192, seed=0, stop_token_ids=STOP)


def packed(responses) -> dict[str, np.ndarray]:
    return {"tokens": np.concatenate([r.token_ids for r in responses]),
            "logp": np.concatenate([r.logp for r in responses])}


def process_state() -> dict[str, object]:
    return {"threads": torch.get_num_threads(), "set_num_threads": torch.set_num_threads, "python": random.getstate(),
            "numpy": np.random.get_state()[1].tolist(), "torch": torch.get_rng_state().tolist()}


@torch.no_grad()
def shaken(model, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.add_(scale * torch.randn(parameter.shape, generator=generator))


def generate(kind: str, folder: str, out: str) -> None:
    engine = open_engine(kind, folder)
    np.savez(out, **packed(engine.generate(*batch())))
    engine.close()


def learner_logp(model, ids, temperature: float = 1.0) -> np.ndarray:
    """[len - 1] fp32 log-probability of each token after the first."""
    with torch.no_grad():
        logits = model(torch.tensor([ids])).logits[0, :-1].float() / temperature
    return logits.log_softmax(1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def ranks(folder: str) -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(dist.get_rank())
    model = AutoModelForCausalLM.from_pretrained(folder)
    for _ in range(2):
        engine = open_engine("vllm", folder)
        ids = prompt(dist.get_rank(), 30).token_ids
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.02 * torch.randn_like(parameter))
        engine.load_weights(model.named_parameters(), 1)
        error = torch.tensor(np.abs(engine.score(ids) - learner_logp(model, ids)).max())
        length = sum(len(r.token_ids) for r in engine.generate([prompt(9, 4 + dist.get_rank())], Sampling(2, 6), [5]))
        engine.close()
        dist.all_reduce(error, op=dist.ReduceOp.MAX)  # the group outlives the engine
        print(f"rank {dist.get_rank()} error {error.item():.2e} tokens {length}")
        assert error < 1e-4
    dist.destroy_process_group()


def shared(folder: str) -> None:
    """Each rank asks for prompts of its own, one of them for none, and gets the learner's log-probabilities for them."""
    dist.init_process_group("gloo")
    rank, model = dist.get_rank(), AutoModelForCausalLM.from_pretrained(folder)
    engine = open_engine("vllm", folder, tensor_parallel=2)
    shaken(model, 0.05)
    engine.load_weights(model.named_parameters(), 1)
    asked, seeds = [prompt(k, 4 + k) for k in range(2 * rank, 2 * rank + 2)], [10 + 2 * rank, 11 + 2 * rank]
    responses = engine.generate(asked, Sampling(3, 8, 0.8), seeds)
    assert [r.row for r in responses] == [p.row for p in asked for _ in range(3)] and {r.weight_version for r in responses} == {1}
    errors = [np.abs(r.logp - learner_logp(model, r.prompt_ids + r.token_ids, 0.8)[len(r.prompt_ids) - 1:]).max() for r in responses]
    ids = prompt(rank, 30 + rank).token_ids
    check = synced(engine, model.named_parameters(), 1, ids, learner_logp(model, ids))
    assert len(engine.generate(asked if rank else [], Sampling(1, 4), seeds if rank else [])) == 2 * rank
    everyone: list = [None, None]
    dist.all_gather_object(everyone, packed(responses))
    if rank == 0:
        np.savez(Path(folder) / "shared.npz", **{f"{name}{k}": part[name] for k, part in enumerate(everyone) for name in part})
    engine.close()
    print(f"rank {rank} error {max(errors):.2e} sync {check.max:.2e}")
    assert max(errors) <= 1e-4
    dist.destroy_process_group()


if __name__ == "__main__":
    {"generate": generate, "ranks": ranks, "shared": shared}[sys.argv[1]](*sys.argv[2:])
