"""The scheduler's part of the configuration: sampler, coefficients, averaging, temporal schedule."""

from dataclasses import dataclass, field
from typing import Literal, Optional

from fastsched.config.checks import require


@dataclass(frozen=True)
class CoefficientConfig:
    """A scheduled coefficient: starts at `start`, stays in [floor, ceiling]; floor = ceiling = start holds it constant."""
    start: float = 0.0
    floor: float = 0.0
    ceiling: float = 0.0

    def __post_init__(self):
        require(0 <= self.floor <= self.start <= self.ceiling,
                f"scheduler coefficient: need 0 <= floor <= start <= ceiling, got {self.floor}, {self.start}, {self.ceiling}")


@dataclass(frozen=True)
class TemporalConfig:
    """Trajectory-percentile schedule S(tau) of algorithms.md 1; `mode: none` trains every token."""
    mode: Literal["none", "linear"] = "none"
    magnitude: float = 0.99
    start: float = 0.0
    end: float = 0.8
    """Fractions of all steps between which S falls from `magnitude` to 0."""

    def __post_init__(self):
        require(0 <= self.start < self.end <= 1, "scheduler.temporal: need 0 <= start < end <= 1")
        require(0 <= self.magnitude <= 1, "scheduler.temporal.magnitude: must lie in [0, 1]")


@dataclass(frozen=True)
class SchedulerConfig:
    kind: Literal["adaptive", "fixed", "uniform"] = "adaptive"
    """Sampler: success window over difficulty bins, fixed bin weights, or uniform over prompts."""
    window: tuple[float, float] = (0.40, 0.60)
    """Band in which mean success is held."""
    success_beta: float = 0.9
    informativeness_temperature: float = 0.5
    weight_floor: float = 0.05
    """Share of the batch spread evenly over all bins, so that none is starved."""
    update_every: int = 1
    fixed_weights: Optional[tuple[float, ...]] = None
    """`fixed`: one weight for each bin; equal weights by default."""
    r_threshold: float = 0.5
    """A response counts as success when its reward exceeds this."""
    r_threshold_step: float = 0.0
    """Graded rewards: how far the threshold moves a step while success stays outside the window; 0 holds it."""
    r_threshold_range: tuple[float, float] = (0.0, 1.0)
    coefficients: Literal["rules", "constant"] = "rules"
    """The rule table of control_plane.md 4, or constants."""
    entropy: CoefficientConfig = field(default_factory=CoefficientConfig)
    kl: CoefficientConfig = field(default_factory=CoefficientConfig)
    statistics_beta: float = 0.9
    """EMA of entropy, KL and drift before any decision."""
    initial_entropy: Optional[float] = None
    """H_0; by default the mean entropy of the first five steps."""
    kl_high: float = 0.1
    drift_low: float = 1e-3
    drift_high: float = 2e-2
    dead_band: float = 0.05
    """Relative change of entropy and KL below which they count as unmoved."""
    average: CoefficientConfig = field(default_factory=lambda: CoefficientConfig(0.99, 0.9, 0.999))
    """EMA momentum alpha of the averaged policy, the KL reference."""
    lr_scale_floor: float = 0.1
    temporal: TemporalConfig = field(default_factory=TemporalConfig)

    def __post_init__(self):
        require(0 < self.window[0] < self.window[1] < 1, "scheduler.window: need 0 < low < high < 1")
        require(0 <= self.weight_floor <= 1, "scheduler.weight_floor: must lie in [0, 1]")
        require(self.update_every >= 1, "scheduler.update_every: must be at least 1")
        require(self.drift_low < self.drift_high, "scheduler: need drift_low < drift_high")
        require(0 <= self.success_beta < 1 and 0 <= self.statistics_beta < 1,
                "scheduler: success_beta and statistics_beta must lie in [0, 1)")
        require(self.informativeness_temperature > 0, "scheduler.informativeness_temperature: must be positive")
        low, high = self.r_threshold_range
        require(low <= self.r_threshold <= high, f"scheduler.r_threshold: must lie in its range [{low}, {high}]")
        require(self.r_threshold_step >= 0, "scheduler.r_threshold_step: must be at least 0")
        require(self.dead_band >= 0, "scheduler.dead_band: must be at least 0")
        require(self.average.ceiling <= 1, "scheduler.average.ceiling: must be at most 1")
        require(0 <= self.lr_scale_floor <= 1, "scheduler.lr_scale_floor: must lie in [0, 1]")
        weights = self.fixed_weights or (1.0,)
        require(min(weights) >= 0 and 0 < sum(weights) < float("inf"),
                "scheduler.fixed_weights: must be non-negative, finite, and not all 0")
