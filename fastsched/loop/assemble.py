"""Configuration -> the parts of a run, wired to one another. The only module that knows all rooms."""

import logging
import random
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, NamedTuple

import numpy as np
import torch
from fastsched_kernels import implementation

from fastsched.config import Config, ConfigError, require
from fastsched.control.scheduler import Scheduler
from fastsched.data.datasets import PromptSet
from fastsched.data.feature_store import open_features, with_feature_bins
from fastsched.data.rewards import RewardPool
from fastsched.engines.learner.deepspeed_engine import DeepSpeedLearner
from fastsched.engines.learner.packing_check import require_packable_model
from fastsched.engines.learner.teacher import load_teacher
from fastsched.engines.models.loading import (
    load_config,
    load_policy,
    load_tokenizer,
    require_full_attention,
    require_positions,
    stop_token_ids,
)
from fastsched.engines.models.precision import fast_bf16, logits_differ
from fastsched.engines.ranks import PATIENCE_S, Ranks, init_distributed, leave_distributed
from fastsched.engines.rollout.contract import RolloutEngine
from fastsched.engines.rollout.limits import LimitedRollout
from fastsched.engines.rollout.opening import open_rollout
from fastsched.learn.learner import Learner
from fastsched.loop.ahead import AheadSource, LookAhead
from fastsched.loop.buffers import GroupBuffer, make_buffer
from fastsched.loop.evaluation import Evaluator
from fastsched.loop.features import feature_lines, find_features
from fastsched.loop.golds import gold_lines
from fastsched.loop.guards import RESUME
from fastsched.loop.outcomes import Scorer
from fastsched.loop.prepare import data_lines, load_data, prepare_model, require_packable, require_share
from fastsched.loop.rollouts import RolloutSource
from fastsched.record.log import RunLog
from fastsched.types import SAMPLER_ERRORS, EngineError, Features, StartError

LATE_S = 60.0
"""How much longer a collective waits than a call into the sampler, so that the rank whose sampler hangs can say so."""


@dataclass(frozen=True)
class Training:
    """The parts of a training run, wired to one another."""

    cfg: Config
    run_dir: Path
    log: RunLog
    ranks: Ranks
    scheduler: Scheduler
    source: RolloutSource
    buffer: GroupBuffer
    learner: Learner
    rollout: RolloutEngine
    evaluator: Evaluator


class Basis(NamedTuple):
    """What training and evaluation are both built on."""

    ranks: Ranks
    model_path: Path
    tokenizer: object
    train_set: PromptSet
    heldout: PromptSet


@contextmanager
def assemble_training(cfg: Config, run_dir: Path, log: RunLog) -> Iterator[Training]:
    """Build every part; each says in the log what it is doing. Whatever was opened is closed at the end, the last first: the sampler's
    engine must end before the learner's, and both before the process group. Also where a later part fails.

    Raises ConfigError for what cannot run, StartError for a sampler that does not start.
    """
    with ExitStack() as opened:
        basis = _basis(cfg, log, opened)
        require_packable(cfg, basis.train_set.longest)
        features = _features(cfg, basis.model_path, basis.train_set, log)
        train_set = with_feature_bins(basis.train_set, features, cfg.data) if features else basis.train_set
        scorer = _open_scorer(cfg, basis.tokenizer, log, opened)
        for line in gold_lines(cfg, basis.train_set, scorer.pool):
            log.warn(line)
        with log.phase("starting the learner"):
            learner = _learner(cfg, run_dir, basis.model_path, train_set)
            opened.callback(learner.engine.close)
            log.note(f"head: {_head(cfg, learner)}, ZeRO stage {cfg.learner.zero_stage}")
        rollout = _open_sampler(cfg, basis.model_path, run_dir, log, opened, lambda text: log.warn(f"{text}; {RESUME}"))
        if note := logits_differ(cfg):
            log.warn(note)
        scheduler = _scheduler(cfg, train_set, features, log)
        parts = cfg, train_set, scheduler, rollout, scorer, basis.ranks, log
        source = AheadSource(*parts, LookAhead(rollout.generate)) if cfg.rollout.ahead else RolloutSource(*parts)
        opened.callback(source.close)
        buffer = make_buffer(cfg.scheduler, cfg.train.prompts_per_step, cfg.rollout.responses)
        evaluator = Evaluator(cfg, basis.heldout, rollout, scorer, basis.ranks, log)
        yield Training(cfg, run_dir, log, basis.ranks, scheduler, source, buffer, learner, rollout, evaluator)


