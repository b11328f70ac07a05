"""The scheduler: which prompts come next, and how strong every signal is. NumPy only, the same on every rank."""

import math
from dataclasses import asdict

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.coefficients import Coefficients, constant, rules, start_coefficients, targets
from fastsched.control.kl_gate import follow_quantile
from fastsched.control.reference_copy import Reference, copy_due, observe_reference
from fastsched.control.samplers.table import make_sampler
from fastsched.control.temporal import schedule_ends, temporal_s
from fastsched.control.window import (
    Success,
    in_window,
    move_threshold,
    observe_success,
    out_of_reach,
    reachable,
    unknown_success,
)
from fastsched.types import Features, Knobs, Outcomes, Selection, Stats

STATE_VERSION = 5
COEFFICIENT_RULES = {"rules": rules, "targets": targets, "constant": constant}


class Scheduler:
    """Call order of one step: `next_prompts()`, `knobs()`, training, `observe()`; then `report()` and `messages()`.

    Only `next_prompts` and `observe` change the state.
    """

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, prompts_per_step: int, total_steps: int, seed: int,
                 features: Features | None = None):
        """bins: [N] integers, the difficulty bin of every dataset row; K = max + 1.

        ConfigError for data that cannot be scheduled: no rows, fewer rows than a batch, negative bins, fixed weights
        that do not fit the bins, a temporal schedule shorter than a step.
        """
        bins = np.asarray(bins)
        require(bins.ndim == 1 and bins.size > 0 and bins.dtype.kind in "iu",
                f"scheduler: needs one integer difficulty bin for every row, got {bins.dtype} {bins.shape}")
        require(bins.min() >= 0, f"scheduler: row {bins.argmin()} has difficulty bin {bins.min()}; bins start at 0")
        require(len(bins) >= prompts_per_step, f"train.prompts_per_step: a batch of {prompts_per_step} distinct rows "
                                               f"from {len(bins)} rows; lower it or add data")
        if cfg.temporal.mode != "none":
            schedule_ends(total_steps, cfg.temporal)
        sizes = np.bincount(bins.astype(np.int64, copy=False))
        narrow = bins.astype(np.uint16 if len(sizes) <= 1 << 16 else np.uint32)
        self.cfg, self.prompts, self.total_steps, self.seed = cfg, prompts_per_step, total_steps, seed
        self.sizes = sizes
        self.success = unknown_success(len(sizes), cfg.r_threshold)
        self.coefficients = start_coefficients(cfg)
        self.kl_gate: float | None = None  # h0, unknown until the first observation
        self.reference = Reference()
        self.sampler = make_sampler(cfg, narrow, sizes, prompts_per_step, seed, features)
        self.said: list[str] = []
        self.waiting: list[str] = []

    def next_prompts(self, count: int | None = None) -> Selection:
        """P distinct rows for this step, or `count`; of kind `speed`, the candidates from which about so many groups will come."""
        return self.sampler.draw(self.prompts if count is None else count, self.success)

    def knobs(self) -> Knobs:
        """What holds for this step."""
        now = self.coefficients
        return Knobs(
            weights=tuple(self.sampler.weights.tolist()),
            r_threshold=self.success.r_threshold,
            entropy_coef=now.lambda_h if now.entropy_coef is None else now.entropy_coef,
            kl_coef=now.lambda_kl,
            ema_alpha=now.alpha_now,
            lr_scale=now.lr_scale,
            temporal_s=temporal_s(self.success.steps + 1, self.total_steps, self.cfg.temporal),
            rule="constant" if self.cfg.coefficients == "constant" else "+".join(now.fired) or "none",
            kl_gate=self.kl_gate,
            copy_reference=copy_due(self.reference, self.cfg),
        )

    def observe(self, outcomes: Outcomes, stats: Stats) -> None:
        """Take in one step. Failed scores and statistics that are not finite are counted and change nothing else."""
        self.sampler.observe(outcomes, self.success)
        self.success = move_threshold(observe_success(self.success, outcomes, self.cfg), self.cfg)
        self.coefficients = COEFFICIENT_RULES[self.cfg.coefficients](self.coefficients, stats, self.cfg)
        self.reference = observe_reference(self.reference, stats, self.cfg)
        if self.cfg.kl_gate.enabled:
            self.kl_gate = follow_quantile(self.kl_gate, stats.entropy_quantile)
        kind = out_of_reach(self.success.p[self.sizes > 0], self.cfg.window)
        if kind and kind not in self.said:
            self.said.append(kind)
            low, high = self.cfg.window
            self.waiting.append(f"scheduler, step {self.success.steps}: every difficulty bin is {kind}, no weights can "
                                f"hold success in [{low:.2f}, {high:.2f}]; going on")

    def messages(self) -> list[str]:
        """Lines for the log that were not handed out before; each kind is said once in a run."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def report(self) -> dict[str, float]:
        """The scheduler's columns of metrics.csv after `observe`; NaN is unknown.

        w_b are the weights that drew this step's batch, p_b the smoothed success and p_std_b its posterior deviation.
        """
        s, c = self.success, self.coefficients
        columns = {
            "success": s.last, "success_ema": s.ema, "in_window": float(in_window(s.ema, self.cfg.window)),
            "window_reachable": float(reachable(s.p, self.cfg.window)), "entropy_ema": c.entropy, "kl_ema": c.kl,
            "drift_ema": c.drift, "initial_entropy": c.initial_entropy, "nonfinite_observations": float(c.nonfinite),
            "failed_scores": float(s.failed_scores),
        }
        for name, values in (("w", self.sampler.weights), ("p", s.bins), ("p_std", s.p_std)):
            columns |= {f"{name}_{b}": value for b, value in enumerate(values)}
        return {key: math.nan if value is None else float(value) for key, value in columns.items()}

    def state_dict(self) -> dict:
        """Everything a resumed run needs; a JSON round trip keeps every bit."""
        return {
            "version": STATE_VERSION, "seed": self.seed,
            "rows": int(self.sizes.sum()), "bins": len(self.sizes), "bin_sizes": self.sizes.tolist(),
            "success": _listed(asdict(self.success)), "coefficients": _listed(asdict(self.coefficients)),
            "kl_gate": self.kl_gate, "reference": asdict(self.reference),
            "options": self._options(), "sampler": self.sampler.state_dict(), "said": list(self.said), "waiting": list(self.waiting),
        }

    def _options(self) -> dict:
        """JSON of the options that give the sampler's state its meaning, by name: a resumed run needs the same."""
        return {"scheduler.kind": self.cfg.kind, "scheduler.inside_bins": self.cfg.inside_bins, **self.sampler.fixed_options()}

    def load_state_dict(self, state: dict) -> None:
        """Go on exactly where `state` was taken; ConfigError when it belongs to another data set, seed or kind of sampler."""
        own = self.state_dict()
        names = {"version": "scheduler state version", "seed": "train.seed", "rows": "dataset size",
                 "bins": "number of difficulty bins", "bin_sizes": "prompts in each difficulty bin"}
        for key, name in names.items():
            require(state[key] == own[key], f"resume: {name} is {own[key]}, in the checkpoint {state[key]}; use the "
                                            "data and seed of the checkpoint")
        for key, value in own["options"].items():
            then = state["options"].get(key, "unknown")
            require(then == value, f"resume: {key} is {value}, and the sampler of the checkpoint had {then}, from whose state it cannot go "
                                   f"on; use that again, or start a new run")
        self.success = Success(**_tupled(state["success"]))
        self.coefficients = Coefficients(**_tupled(state["coefficients"]))
        self.kl_gate, self.reference = state["kl_gate"], Reference(**state["reference"])
        self.sampler.load_state_dict(state["sampler"])
        self.said, self.waiting = list(state["said"]), list(state["waiting"])


def _listed(state: dict) -> dict:
    return {key: list(value) if isinstance(value, tuple) else value for key, value in state.items()}


def _tupled(state: dict) -> dict:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in state.items()}
