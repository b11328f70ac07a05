"""`fastsched train --help`: the keys that people set. `--help all` shows every key, out of the strings below the fields."""

from typing import Any

from fastsched.config.run import Config

COMMON = {
    "model.name": "hub name, local folder, builtin:tiny or builtin:smollm2",
    "model.dtype": "float32, bfloat16 or auto",
    "data.task": "arithmetic, chain, dataset (with data.source) or reasoning-gym:NAME",
    "data.source": "hub name, .jsonl or .parquet file of your prompts and answers",
    "data.difficulty_column": "numeric column from which difficulty bins are cut",
    "data.max_prompt_tokens": "longer prompts stop the run (data.overlong)",
    "reward.kind": "exact_number, graded_number, math_verify, task or module:function",
    "rollout.engine": "vllm, vllm_server or transformers (slow, the reference)",
    "rollout.responses": "G, responses for each prompt",
    "rollout.max_new_tokens": "length limit of a response",
    "learner.loss": "dapo, grpo, dr_grpo, gspo, cispo, opd or rpg",
    "learner.lr": "step size of AdamW",
    "learner.kl": "KL to the averaged policy: exact, k1, k2, k3 or none",
    "learner.micro_batch_tokens": "tokens in one forward pass; lower it when memory runs out",
    "scheduler.kind": "sampler: adaptive, uniform, mopps, sec, speed, dots ... (all: --help all)",
    "scheduler.window": "band in which mean success is held",
    "train.steps": "steps of the run",
    "train.prompts_per_step": "P, prompts in one step over all ranks",
    "train.eval_every": "steps between two evaluations; 0 is before and after only",
    "train.checkpoint_every": "steps between two checkpoints; 0 is one at the end",
}
"""Twenty keys and what they mean in a line."""

USAGE = """\
usage: fastsched train [--preset NAME | --config FILE.yaml] [--run_dir DIR] [--resume] [--dry-run] [--section.key VALUE ...]

  --preset NAME                   a shipped configuration (`fastsched presets` lists them)
  --config FILE.yaml              your own, with the same keys
  --run_dir DIR                   where the run goes; by default runs/ and the name of preset or file
  --resume                        go on with the run in that folder
  --dry-run                       say what would run, check every row of the data, estimate the memory, and stop

The keys that people set, with their defaults:
"""
ALL = "\n--help all shows every key. An unknown key is an error that names the nearest one."


def short_help() -> str:
    cfg = Config()
    return "\n".join([USAGE, *(f"  --{key} {default(cfg, key)}".ljust(44) + f"  {meaning}" for key, meaning in COMMON.items()), ALL])


def default(cfg: Config, key: str) -> str:
    """As it is written on the command line."""
    value: Any = cfg
    for part in key.split("."):
        value = getattr(value, part)
    return " ".join(str(v) for v in value) if isinstance(value, tuple) else "-" if value is None else str(value)
