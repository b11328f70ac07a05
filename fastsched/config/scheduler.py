"""The scheduler's part of the configuration: sampler, coefficients, averaging, temporal schedule."""

from dataclasses import dataclass, field
from typing import Literal

from fastsched.config.checks import require
from fastsched.config.samplers import (
    SAMPLERS,
    AdsConfig,
    DotsConfig,
    LearnedConfig,
    MoppsConfig,
    ReplayConfig,
    SecConfig,
    SpeedConfig,
    Traits,
    VcrlConfig,
)


@dataclass(frozen=True)
class CoefficientConfig:
    """A scheduled coefficient: starts at `start`, stays in [floor, ceiling]; floor = ceiling = start holds it constant."""
    start: float = 0.0
    floor: float = 0.0
    ceiling: float = 0.0

    def is_zero(self, constant: bool) -> bool:
        """It is 0 in every step; `constant`: nothing moves it."""
        return self.start == 0 and (constant or self.ceiling == 0)

    def __post_init__(self):
        require(0 <= self.floor <= self.start <= self.ceiling,
                f"scheduler coefficient: need 0 <= floor <= start <= ceiling, got {self.floor}, {self.start}, {self.ceiling}")


@dataclass(frozen=True)
class TemporalConfig:
    """Temporal schedule S(tau) of algorithms.md 1 (TP-Schedule, arXiv 2605.25381); `mode: none` trains every token."""
    mode: Literal["none", "linear", "gamma", "sigmoid"] = "none"
    proxy: Literal["suffix", "prefix", "entropy", "random", "tp_score", "advantage"] = "suffix"
    """Which share 1 - S of a response carries the loss: its end, its beginning, its tokens of highest entropy (one more pass
    over the batch), any, or the tokens that usually occur late (TP-Score of at least S). `advantage` masks nothing: it adds
    S min(0.4 H_t, |A| / 2) to the advantage (arXiv 2506.14758, scheduled; one more pass over the batch)."""
    magnitude: float = 0.99
    gamma: float = 2.0
    """Exponent of mode `gamma`."""
    start: float = 0.0
    end: float = 0.8
    """Fractions of all steps between which S falls from `magnitude` to 0."""

    def __post_init__(self):
        require(0 <= self.start < self.end <= 1, "scheduler.temporal: need 0 <= start < end <= 1")
        require(self.mode != "none" or self.proxy == "suffix",
                f"scheduler.temporal.proxy: {self.proxy} has no effect with scheduler.temporal.mode none; set linear, gamma or sigmoid")
        require(0 <= self.magnitude <= 1, "scheduler.temporal.magnitude: must lie in [0, 1]")
        require(self.gamma > 0, "scheduler.temporal.gamma: must be positive")


@dataclass(frozen=True)
class KlGateConfig:
    """Token-level KL gate (control_plane.md 5): beta_t = lambda_KL sigmoid((h0 - H_t) / width), H_t the token's entropy;
    KL holds a token only where the policy has become certain. One more pass over the batch."""
    enabled: bool = False
    quantile: float = 0.2
    """h0 follows this quantile of token entropy."""
    width: float = 0.1
    """Nats over which the gate opens."""

    def __post_init__(self):
        require(0 < self.quantile < 1 and self.width > 0, "scheduler.kl_gate: quantile must lie in (0, 1), width must be positive")


