"""The small real parts of a run: prompts, sampler and reward workers on a random model, one rank."""

from types import SimpleNamespace

import pytest

from fastsched.config import Config, DataConfig, LogConfig, ModelConfig, RolloutConfig, TrainConfig
from fastsched.control.scheduler import Scheduler
from fastsched.data.datasets import load_prompts
from fastsched.data.rewards import RewardPool
from fastsched.engines.models.loading import load_tokenizer, stop_token_ids
from fastsched.engines.ranks import Ranks
from fastsched.engines.rollout.opening import open_rollout
from fastsched.loop.outcomes import Scorer
from fastsched.loop.rollouts import RolloutSource
from fastsched.record.log import RunLog


@pytest.fixture(scope="package")
def parts(random_model):
    cfg = Config(model=ModelConfig(name=str(random_model)), data=DataConfig(size=60, digits=(1,), max_prompt_tokens=64, eval_per_bin=4),
                 rollout=RolloutConfig(engine="transformers", responses=2, max_new_tokens=4), train=TrainConfig(prompts_per_step=4))
    tokenizer = load_tokenizer(random_model, cfg.model)
    train_set, heldout = load_prompts(cfg.data, tokenizer, seed=0)
    rollout = open_rollout(random_model, cfg.rollout, dtype="float32", seed=0, max_model_len=cfg.longest,
                           stop_token_ids=stop_token_ids(random_model, False))
    with RewardPool(cfg.reward, cfg.data.task) as pool:
        yield SimpleNamespace(cfg=cfg, tokenizer=tokenizer, train_set=train_set, heldout=heldout, rollout=rollout, pool=pool)
    rollout.close()


@pytest.fixture
def log(tmp_path):
    with RunLog(tmp_path, LogConfig(tensorboard=False), 1) as log:
        yield log


@pytest.fixture
def source(parts, log):
    cfg = parts.cfg
    scheduler = Scheduler(cfg.scheduler, parts.train_set.bins, cfg.train.prompts_per_step, cfg.train.steps, seed=0)
    return RolloutSource(cfg, parts.train_set, scheduler, parts.rollout, Scorer(parts.tokenizer, parts.pool, log), Ranks(), log)
