"""The memory estimate of `--dry-run`: what each rank holds when it holds most."""

from typing import NamedTuple

from fastsched.config import Config, ModelShape

GIB = 2**30
LIBRARIES = 1.0 * GIB
"""Resident with Python, torch, transformers, DeepSpeed and vLLM imported (Linux, x86-64, the pinned versions)."""
WIDTH = {"bfloat16": 2, "float32": 4}


class Estimate(NamedTuple):
    """Bytes of one rank by what they are for. `on_a_cpu`: what resident memory counts as well where there is no GPU."""

    held: dict[str, float]
    on_a_cpu: dict[str, float]

    @property
    def together(self) -> float:
        return sum(self.held.values())

    @property
    def resident(self) -> float:
        return self.together + sum(self.on_a_cpu.values())


def memory_lines(cfg: Config, shape: ModelShape, world: int) -> list[str]:
    estimate = estimate_memory(cfg, shape, world)
    row = lambda name, size: f"  {name:<24} {size / GIB:7.2f} GiB"
    lines = [f"memory on each of {world} ranks, estimated for {shape.parameters / 1e6:,.0f} M parameters (ZeRO-{cfg.learner.zero_stage}):",
             *(row(name, size) for name, size in estimate.held.items()), row("together", estimate.together),
             *(f"{row(name, size)} (on a CPU)" for name, size in estimate.on_a_cpu.items()), row("resident on a CPU", estimate.resident)]
    cache = cfg.rollout.max_num_seqs * cfg.longest * shape.layers * 2 * shape.kv_width * WIDTH[cfg.rollout.dtype or cfg.model.dtype]
    return [*lines, f"{row('beside it, sampler cache', cache)} would hold {cfg.rollout.max_num_seqs} full sequences; it gets "
                    f"{cfg.rollout.kv_cache_gb} GiB on a CPU, what rollout.gpu_memory_utilization leaves on a GPU"]


def estimate_memory(cfg: Config, shape: ModelShape, world: int) -> Estimate:
    width, n, learner = WIDTH[cfg.model.dtype], shape.parameters, cfg.learner
    share = lambda from_stage: world if learner.zero_stage >= from_stage else 1
    held = {
        "working weights": n * width / share(3), "gradients": n * 4 / share(2), "master weights and Adam": n * 12 / share(1),
        "averaged policy": n * 4 / share(1), "reference": n * width / share(3) if learner.kl != "none" else 0,
        "teacher, if of this size": n * width / share(3) if learner.teacher else 0,
        "gradient sums by bin": n * 4 if cfg.log.snr_bins else 0,
        "activations": learner.micro_batch_tokens * shape.layers * _layer(cfg, shape, width),
        "masks": _masks(cfg, width),
        "logits of one chunk": _rows(cfg) * shape.vocab * _logits_width(cfg, width) + shape.vocab * shape.hidden * 4,
    }
    on_a_cpu = {"libraries": LIBRARIES}
    if cfg.rollout.engine != "vllm_server":  # whose sampler is in a process of its own
        sampler = WIDTH[cfg.rollout.dtype or cfg.model.dtype]
        held["sampler weights"] = n * sampler
        if cfg.rollout.engine == "vllm":
            on_a_cpu |= {"sampler's packed head": shape.vocab * shape.hidden * sampler, "sampler cache": cfg.rollout.kv_cache_gb * GIB}
    return Estimate({name: size for name, size in held.items() if size}, on_a_cpu)


def _layer(cfg: Config, shape: ModelShape, width: int) -> float:
    """Bytes that one token leaves in one layer for the backward pass: two norms (their inputs in fp32), queries, keys and values before and
    after the rotation, keys and values repeated for every head, what attention gives, four of the MLP's width."""
    h, kv = shape.hidden, shape.kv_width
    if cfg.model.gradient_checkpointing:
        return 2 * h * width
    of_layer = (shape.parameters - shape.vocab * h) / shape.layers
    mlp = max((of_layer - 2 * h * (h + kv)) / (3 * h), h)  # three matrices, as far as the number of parameters tells
    return 2 * h * (4 + width) + width * (2 * (h + 2 * kv) + 2 * h + h + 4 * mlp)


def _masks(cfg: Config, width: int) -> float:
    """Of the widest packed rows: one array that all layers share, and a bool one while it is made."""
    if cfg.model.attention == "flash_attention_2":
        return 0
    answers = cfg.rollout.responses if cfg.learner.share_prompts else 1
    row = min(cfg.data.max_prompt_tokens + answers * cfg.rollout.max_new_tokens, cfg.learner.micro_batch_tokens)
    return cfg.learner.micro_batch_tokens * row * (width + 1 if cfg.model.attention == "sdpa" else 1)


def _rows(cfg: Config) -> int:
    return min(cfg.learner.chunk_rows or 4096, cfg.learner.micro_batch_tokens)


def _logits_width(cfg: Config, width: int) -> int:
    """Bytes for an entry: the policy's logits, their gradient where it is of another dtype, and the reference's logits."""
    logits = 4 if cfg.learner.logits == "fp32" else width
    return logits + (width if logits != width else 0) + (logits if cfg.learner.kl == "exact" else 0)
