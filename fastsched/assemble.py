"""Configuration -> the parts of a run, wired to one another. The only module that knows all rooms."""

import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Optional

import numpy as np
import torch
from fastsched_kernels import implementation

from fastsched.ahead import LookAhead
from fastsched.buffers import GroupBuffer, make_buffer
from fastsched.config import Config, ConfigError, require
from fastsched.control.scheduler import Scheduler
from fastsched.data.datasets import PromptSet
from fastsched.data.features import open_features, with_feature_bins
from fastsched.data.rewards import RewardPool
from fastsched.engines.deepspeed_engine import PATIENCE_S, DeepSpeedLearner, init_distributed, leave_distributed
from fastsched.engines.limits import LimitedRollout
from fastsched.engines.models import load_policy, load_tokenizer, require_full_attention, stop_token_ids
from fastsched.engines.rollout import RolloutEngine, open_rollout
from fastsched.engines.teacher import load_teacher
from fastsched.features import feature_lines, find_features
from fastsched.learn.learner import Learner
from fastsched.log import RunLog
from fastsched.prepare import data_lines, load_data, prepare_model
from fastsched.types import Features

LATE_S = 60.0
"""How much longer a collective waits than a call into the sampler, so that the rank whose sampler hangs can say so."""
RESUME = "the checkpoints are untouched: continue with --resume"


@dataclass
class Run:
    cfg: Config
    run_dir: Path
    log: RunLog
    model_path: Path
    tokenizer: object
    train_set: PromptSet
    heldout: PromptSet
    scheduler: Optional[Scheduler]  # None when only evaluating
    rewards: RewardPool
    rollout: RolloutEngine
    learner: Optional[Learner]  # None when only evaluating
    buffer: GroupBuffer
    ahead: Optional[LookAhead] = None  # with rollout.ahead

    def close(self) -> None:
        """Sampler first: its engine must end before the process group does."""
        self.rewards.close()
        if self.ahead:
            self.ahead.close()
        self.rollout.close()
        if self.learner:
            self.learner.engine.close()
        leave_distributed()


def assemble(cfg: Config, run_dir: Path, log: RunLog, *, learn: bool = True) -> Run:
    """Build every part; each says in the log what it is doing. Raises ConfigError for what cannot run."""
    init_distributed(max(PATIENCE_S, cfg.rollout.timeout_s + LATE_S))
    random.seed(cfg.train.seed), np.random.seed(cfg.train.seed)  # nothing here draws from them; what a library draws repeats
    if not torch.cuda.is_available():
        log.note(f"device: CPU, {torch.get_num_threads()} threads, world size {torch.distributed.get_world_size()}")
    world = torch.distributed.get_world_size()
    require(cfg.train.prompts_per_step % world == 0,
            f"train.prompts_per_step: {cfg.train.prompts_per_step} prompts cannot be split over {world} ranks; use a multiple of {world}")
    with log.phase("preparing the model"):
        model_path = prepare_model(cfg)
        tokenizer = load_tokenizer(model_path, cfg.model)
    with log.phase("loading and checking the dataset"):
        train_set, heldout = load_data(cfg.data, tokenizer, cfg.train.seed, cfg.train.prompts_per_step)
    for line in data_lines(train_set, heldout):
        log.note(line)
    features = _features(cfg, model_path, train_set, log) if learn else None
    if features:
        train_set = with_feature_bins(train_set, features, cfg.data)
    with log.phase("starting the reward workers"):
        rewards = RewardPool(cfg.reward, cfg.data.task)
    with log.phase("starting the learner"):
        learner = _learner(cfg, run_dir, model_path, train_set) if learn else None
        if learner:
            log.note(f"head: {_head(cfg, learner)}, ZeRO stage {cfg.learner.zero_stage}")
    with log.phase("starting the sampler"):
        rollout = sampler_of(cfg, model_path, run_dir, (lambda text: log.warn(f"{text}; {RESUME}")) if learn else log.warn)
    scheduler = _scheduler(cfg, train_set, features, log) if learn else None
    buffer = make_buffer(cfg.scheduler, cfg.train.prompts_per_step, cfg.rollout.responses)
    ahead = LookAhead(rollout.generate) if cfg.rollout.ahead and learn else None
    return Run(cfg, run_dir, log, model_path, tokenizer, train_set, heldout, scheduler, rewards, rollout, learner, buffer, ahead)


def _features(cfg: Config, model_path: Path, train_set: PromptSet, log: RunLog) -> Optional[Features]:
    folder = find_features(cfg, model_path, train_set)
    if folder is None:
        return None
    for line in feature_lines(folder):
        log.note(line)
    return open_features(folder)


def _scheduler(cfg: Config, train_set: PromptSet, features: Optional[Features], log: RunLog) -> Scheduler:
    scheduler = Scheduler(cfg.scheduler, train_set.bins, cfg.train.prompts_per_step, cfg.train.steps, cfg.train.seed, features)
    for line in [*scheduler.sampler.notes(), *_budget_notes(cfg)]:
        log.warn(line)
    return scheduler


def _budget_notes(cfg: Config) -> list[str]:
    scheduled = ["scheduler.temporal"] * (cfg.scheduler.temporal.mode != "none") + ["learner.cooldown"] * (cfg.learner.cooldown > 0)
    if not scheduled or not (cfg.train.rollout_budget or cfg.train.token_budget):
        return []
    return [f"{' and '.join(scheduled)} go by train.steps ({cfg.train.steps}); a run that a budget of responses or tokens ends before does "
            "not come to their end"]


def sampler_of(cfg: Config, model_path: Path, run_dir: Path, say: Callable[[str], None]) -> RolloutEngine:
    """`say` is told when a call into an engine of this process takes too long, just before the process ends."""
    engine = open_rollout(model_path, cfg.rollout, dtype=cfg.model.dtype, seed=cfg.train.seed,
                          max_model_len=cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens,
                          stop_token_ids=stop_token_ids(model_path, cfg.model.trust_remote_code),
                          trust_remote_code=cfg.model.trust_remote_code, log_dir=run_dir)
    return engine if cfg.rollout.engine == "vllm_server" else LimitedRollout(engine, cfg.rollout.timeout_s, say)


def _head(cfg: Config, learner: Learner) -> str:
    try:
        return implementation(learner.engine.device, learner.engine.dtype, cfg.learner.head)
    except NotImplementedError as error:
        raise ConfigError(f"learner.head: {error}") from error


def _learner(cfg: Config, run_dir: Path, model_path: Path, train_set: PromptSet) -> Learner:
    require(torch.cuda.is_available() or cfg.model.attention != "flex_attention",
            "model.attention: flex_attention has no backward pass on a CPU; use sdpa")
    torch.manual_seed(cfg.train.seed)
    policy, teacher = load_policy(model_path, cfg.model), None
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_new_tokens
    require_full_attention(policy.config, longest)
    if cfg.learner.teacher:
        teacher_path = prepare_model(replace(cfg, model=replace(cfg.model, name=cfg.learner.teacher)))
        teacher = load_teacher(teacher_path, model_path, policy, cfg.model)
        require_full_attention(teacher.config, longest, "learner.teacher")
    return Learner(DeepSpeedLearner(policy, cfg.learner, cfg.model, teacher), cfg, run_dir, train_set.bins)
