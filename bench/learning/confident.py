"""What bf16 does to the log-probabilities of tokens that a model sampled itself, and what each mend leaves of it.

python -m bench.learning.confident [--preset smollm2-cpu] [--prompts 16] [--responses 4] [--engine vllm]

The prompts of the preset are sampled in bf16, once with rounded logits and once with fp32 ones. The learner's backbone then runs over
the same tokens in bf16; its head forms log-probabilities in four ways. Against fp64 of the same hidden states, and against the sampler.
"""

import argparse
from dataclasses import replace

import numpy as np
import torch
from fastsched_kernels.linear import linear_token_stats
from torch import Tensor

from fastsched.config import Config
from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.learner.policy import Policy
from fastsched.engines.models.loading import load_policy, load_tokenizer, stop_token_ids
from fastsched.engines.rollout.opening import open_rollout
from fastsched.learn.packing import Sample, pack
from fastsched.loop.prepare import load_data, prepare_model
from fastsched.types import Response, Sampling

SURE = 0.9
WAYS = ("fine target outside the sum", "rounded logits", "fine target in the sum", "fp32 logits")


def main() -> None:
    own = argparse.ArgumentParser(prog="python -m bench.learning.confident")
    own.add_argument("--preset", default="smollm2-cpu")
    own.add_argument("--prompts", type=int, default=16)
    own.add_argument("--responses", type=int, default=4)
    own.add_argument("--engine", default="vllm", choices=("vllm", "transformers"))
    own = own.parse_args()
    cfg = parse_config(["--config", str(preset_path(own.preset)), "--model.dtype", "bfloat16", "--rollout.engine", own.engine,
                        "--rollout.responses", str(own.responses), "--data.size", "4000"])
    print("\n".join(table(cfg, own.prompts)))


def table(cfg: Config, prompts: int) -> list[str]:
    """Markdown: a row for each way, errors in nats."""
    lines = [f"| head | error | error where p > {SURE} | above 0 | from a sampler with bf16 logits | from one with fp32 logits |",
             "|---|---|---|---|---|---|"]
    found = {}
    for head_dtype in ("bf16", "fp32"):
        found[head_dtype] = measure(cfg, sample(cfg, head_dtype, prompts))
    truth, ways, _ = found["bf16"]
    sure = truth.exp() > SURE
    for way in WAYS:
        error = (ways[way] - truth).abs()
        apart = [float((ways_of[way] - sampler).abs().mean()) for _, ways_of, sampler in found.values()]
        lines.append(f"| {way} | {error.mean():.1e} | {error[sure].mean():.1e} | {(ways[way] > 0).float().mean():.0%} | {apart[0]:.4f} | "
                     f"{apart[1]:.4f} |")
    return [*lines, f"{len(truth)} tokens, {int(sure.sum())} of them with p > {SURE}"]


def sample(cfg: Config, head_dtype: str, prompts: int) -> list[Response]:
    path = prepare_model(cfg)
    train_set, _ = load_data(cfg.data, load_tokenizer(path, cfg.model), cfg.train.seed, cfg.train.prompts_per_step)
    rollout = replace(cfg.rollout, head_dtype=head_dtype, kv_cache_gb=0.25, max_num_seqs=32)
    engine = open_rollout(path, rollout, dtype="bfloat16", max_model_len=cfg.longest, seed=0, stop_token_ids=stop_token_ids(path))
    try:
        chosen = [train_set.prompt(row) for row in range(prompts)]
        return engine.generate(chosen, Sampling(cfg.rollout.responses, cfg.rollout.max_new_tokens), list(range(prompts)))
    finally:
        engine.close()


@torch.no_grad()
def measure(cfg: Config, responses: list[Response]) -> tuple[Tensor, dict[str, Tensor], Tensor]:
    """(log-probability [R] of every sampled token in fp64 from the learner's bf16 hidden states, {way: the same}, the sampler's)."""
    policy = Policy(load_policy(prepare_model(cfg), cfg.model))
    samples = [Sample(r.row, r.prompt_ids, r.token_ids, r.logp, 1.0, np.ones(len(r.token_ids), bool), 1.0) for r in responses]
    micro_batches = pack(samples, token_budget=cfg.learner.micro_batch_tokens, share_prompts=True)
    heads = [policy(micro, lambda head: head) for micro in micro_batches]
    target = torch.from_numpy(np.concatenate([micro.targets for micro in micro_batches]))
    sampler = torch.from_numpy(np.concatenate([micro.sampler_logp for micro in micro_batches]))
    return *head_ways(torch.cat([head.hidden for head in heads]), target, heads[0].weight), sampler


def head_ways(hidden: Tensor, target: Tensor, weight: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    at = target[:, None]
    z = (hidden.float() @ weight.float().t()).double()
    rounded = z.bfloat16().float()
    fine = z.gather(1, at).squeeze(1).float()
    mended, exact = (linear_token_stats(hidden, weight, target, logits_dtype=d).logp for d in (torch.bfloat16, torch.float32))
    ways = (fine - rounded.logsumexp(1), rounded.log_softmax(1).gather(1, at).squeeze(1), mended, exact)
    return z.log_softmax(1).gather(1, at).squeeze(1), dict(zip(WAYS, ways, strict=True))


if __name__ == "__main__":
    main()
