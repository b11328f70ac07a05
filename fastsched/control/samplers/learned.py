"""A learned scheduler: a contextual bandit over groups of prompts whose reward is learning progress for each token spent.

LinUCB (Li et al., arXiv 1003.0146) with one linear model for all arms and forgetting. A arms (difficulty bins or clusters), d
features of an arm. When an arm is scored again, the change of its smoothed success since its last visit, divided by the tokens spent
on it since then, is the reward of the context it had at that visit. State: O(A d), nothing a prompt beside the deck's.
"""

import zlib

import numpy as np

from fastsched.config import SchedulerConfig, require
from fastsched.control.samplers.deck import apportion
from fastsched.control.samplers.prompts import PromptSampler, one_part
from fastsched.control.smoothing import smooth
from fastsched.control.window import Success
from fastsched.groups import successes
from fastsched.types import Features, Outcomes, Selection

FEATURES = ("constant", "p", "4p(1-p)", "recency", "length", "trend", "difficulty")
RIDGE = 1.0
CLIP = 3.0  # of a reward, in units of the mean size of rewards
RECENT = 10.0  # steps without a visit at which the recency feature is 1/2
TREND_BETA = 0.8
ARM_STATE = ("p", "length", "trend", "tokens", "visit")


def arms_of(cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray,
            features: Features | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """([N] unsigned arm of each row, [A] rows of each arm, [A] difficulty rank of each arm in [0, 1])."""
    if cfg.learned.arms == "bins":
        return bins, sizes, np.linspace(0, 1, len(sizes))
    require(features is not None, "scheduler.learned.arms: clusters come from `fastsched cluster`; run it with this configuration first, "
                                  "or set arms to bins")
    require(len(features.cluster) == len(bins), f"scheduler.learned.arms: clusters of {len(features.cluster)} prompts, the data has "
                                                f"{len(bins)}; run `fastsched cluster` again")
    counts = np.bincount(features.cluster)
    arms = np.asarray(features.cluster).astype(np.uint16 if len(counts) <= 1 << 16 else np.uint32)
    mean = np.bincount(arms, weights=features.difficulty) / np.maximum(counts, 1)
    rank = np.argsort(np.argsort(mean, kind="stable"), kind="stable")
    return arms, counts, rank / max(len(counts) - 1, 1)


class ProgressSampler(PromptSampler):
    """Arms by softmax of their upper confidence bound, with the floor of `weight_floor`; inside an arm in deck order."""

    def __init__(self, cfg: SchedulerConfig, bins: np.ndarray, sizes: np.ndarray, prompts: int, seed: int,
                 features: Features | None = None):
        arms, self.members, self.difficulty = arms_of(cfg, bins, sizes, features)
        self.checksum = zlib.crc32(np.ascontiguousarray(arms).tobytes())  # of the arm of every row
        super().__init__(cfg, bins, sizes, prompts, seed, features, parts=(arms, self.members))
        arms, width = len(self.members), len(FEATURES)
        self.p, self.length = np.full(arms, np.nan), np.full(arms, np.nan)  # smoothed success and response length, NaN unknown
        self.trend, self.tokens, self.visit = np.zeros(arms), np.zeros(arms), np.zeros(arms)
        self.context = np.zeros((arms, width))  # of the last visit
        self.gram, self.moment = np.zeros((width, width)), np.zeros(width)  # sums of x x^T and of reward x
        self.scale: float | None = None  # mean size of a reward
        self.arm_weights = (self.members > 0) / np.count_nonzero(self.members)

    def draw(self, count: int, success: Success) -> Selection:
        if success.steps % self.cfg.update_every == 0:
            self.arm_weights = self._weigh(success.steps)
        counts = apportion(self.arm_weights, count, self.members, self.rng.random())
        return self.selection(self.deck.draw_others(counts, self.drawn))

    def notes(self) -> list[str]:
        return one_part("scheduler.kind learned", self.members)

    def fixed_options(self) -> dict:
        return {"scheduler.learned.arms": self.cfg.learned.arms, "checksum of the bin or cluster of every prompt": self.checksum}

    def features(self, step: int) -> np.ndarray:
        """[A, d] context of every arm; an arm never scored counts as p = 1/2 and of mean length."""
        p = np.where(np.isnan(self.p), 0.5, self.p)
        known = self.length[~np.isnan(self.length)]
        typical = known.mean() if len(known) else 1.0
        length = np.where(np.isnan(self.length), typical, self.length)
        since = step - self.visit
        return np.stack([np.ones_like(p), p, 4 * p * (1 - p), since / (since + RECENT), length / (length + typical),
                         self.trend / CLIP, self.difficulty], axis=1)

    def bounds(self, step: int) -> np.ndarray:
        """[A] x.theta + exploration sqrt(x^T M^-1 x), M = sum x x^T + RIDGE; an arm never scored has the largest of all."""
        x, inverse = self.features(step), np.linalg.inv(self.gram + RIDGE * np.eye(len(self.moment)))
        bound = x @ (inverse @ self.moment) + self.cfg.learned.exploration * np.sqrt(np.einsum("ad,de,ae->a", x, inverse, x))
        return np.where(np.isnan(self.p), bound.max(), bound)

    def _weigh(self, step: int) -> np.ndarray:
        held, floor = self.members > 0, self.cfg.weight_floor
        scores = np.where(held, self.bounds(step) / self.cfg.learned.temperature, -np.inf)
        weights = np.exp(scores - scores.max())
        return (1 - floor) * weights / weights.sum() + floor * held / held.sum()

    def learn(self, outcomes: Outcomes, success: Success) -> None:
        """Arms without a score spend their tokens and learn nothing."""
        arm, size, beta = self.deck.bins[outcomes.rows], len(self.members), self.cfg.success_beta
        total = lambda values: np.bincount(arm, weights=values, minlength=size)
        good, scored = (total(values) for values in successes(outcomes.rewards, success.r_threshold))
        tokens, sampled = total(outcomes.lengths.sum(1)), total(outcomes.sampled.sum(1))
        seen = np.flatnonzero(scored)
        p, length = good[seen] / scored[seen], tokens[seen] / sampled[seen]
        before, context = self.p[seen], self.features(success.steps)[seen]
        smoothed = lambda old, new: np.where(np.isnan(old), new, beta * old + (1 - beta) * new)
        self.p[seen], self.length[seen] = smoothed(before, p), smoothed(self.length[seen], length)
        self._regress(seen[~np.isnan(before)], before[~np.isnan(before)])
        self.tokens[seen] = 0.0
        self.tokens += tokens
        self.visit[seen], self.context[seen] = success.steps + 1, context

    def _regress(self, arms: np.ndarray, before: np.ndarray) -> None:
        """One discounted least-squares update from arms [M] visited again, whose smoothed success was `before` [M]."""
        progress, decay = (self.p[arms] - before) / self.tokens[arms], self.cfg.learned.decay
        if not progress.any():
            return
        self.scale = smooth(self.scale, float(np.abs(progress).mean()), decay)
        reward, x = np.clip(progress / self.scale, -CLIP, CLIP), self.context[arms]
        self.gram = decay * self.gram + x.T @ x
        self.moment = decay * self.moment + reward @ x
        self.trend[arms] = TREND_BETA * self.trend[arms] + (1 - TREND_BETA) * reward

    def own_state(self) -> dict:
        arms = {name: [None if np.isnan(v) else v for v in getattr(self, name).tolist()] for name in ARM_STATE}
        return {**arms, "context": self.context.tolist(), "gram": self.gram.tolist(), "moment": self.moment.tolist(), "scale": self.scale,
                "arm_weights": self.arm_weights.tolist()}

    def load_own_state(self, state: dict) -> None:
        for name in (*ARM_STATE, "context", "gram", "moment", "arm_weights"):
            setattr(self, name, np.array(state[name], dtype=np.float64))
        self.scale = state["scale"]
