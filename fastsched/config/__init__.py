"""The configuration of a run: frozen dataclasses, validated at construction, no torch."""

from fastsched.config.checks import (
    BAD_INPUT,
    DONE,
    GUARD,
    INTERRUPTED,
    ConfigError,
    FeaturesMissing,
    default_cache_dir,
    require,
)
from fastsched.config.features import FeaturesConfig
from fastsched.config.learner import LearnerConfig
from fastsched.config.reward import RewardConfig, RewardPart
from fastsched.config.rollout import LOWEST_TEMPERATURE, RolloutConfig
from fastsched.config.run import (
    Config,
    DataConfig,
    LogConfig,
    ModelConfig,
    ModelShape,
    TrainConfig,
)
from fastsched.config.samplers import (
    SAMPLERS,
    AdsConfig,
    DotsConfig,
    LearnedConfig,
    MoppsConfig,
    ReplayConfig,
    SecConfig,
    SpeedConfig,
    VcrlConfig,
)
from fastsched.config.scheduler import CoefficientConfig, KlGateConfig, SchedulerConfig, TemporalConfig

__all__ = [
    "BAD_INPUT", "DONE", "GUARD", "INTERRUPTED", "LOWEST_TEMPERATURE", "SAMPLERS",
    "AdsConfig", "CoefficientConfig", "Config", "ConfigError", "DataConfig", "DotsConfig", "FeaturesConfig", "FeaturesMissing",
    "KlGateConfig", "LearnedConfig", "LearnerConfig", "LogConfig", "ModelConfig", "ModelShape", "MoppsConfig", "ReplayConfig",
    "RewardConfig", "RewardPart", "RolloutConfig", "SchedulerConfig", "SecConfig", "SpeedConfig", "TemporalConfig", "TrainConfig",
    "VcrlConfig", "default_cache_dir", "require",
]
