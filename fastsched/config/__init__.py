"""The configuration of a run: frozen dataclasses, validated at construction, no torch."""

from fastsched.config.checks import ConfigError, default_cache_dir, require
from fastsched.config.run import (
    Config,
    DataConfig,
    LearnerConfig,
    LogConfig,
    ModelConfig,
    ModelShape,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from fastsched.config.scheduler import CoefficientConfig, SchedulerConfig, TemporalConfig

__all__ = [
    "CoefficientConfig", "Config", "ConfigError", "DataConfig", "LearnerConfig", "LogConfig", "ModelConfig", "ModelShape",
    "RewardConfig", "RolloutConfig", "SchedulerConfig", "TemporalConfig", "TrainConfig", "default_cache_dir", "require",
]
