"""Success, and the bin weights that hold it inside the window (control_plane.md 3).

What is not known yet is None in the state and NaN in arrays. K difficulty bins.
"""

from dataclasses import dataclass, replace

import numpy as np

from fastsched.config import SchedulerConfig
from fastsched.control.smoothing import smooth
from fastsched.types import Outcomes


@dataclass(frozen=True)
class Success:
    """All that is known about success after `steps` observed steps; JSON-able as it stands."""

    steps: int
    last: float | None  # success of the last batch
    ema: float | None
    bins: tuple[float | None, ...]  # [K] p_b, EMA of success in the bin
    wins: tuple[float, ...]  # [K] a of the bin's Beta(a, b), prior 1
    losses: tuple[float, ...]  # [K] b
    tried: tuple[bool, ...]  # [K] rolled out at least once, whether or not scoring worked
    r_threshold: float
    graded: bool  # a reward other than 0 and 1 has been seen
    failed_scores: int

    @property
    def p(self) -> np.ndarray:
        """[K] float64 success by bin, NaN where nothing is known."""
        return np.array(self.bins, dtype=np.float64)

    @property
    def p_std(self) -> np.ndarray:
        """[K] float64 standard deviation of each bin's Beta posterior."""
        a, b = np.array(self.wins), np.array(self.losses)
        return np.sqrt(a * b / ((a + b) ** 2 * (a + b + 1)))


def unknown_success(bins: int, r_threshold: float) -> Success:
    ones = (1.0,) * bins
    return Success(0, None, None, (None,) * bins, ones, ones, (False,) * bins, r_threshold, False, 0)


def observe_success(state: Success, outcomes: Outcomes, cfg: SchedulerConfig) -> Success:
    """The state after one batch. Non-finite rewards of sampled responses are left out and counted; a bin changes only when it was scored.

    p_b is an EMA; the posterior forgets as a <- beta a + (1 - beta) + wins (algorithms.md 3, MoPPS, with prior 1).
    """
    rewards, size, beta = np.asarray(outcomes.rewards, dtype=np.float64), len(state.bins), cfg.success_beta
    finite = np.isfinite(rewards)
    good = finite & (rewards > state.r_threshold)
    wins = np.bincount(outcomes.bins, weights=good.sum(axis=1), minlength=size)
    scored = np.bincount(outcomes.bins, weights=finite.sum(axis=1), minlength=size)
    tried = np.array(state.tried) | (np.bincount(outcomes.bins, minlength=size) > 0)
    last = float(wins.sum() / scored.sum()) if scored.any() else None
    with np.errstate(invalid="ignore"):
        p = wins / scored  # NaN where nothing was scored: `smooth` then keeps the old value
    remember = lambda old, new: np.where(scored > 0, beta * np.array(old) + (1 - beta) + new, old)
    return replace(
        state,
        steps=state.steps + 1,
        last=last,
        ema=state.ema if last is None else smooth(state.ema, last, beta),
        bins=tuple(smooth(old, new, beta) for old, new in zip(state.bins, p, strict=True)),
        wins=tuple(remember(state.wins, wins).tolist()),
        losses=tuple(remember(state.losses, scored - wins).tolist()),
        tried=tuple(tried.tolist()),
        graded=state.graded or bool(np.any(finite & (rewards != 0) & (rewards != 1))),
        failed_scores=state.failed_scores + int((outcomes.sampled & ~finite).sum()),
    )


def move_threshold(state: Success, cfg: SchedulerConfig) -> Success:
    """Raise r_threshold while smoothed success is above the window, lower it below; 0/1 rewards never move it."""
    low, high = cfg.window
    if not state.graded or state.ema is None or low <= state.ema <= high:
        return state
    step = cfg.r_threshold_step if state.ema > high else -cfg.r_threshold_step
    return replace(state, r_threshold=float(np.clip(state.r_threshold + step, *cfg.r_threshold_range)))


def informativeness(p: np.ndarray, temperature: float) -> np.ndarray:
    """[K] base weights proportional to exp(4 p (1 - p) / T)."""
    weights = np.exp((4 * p * (1 - p) - 1) / temperature)
    return weights / weights.sum()


def inner_band(window: tuple[float, float]) -> tuple[float, float]:
    """The window shrunk by a quarter of its width on each side: the lag of p_b and sampling noise need the margin."""
    margin = (window[1] - window[0]) / 4
    return window[0] + margin, window[1] - margin


def tilt(base: np.ndarray, p: np.ndarray, band: tuple[float, float]) -> np.ndarray:
    """[K] the weights nearest to `base` in KL whose predicted success w.p lies in `band`.

    w proportional to base * exp(-eta p), with the eta that puts w.p on the nearer edge; where no eta can, all weight
    goes to the bins the tilt tends to. `base` is positive everywhere.
    """
    predicted = base @ p
    if band[0] <= predicted <= band[1]:
        return base
    sign, target = (1.0, band[1]) if predicted > band[1] else (-1.0, band[0])
    extreme = p.min() if sign > 0 else p.max()
    if sign * (extreme - target) >= 0:
        weights = np.where(p == extreme, base, 0.0)
        return weights / weights.sum()

    def tilted(eta: float) -> np.ndarray:
        log_weights = np.log(base) - sign * eta * p
        weights = np.exp(log_weights - log_weights.max())
        return weights / weights.sum()

    beyond = lambda eta: sign * (tilted(eta) @ p - target) <= 0
    near, far = 0.0, 1.0
    while not beyond(far) and far < 1e18:
        near, far = far, 2 * far
    for _ in range(60):
        middle = (near + far) / 2
        near, far = (near, middle) if beyond(middle) else (middle, far)
    return tilted(far)


def window_weights(success: Success, available: np.ndarray, cfg: SchedulerConfig) -> np.ndarray:
    """[K] float64 sampling weights: informativeness, tilted into the window, plus the floor; they sum to 1.

    available: [K] bool, bins that hold prompts; the others get 0, and K below counts only these.
    A bin never rolled out has no p_b: it gets its equal share 1/K outside the tilt until its first batch, so that it is
    tried within a few steps however small the batch. A bin that was tried but never scored lives on the floor alone, so
    a failing verifier cannot draw the batch to itself.
    """
    p, fresh = success.p, available & ~np.array(success.tried)
    known = available & np.isfinite(p)
    equal = available / available.sum()
    weights = equal
    if known.any():
        base = informativeness(p[known], cfg.informativeness_temperature)
        weights = np.where(fresh, equal, 0.0)
        weights[known] = (1 - weights.sum()) * tilt(base, p[known], inner_band(cfg.window))
    return (1 - cfg.weight_floor) * weights + cfg.weight_floor * equal


def in_window(success: float | None, window: tuple[float, float]) -> bool:
    return success is not None and window[0] <= success <= window[1]


def reachable(p: np.ndarray, window: tuple[float, float]) -> bool:
    """Whether some weights can hold the window: a known bin's success lies below `high` and one's above `low`."""
    return bool(np.any(p < window[1]) and np.any(p > window[0]))


def out_of_reach(p: np.ndarray, window: tuple[float, float]) -> str | None:
    """"mastered" or "too hard" when that holds of every bin, so that no weights can hold the window; else None.

    NaN, an unknown bin, may still be of use: then None.
    """
    if np.isnan(p).any() or reachable(p, window):
        return None
    return "mastered" if p.min() >= window[1] else "too hard"