@dataclass(frozen=True)
class SchedulerConfig:
    kind: Literal[tuple(SAMPLERS)] = "adaptive"
    """Sampler: success window over difficulty bins, fixed bin weights, uniform over prompts, past prompts replayed outside the window
    (`replay`), a bandit on learning progress (`learned`), or one of the literature."""
    window: tuple[float, float] = (0.40, 0.60)
    """Band in which mean success is held."""
    success_beta: float = 0.9
    informativeness_temperature: float = 0.5
    weight_floor: float = 0.05
    """Share of the batch spread evenly over all bins, so that none is starved."""
    update_every: int = 1
    """`adaptive`, `sec`, `adarft`, `learned`: steps between two changes of the weights of bins or clusters."""
    refills: int = 0
    """Dynamic sampling (DAPO, arXiv 2503.14476): how often a step may draw a further batch of prompts while too few groups have two
    different rewards. Every prompt rolled out is observed."""
    fixed_weights: tuple[float, ...] | None = None
    """`fixed`: one weight for each bin; equal weights by default. Kept as given: `weight_floor` does not act, and 0 leaves a bin out."""
    inside_bins: Literal["order", "posterior"] = "order"
    """`adaptive`, `fixed`, `uniform`, `sec`, `adarft`: which prompts of a bin come next, all of them in shuffled order, or those whose
    posterior success is near one half (MoPPS, options under `mopps`; 8 bytes a prompt)."""
    r_threshold: float = 0.5
    """A response counts as success when its reward exceeds this."""
    r_threshold_step: float = 0.0
    """Graded rewards: how far the threshold moves a step while success stays outside the window; 0 holds it."""
    r_threshold_range: tuple[float, float] = (0.0, 1.0)
    coefficients: Literal["rules", "targets", "constant"] = "rules"
    """Entropy and KL coefficients: the rule table of control_plane.md 4; one controller for each target below; or constants."""
    kl_target: float = 0.01
    """`targets`: KL that Ziegler's proportional controller (arXiv 1909.08593) steers lambda_KL to."""
    entropy_target: float = 0.2
    """`targets`: entropy below which Skywork-OR1's rule (arXiv 2505.22312) applies lambda_H."""
    entropy_step: float = 1e-4
    """`targets`: how far lambda_H moves a step."""
    entropy: CoefficientConfig = field(default_factory=CoefficientConfig)
    kl: CoefficientConfig = field(default_factory=CoefficientConfig)
    kl_gate: KlGateConfig = field(default_factory=KlGateConfig)
    copy_every: int = 0
    """`learner.reference copy`: steps after which the reference becomes the policy again; 0 never."""
    copy_kl: float | None = None
    """`learner.reference copy`: renew it as soon as the moving average of the KL to it exceeds this."""
    statistics_beta: float = 0.9
    """EMA of entropy, KL and drift before any decision."""
    initial_entropy: float | None = None
    """H_0; by default the mean entropy of the first five steps."""
    kl_high: float = 0.1
    drift_low: float = 1e-3
    drift_high: float = 2e-2
    average: CoefficientConfig = field(default_factory=lambda: CoefficientConfig(0.99, 0.9, 0.999))
    """EMA momentum alpha of the averaged policy, the KL reference."""
    lr_scale_floor: float = 0.1
    sec: SecConfig = field(default_factory=SecConfig)
    mopps: MoppsConfig = field(default_factory=MoppsConfig)
    ads: AdsConfig = field(default_factory=AdsConfig)
    vcrl: VcrlConfig = field(default_factory=VcrlConfig)
    replay: ReplayConfig = field(default_factory=ReplayConfig)
    speed: SpeedConfig = field(default_factory=SpeedConfig)
    dots: DotsConfig = field(default_factory=DotsConfig)
    learned: LearnedConfig = field(default_factory=LearnedConfig)
    temporal: TemporalConfig = field(default_factory=TemporalConfig)

    @property
    def traits(self) -> Traits:
        """What the chosen sampler needs and can."""
        return SAMPLERS[self.kind]

    @property
    def renews_copy(self) -> bool:
        """A hard-copied reference becomes the policy again at some point."""
        return self.copy_every > 0 or self.copy_kl is not None

    def __post_init__(self):
        require(0 < self.window[0] < self.window[1] < 1, "scheduler.window: need 0 < low < high < 1")
        require(0 <= self.weight_floor <= 1, "scheduler.weight_floor: must lie in [0, 1]")
        require(self.refills >= 0, "scheduler.refills: must be at least 0")
        require(self.refills == 0 or not self.traits.replays,
                f"scheduler.refills: scheduler.kind={self.kind} fills its batches from a buffer of its own; set refills to 0")
        require(self.copy_every >= 0 and (self.copy_kl is None or self.copy_kl > 0),
                "scheduler: copy_every must be at least 0, copy_kl positive")
        require(self.inside_bins == "order" or self.traits.draws_from_bins,
                f"scheduler.inside_bins: scheduler.kind={self.kind} does not draw from difficulty bins; leave it at order")
        require(self.update_every >= 1, "scheduler.update_every: must be at least 1")
        require(self.update_every == 1 or self.traits.weights_move,
                f"scheduler.update_every: scheduler.kind={self.kind} has no weights that move; leave it at 1")
        require(self.drift_low < self.drift_high, "scheduler: need drift_low < drift_high")
        require(0 <= self.success_beta < 1 and 0 <= self.statistics_beta < 1,
                "scheduler: success_beta and statistics_beta must lie in [0, 1)")
        require(self.informativeness_temperature > 0, "scheduler.informativeness_temperature: must be positive")
        low, high = self.r_threshold_range
        require(low <= self.r_threshold <= high, f"scheduler.r_threshold: must lie in its range [{low}, {high}]")
        require(self.r_threshold_step >= 0, "scheduler.r_threshold_step: must be at least 0")
        require(self.kl_target > 0, "scheduler.kl_target: must be positive")
        require(self.entropy_target >= 0 and self.entropy_step >= 0, "scheduler: entropy_target and entropy_step must be at least 0")
        require(self.coefficients != "targets" or self.kl.start > 0 or self.kl.ceiling == 0,
                "scheduler.kl.start: `targets` multiplies lambda_KL, which from 0 never rises; set it above 0, or the ceiling to 0")
        require(self.fixed_weights is None or self.traits.takes_weights,
                f"scheduler.fixed_weights: scheduler.kind={self.kind} takes no weights; choose fixed, or leave them out")
        require(self.average.ceiling <= 1, "scheduler.average.ceiling: must be at most 1")
        require(0 <= self.lr_scale_floor <= 1, "scheduler.lr_scale_floor: must lie in [0, 1]")
        weights = self.fixed_weights or (1.0,)
        require(min(weights) >= 0 and 0 < sum(weights) < float("inf"),
                "scheduler.fixed_weights: must be non-negative, finite, and not all 0")
