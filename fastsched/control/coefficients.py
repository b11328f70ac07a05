"""Entropy and KL coefficients, averaging momentum and step size (control_plane.md 4).

A rule is a pure function (state, stats, cfg) -> state: `rules`, `targets` or `constant`. The state holds the smoothed statistics,
the coefficients for the next step and the names of the rules that set them; JSON-able as it stands.
"""

import math
from dataclasses import dataclass, replace

from fastsched.config import CoefficientConfig, SchedulerConfig
from fastsched.control.smoothing import smooth
from fastsched.types import Stats

INITIAL_ENTROPY_STEPS = 5
DEAD_BAND = 0.05  # relative change of entropy and KL below which they count as unmoved
FACTOR = 1.1  # of one multiplicative move
ADDITIVE_SHARE = 0.01  # of the ceiling: one move of a coefficient whose floor is 0
KL_GAIN, KL_ERROR = 0.1, 0.2  # Ziegler's controller: gain, and bound of the relative error


@dataclass(frozen=True)
class Coefficients:
    steps: int  # observed steps; the averaging warm-up counts them
    entropy: float | None  # EMA, nats
    kl: float | None  # EMA, nats
    drift: float | None  # EMA
    initial_entropy: float | None  # H_0, nats, once known
    first_entropies: tuple[float, ...]  # until H_0 is known
    lambda_h: float
    lambda_kl: float
    alpha: float  # before warm-up
    lr_scale: float
    fired: tuple[str, ...]
    nonfinite: int  # statistics ignored because they were not finite
    entropy_coef: float | None = None  # what `targets` applies of lambda_h; None applies all of it

    @property
    def alpha_now(self) -> float:
        """alpha with bias-correcting warm-up, min(alpha, (1 + t) / (10 + t)); alpha 1, a frozen reference, stays 1."""
        return self.alpha if self.alpha == 1 else min(self.alpha, (1 + self.steps) / (10 + self.steps))


def start_coefficients(cfg: SchedulerConfig) -> Coefficients:
    return Coefficients(0, None, None, None, cfg.initial_entropy, (), cfg.entropy.start, cfg.kl.start,
                        cfg.average.start, 1.0, (), 0)


def constant(state: Coefficients, stats: Stats, cfg: SchedulerConfig) -> Coefficients:
    """Track the statistics and move nothing."""
    return _track(state, stats, cfg)


def rules(state: Coefficients, stats: Stats, cfg: SchedulerConfig) -> Coefficients:
    """The two-axis rule table: the first match on each axis moves its coefficients by one bounded step.

    An axis whose statistic was not finite this step moves nothing.
    """
    now = _track(state, stats, cfg)
    drift = _drift_rule(now, cfg) if math.isfinite(stats.drift) else None
    entropy = _entropy_rule(state, now, cfg) if math.isfinite(stats.entropy) else None
    now = _apply_drift(now, drift, cfg)
    now = _apply_entropy(now, entropy, drift == "high-drift", cfg)
    return replace(now, fired=tuple(rule for rule in (drift, entropy) if rule))


def targets(state: Coefficients, stats: Stats, cfg: SchedulerConfig) -> Coefficients:
    """algorithms.md 4.2 and 4.3, on the statistics of this step: lambda_KL *= 1 + 0.1 clip(KL / target - 1, -0.2, 0.2), and
    lambda_H up by a step below the entropy target, down above, applied only below. A statistic that is not finite moves nothing.
    """
    now, fired = _track(state, stats, cfg), []
    kl, entropy = float(stats.kl), float(stats.entropy)
    if math.isfinite(kl):
        error = min(max(kl / cfg.kl_target - 1, -KL_ERROR), KL_ERROR)
        now = replace(now, lambda_kl=min(max(now.lambda_kl * (1 + KL_GAIN * error), cfg.kl.floor), cfg.kl.ceiling))
        fired += ["kl-above-target" if error > 0 else "kl-below-target"] * (now.lambda_kl != state.lambda_kl)
    if math.isfinite(entropy):
        low = entropy < cfg.entropy_target
        moved = now.lambda_h + (cfg.entropy_step if low else -cfg.entropy_step)
        now = replace(now, lambda_h=min(max(moved, cfg.entropy.floor), cfg.entropy.ceiling))
        now = replace(now, entropy_coef=now.lambda_h if low else 0.0)
        fired += ["entropy-below-target"] * low
    return replace(now, fired=tuple(fired))


