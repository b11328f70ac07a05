"""`--dry-run`: what a run would do, without a model, an engine or a hub."""

import os
from pathlib import Path

from fastsched.commands.memory import memory_lines
from fastsched.config import Config, FeaturesMissing
from fastsched.config.arguments import config_to_yaml
from fastsched.data.datasets import PromptSet
from fastsched.data.rewards import RewardPool
from fastsched.engines.models.loading import load_config, load_tokenizer, local_folder, require_full_attention, require_positions
from fastsched.engines.models.shape import folder_shape, hub_description
from fastsched.loop.features import feature_lines, feature_user, find_features
from fastsched.loop.golds import gold_lines
from fastsched.loop.prepare import data_lines, load_data, prepare_model, require_packable, require_share


def dry_run(cfg: Config, run_dir: Path) -> str:
    """Resolved configuration, batch arithmetic, memory estimate, length check of the whole dataset. Raises ConfigError."""
    world = int(os.environ.get("WORLD_SIZE", 0)) or cfg.train.ranks
    require_share(cfg, world)
    folder = _folder(cfg)
    if folder:
        config = load_config(folder, cfg.model)
        require_positions(config, cfg.longest)
        require_full_attention(config, cfg.longest)
    parts = [config_to_yaml(cfg), f"run folder: {run_dir}", *_batch(cfg, world), *_data(cfg, folder), *_memory(cfg, folder, world)]
    return "\n".join(parts)


def _folder(cfg: Config) -> Path | None:
    """The model's folder, of a hub model without its weights; None where the hub cannot be reached."""
    is_local = cfg.model.name.startswith("builtin:") or local_folder(cfg.model.name)
    return prepare_model(cfg) if is_local else hub_description(cfg.model.name)


def _batch(cfg: Config, world: int) -> list[str]:
    prompts, group, updates = cfg.train.prompts_per_step, cfg.rollout.responses, cfg.learner.updates_per_batch
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens - 1
    per_rank = prompts // world * group
    micro = -(-per_rank * longest // cfg.learner.micro_batch_tokens)
    return [
        f"batch: {prompts} prompts x {group} responses = {prompts * group} responses a step, {per_rank} on each of {world} ranks",
        f"       {updates} optimizer update(s) a step of {prompts // updates} prompts, each from at most {-(-micro // updates)} "
        f"micro-batches of {cfg.learner.micro_batch_tokens} tokens on a rank",
        f"       {cfg.train.steps} steps = {cfg.train.steps * prompts:,} prompts, {cfg.train.steps * prompts * group:,} responses"
        + _sampled(cfg),
    ]


def _sampled(cfg: Config) -> str:
    """Where more responses are sampled than trained."""
    prompts, group, refills, speed = cfg.train.prompts_per_step, cfg.rollout.responses, cfg.scheduler.refills, cfg.scheduler.speed
    batch = cfg.scheduler.traits.batch
    if batch == "screened":
        most = prompts * (group - speed.screen) + speed.candidates * prompts * speed.screen
        return f" trained; screening samples up to {most} in one generation"
    if batch == "replayed":
        fresh = prompts - int(cfg.scheduler.dots.replay * prompts)
        return f" trained; {fresh * group} of a step are sampled once the replay buffer gives the rest (scheduler.dots.replay)"
    return f" trained; with scheduler.refills up to {(1 + refills) * prompts * group} are sampled a step" if refills else ""


def _data(cfg: Config, folder: Path | None) -> list[str]:
    """Every row of the dataset is rendered, tokenised and checked."""
    if folder is None:
        require_packable(cfg, cfg.data.max_prompt_tokens)
        return [f"data: the tokenizer of {cfg.model.name} cannot be read here (no hub), so prompt lengths are not checked; "
                "run --dry-run again where it can"]
    tokenizer = load_tokenizer(folder, cfg.model)
    train_set, heldout = load_data(cfg.data, tokenizer, cfg.train.seed, cfg.train.prompts_per_step)
    require_packable(cfg, train_set.longest)
    limit = f"      limit {cfg.data.max_prompt_tokens} tokens a prompt: every row fits or was dropped by policy"
    return [*data_lines(train_set, heldout), limit, *_golds(cfg, train_set), *_features(cfg, folder, train_set)]


def _golds(cfg: Config, train_set: PromptSet) -> list[str]:
    """Asked of the reward's own processes, as in a run; our own tasks need no asking."""
    if cfg.data.task in ("arithmetic", "chain"):
        return []
    with RewardPool(cfg.reward, cfg.data.task) as pool:
        return gold_lines(cfg, train_set, pool) or ["golds: those that were tried accept their own answer"]


def _features(cfg: Config, folder: Path, train_set: PromptSet) -> list[str]:
    if not feature_user(cfg):
        return []
    try:
        return feature_lines(find_features(cfg, folder, train_set))
    except FeaturesMissing as error:
        return [f"features: {error}; run `fastsched cluster` with the same configuration first"]


def _memory(cfg: Config, folder: Path | None, world: int) -> list[str]:
    shape = folder_shape(folder, cfg.model) if folder else cfg.model.shape
    if shape is None:
        return [f"memory: unknown, since the config.json of {cfg.model.name} cannot be read here (no hub) and model.shape is not given"]
    return memory_lines(cfg, shape, world)
