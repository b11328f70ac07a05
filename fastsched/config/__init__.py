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
from fastsched.config.samplers import DotsConfig, LearnedConfig, ReplayConfig, SpeedConfig, VcrlConfig
from fastsched.config.scheduler import (
    AdaRFTConfig,
    CoefficientConfig,
    GresoConfig,
    MoppsConfig,
    SchedulerConfig,
    SecConfig,
    TemporalConfig,
)

__all__ = [
    "AdaRFTConfig", "CoefficientConfig", "Config", "ConfigError", "DataConfig", "GresoConfig", "LearnerConfig", "LogConfig", "ModelConfig",
    "ModelShape", "MoppsConfig", "RewardConfig", "RolloutConfig", "SchedulerConfig", "SecConfig", "TemporalConfig", "TrainConfig",
    "DotsConfig", "LearnedConfig", "ReplayConfig", "SpeedConfig", "VcrlConfig",
    "default_cache_dir", "require",
]