def _track(state: Coefficients, stats: Stats, cfg: SchedulerConfig) -> Coefficients:
    beta, initial, first = cfg.statistics_beta, state.initial_entropy, state.first_entropies
    if initial is None and math.isfinite(stats.entropy):
        first += (float(stats.entropy),)
        if len(first) == INITIAL_ENTROPY_STEPS:
            initial, first = sum(first) / len(first), ()
    of_tokens = [stats.entropy] + [stats.kl] * (stats.kl_kind != "none")
    measured = [stats.drift] + of_tokens * (stats.kept_fraction != 0)  # without a token in the loss there is nothing to measure
    return replace(
        state,
        steps=state.steps + 1,
        entropy=smooth(state.entropy, stats.entropy, beta),
        kl=smooth(state.kl, stats.kl, beta),
        drift=smooth(state.drift, stats.drift, beta),
        initial_entropy=initial,
        first_entropies=first,
        fired=(),
        nonfinite=state.nonfinite + sum(not math.isfinite(value) for value in measured),
    )


def _drift_rule(now: Coefficients, cfg: SchedulerConfig) -> str | None:
    if now.drift > cfg.drift_high:
        return "high-drift"
    return "low-drift" if now.drift < cfg.drift_low else None


def _entropy_rule(before: Coefficients, now: Coefficients, cfg: SchedulerConfig) -> str | None:
    """First match of the entropy axis; None while H_0 is unknown."""
    if now.initial_entropy is None:
        return None
    relative = now.entropy / now.initial_entropy if now.initial_entropy > 0 else math.inf
    high_kl = now.kl is not None and now.kl > cfg.kl_high
    if relative < 0.25:
        return "collapsed-high-kl" if high_kl else "collapsed"
    if _moved_together(before, now):
        return "moved-together"
    if relative < 0.5:
        return "low-entropy-high-kl" if high_kl else "low-entropy"
    return "recovered" if relative > 0.7 else None


def _moved_together(before: Coefficients, now: Coefficients) -> bool:
    """Whether smoothed H and D both rose or both fell, each by more than DEAD_BAND of its value one step ago."""
    if before.entropy is None or before.kl is None:
        return False
    change_h, change_d = now.entropy - before.entropy, now.kl - before.kl
    beyond = abs(change_h) > DEAD_BAND * abs(before.entropy) and abs(change_d) > DEAD_BAND * abs(before.kl)
    return beyond and (change_h > 0) == (change_d > 0)


def _apply_drift(now: Coefficients, rule: str | None, cfg: SchedulerConfig) -> Coefficients:
    """alpha moves through 1 - alpha, the weight of the newest policy: alpha goes up where that goes down."""
    newest = CoefficientConfig(1 - cfg.average.start, 1 - cfg.average.ceiling, 1 - cfg.average.floor)
    rate = CoefficientConfig(1.0, cfg.lr_scale_floor, 1.0)
    within = lambda alpha: min(max(alpha, cfg.average.floor), cfg.average.ceiling)
    if rule == "high-drift":
        return replace(now, lambda_kl=up(now.lambda_kl, cfg.kl), alpha=within(1 - down(1 - now.alpha, newest)),
                       lr_scale=down(now.lr_scale, rate))
    if rule == "low-drift":
        return replace(now, alpha=within(1 - towards_start(1 - now.alpha, newest)), lr_scale=up(now.lr_scale, rate))
    return now


def _apply_entropy(now: Coefficients, rule: str | None, high_drift: bool, cfg: SchedulerConfig) -> Coefficients:
    """lambda_KL belongs to the drift axis while drift is high."""
    lambda_h, lambda_kl = now.lambda_h, now.lambda_kl
    if rule in ("collapsed", "collapsed-high-kl", "low-entropy", "low-entropy-high-kl"):
        lambda_h = up(lambda_h, cfg.entropy)
    if rule in ("collapsed-high-kl", "low-entropy-high-kl"):
        lambda_kl = down(lambda_kl, cfg.kl)
    if rule == "recovered":
        lambda_h, lambda_kl = towards_start(lambda_h, cfg.entropy), towards_start(lambda_kl, cfg.kl)
    return replace(now, lambda_h=lambda_h, lambda_kl=now.lambda_kl if high_drift else lambda_kl)


def up(value: float, bounds: CoefficientConfig) -> float:
    """One step up, at most to the ceiling: times 1.1, or plus 1 % of the ceiling where the floor is 0 (0 is a trap)."""
    raised = value + ADDITIVE_SHARE * bounds.ceiling if bounds.floor == 0 else value * FACTOR
    return min(raised, bounds.ceiling)


def down(value: float, bounds: CoefficientConfig) -> float:
    """One step down, the reverse of `up`; at least the floor."""
    lowered = value - ADDITIVE_SHARE * bounds.ceiling if bounds.floor == 0 else value / FACTOR
    return max(lowered, bounds.floor)


def towards_start(value: float, bounds: CoefficientConfig) -> float:
    """One step up or down towards `start`, never past it."""
    if value > bounds.start:
        return max(down(value, bounds), bounds.start)
    return min(up(value, bounds), bounds.start)
