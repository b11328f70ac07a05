"""The configuration of a run: frozen dataclasses, validated at construction, no torch."""

from fastsched.config.checks import ConfigError, default_cache_dir, require
from fastsched.config.learner import LearnerConfig
from fastsched.config.run import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ModelShape,
    RewardConfig,
    RolloutConfig,
    TrainConfig,
)
from fastsched.config.scheduler import (
    AdaRFTConfig,
    CoefficientConfig,
    GresoConfig,
    KlGateConfig,
    MoppsConfig,
    SchedulerConfig,
    SecConfig,
    TemporalConfig,
)

__all__ = [
    "AdaRFTConfig", "CoefficientConfig", "Config", "ConfigError", "DataConfig", "GresoConfig", "KlGateConfig", "LearnerConfig", "LogConfig",
    "ModelConfig",
    "ModelShape", "MoppsConfig", "RewardConfig", "RolloutConfig", "SchedulerConfig", "SecConfig", "TemporalConfig", "TrainConfig",
    "default_cache_dir", "require",
]
