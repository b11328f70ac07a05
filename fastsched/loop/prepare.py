"""Model folder and prompts of a configuration: what a run and its dry run have in common. Imports no training engine."""

from pathlib import Path

from fastsched.config import Config, DataConfig, require
from fastsched.data.chain import chain_rows
from fastsched.data.datasets import PromptSet, load_prompts, require_batch
from fastsched.data.tasks import arithmetic_rows, form_of
from fastsched.engines.models.loading import resolve_model

WARM_START_ROWS = 20_000


def prepare_model(cfg: Config) -> Path:
    """The local model folder; builtin models are made on first use, by one rank at a time."""
    return resolve_model(cfg.model, warm_start_rows=warm_start_rows(cfg.data) if cfg.model.name == "builtin:tiny" else None)


def warm_start_rows(cfg: DataConfig) -> list[tuple[str, str, int]]:
    """Prompt, answer and bin of what `builtin:tiny` is warm-started on: training problems of the task."""
    generate, bins = (chain_rows, cfg.chain_steps) if cfg.task == "chain" else (arithmetic_rows, cfg.digits)
    table = generate(WARM_START_ROWS, bins, form_of(cfg), seed=0)
    return list(zip(table.prompt, table.answer, table.bin.tolist(), strict=True))


def load_data(cfg: DataConfig, tokenizer, seed: int, prompts_per_step: int) -> tuple[PromptSet, PromptSet]:
    """Train and held-out prompts, checked over the whole dataset."""
    train_set, heldout = load_prompts(cfg, tokenizer, seed)
    require_batch(train_set, prompts_per_step)
    return train_set, heldout


def require_share(cfg: Config, world: int) -> None:
    """ConfigError where the prompts of a step cannot be dealt out to `world` ranks evenly."""
    require(cfg.train.prompts_per_step % world == 0,
            f"train.prompts_per_step: {cfg.train.prompts_per_step} prompts cannot be split over {world} ranks; use a multiple of {world}")


def require_packable(cfg: Config, prompt_tokens: int) -> None:
    """ConfigError where a micro-batch might not hold what is packed in one piece, for prompts of at most `prompt_tokens`."""
    fed, shared = cfg.rollout.max_new_tokens - 1, cfg.learner.share_prompts
    item = prompt_tokens + fed * (cfg.rollout.responses if shared else 1)
    require(item <= cfg.learner.micro_batch_tokens,
            f"learner.micro_batch_tokens: {cfg.learner.micro_batch_tokens} is less than the {item} tokens that one packed "
            f"{'group' if shared else 'response'} may need; raise it, or lower data.max_prompt_tokens or rollout.max_new_tokens")


def data_lines(train_set: PromptSet, heldout: PromptSet) -> list[str]:
    """What was loaded, and what was dropped by policy with source row numbers."""
    per_bin = ", ".join(f"{n:,}" for n in train_set.report["train_per_bin"])
    lines = [f"data: {len(train_set):,} training prompts ({per_bin} by bin), {len(heldout):,} held out, longest {train_set.longest} tokens"]
    for reason, found in train_set.report["dropped"].items():
        lines.append(f"data: dropped {found['count']} rows: {reason}; rows {found['rows'][:5]}")
    return lines + ([f"data: {train_set.report['bins']}"] if "bins" in train_set.report else [])