@contextmanager
def assemble_evaluation(cfg: Config, log_dir: Path, log: RunLog) -> Iterator[Evaluator]:
    """Only what evaluates `model.name`; raises and closes as `assemble_training` does."""
    with ExitStack() as opened:
        basis = _basis(cfg, log, opened)
        scorer = _open_scorer(cfg, basis.tokenizer, log, opened)
        rollout = _open_sampler(cfg, basis.model_path, log_dir, log, opened, log.warn)
        yield Evaluator(cfg, basis.heldout, rollout, scorer, basis.ranks, log)


def _basis(cfg: Config, log: RunLog, opened: ExitStack) -> Basis:
    opened.callback(leave_distributed)
    ranks = init_distributed(max(PATIENCE_S, cfg.rollout.timeout_s + LATE_S))
    random.seed(cfg.train.seed), np.random.seed(cfg.train.seed)  # nothing here draws from them; what a library draws repeats
    if not torch.cuda.is_available():
        slow = "" if cfg.model.dtype == "bfloat16" or fast_bf16() else ", as this processor has no instructions for bf16"
        log.note(f"device: CPU, {torch.get_num_threads()} threads, world size {ranks.world_size}; model in {cfg.model.dtype}{slow}")
    require_share(cfg, ranks.world_size)
    with log.phase("preparing the model"):
        model_path = prepare_model(cfg)
        require_positions(load_config(model_path, cfg.model), cfg.longest)
        tokenizer = load_tokenizer(model_path, cfg.model)
    with log.phase("loading and checking the dataset"):
        train_set, heldout = load_data(cfg.data, tokenizer, cfg.train.seed, cfg.train.prompts_per_step)
    for line in data_lines(train_set, heldout):
        log.note(line)
    return Basis(ranks, model_path, tokenizer, train_set, heldout)


def _open_scorer(cfg: Config, tokenizer: object, log: RunLog, opened: ExitStack) -> Scorer:
    with log.phase("starting the reward workers"):
        return Scorer(tokenizer, opened.enter_context(RewardPool(cfg.reward, cfg.data.task)), log, cfg.reward)


def _open_sampler(cfg: Config, model_path: Path, log_dir: Path, log: RunLog, opened: ExitStack,
                  warn: Callable[[str], None]) -> RolloutEngine:
    with log.phase("starting the sampler"):
        rollout = sampler_of(cfg, model_path, log_dir, warn)
        opened.callback(rollout.close)
        return rollout


def _features(cfg: Config, model_path: Path, train_set: PromptSet, log: RunLog) -> Features | None:
    folder = find_features(cfg, model_path, train_set)
    if folder is None:
        return None
    for line in feature_lines(folder):
        log.note(line)
    return open_features(folder)


def _scheduler(cfg: Config, train_set: PromptSet, features: Features | None, log: RunLog) -> Scheduler:
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


def sampler_of(cfg: Config, model_path: Path, log_dir: Path, warn: Callable[[str], None]) -> RolloutEngine:
    """`warn` is told when a call into an engine of this process takes too long, just before the process ends.

    Raises StartError for whatever an engine of this process raises while it starts.
    """
    stops = stop_token_ids(model_path, cfg.model.trust_remote_code)
    try:
        engine = open_rollout(model_path, cfg.rollout, dtype=cfg.model.dtype, seed=cfg.train.seed, max_model_len=cfg.longest,
                              stop_token_ids=stops, trust_remote_code=cfg.model.trust_remote_code, log_dir=log_dir)
    except (ConfigError, EngineError):
        raise
    except SAMPLER_ERRORS as error:
        logging.getLogger(__name__).exception("sampler: start")
        memory = "rollout.gpu_memory_utilization" if torch.cuda.is_available() else "rollout.kv_cache_gb"
        raise StartError(f"rollout.engine {cfg.rollout.engine}: the sampler did not start ({type(error).__name__}: "
                         f"{' '.join(str(error).split())[:600]}); it goes by model.name, rollout.dtype, {memory}, "
                         f"rollout.max_num_seqs and data.max_prompt_tokens + rollout.max_new_tokens = {cfg.longest}") from error
    return engine if cfg.rollout.engine == "vllm_server" else LimitedRollout(engine, cfg.rollout.timeout_s, warn)


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
    require_full_attention(policy.config, cfg.longest)
    require_packable_model(policy, cfg.longest, cfg.learner.share_prompts)
    if cfg.learner.teacher:
        teacher_path = prepare_model(replace(cfg, model=replace(cfg.model, name=cfg.learner.teacher)))
        teacher = load_teacher(teacher_path, model_path, policy, cfg.model)
        require_full_attention(teacher.config, cfg.longest, "learner.teacher")
        require_positions(teacher.config, cfg.longest, "learner.teacher")
        require_packable_model(teacher, cfg.longest, cfg.learner.share_prompts, "learner.teacher")
    return Learner(DeepSpeedLearner(policy, cfg.learner, cfg.model, teacher), cfg, run_dir, train_set.bins)
