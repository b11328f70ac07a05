"""The samplers that have options of their own and a rollout or a memory beside them; `scheduler.kind` chooses one."""

from dataclasses import dataclass
from typing import Literal

from fastsched.config.checks import require


@dataclass(frozen=True)
class VcrlConfig:
    """Variance of the group's rewards and a memory bank, arXiv 2509.19803; the threshold and the bank's rules are ours."""
    kappa: float = 0.5
    """Group variance, divided by the largest possible, from which on a prompt enters the bank and below which it leaves it."""
    bank: int = 1024
    """Prompts in the bank; when it is full the one of least variance leaves, of equal ones the one visited longest ago."""
    bank_share: float = 0.5
    """Share of a batch drawn from the bank, highest variance first, of equal ones the one visited longest ago; the rest comes in order."""

    def __post_init__(self):
        require(0 < self.kappa <= 1, "scheduler.vcrl.kappa: must lie in (0, 1]")
        require(self.bank >= 1, "scheduler.vcrl.bank: must be at least 1")
        require(0 <= self.bank_share < 1, "scheduler.vcrl.bank_share: must lie in [0, 1), so that every prompt has its turn")


@dataclass(frozen=True)
class ReplayConfig:
    """Past prompts drawn again while smoothed success is outside the window."""
    share: float = 0.5
    """Share of a batch that is drawn from past prompts then."""
    memory: int = 4096
    """Past prompts remembered with their last success."""

    def __post_init__(self):
        require(0 <= self.share < 1, "scheduler.replay.share: must lie in [0, 1), so that every prompt has its turn")
        require(self.memory >= 1, "scheduler.replay.memory: must be at least 1")


@dataclass(frozen=True)
class SpeedConfig:
    """Screening, arXiv 2506.09016: only prompts that are neither solved nor unsolved by a few responses get the others."""
    screen: int = 4
    """N_init, responses of a candidate; the remaining rollout.responses - screen follow in the next step."""
    candidates: int = 4
    """At most so many candidates for each group that is wanted; with P = train.prompts_per_step and G = rollout.responses, one
    generation samples at most P (G - screen) + candidates P screen responses."""
    rounds: int = 4
    """Generations of one step at most, while no group is complete; the last one continues prompts that did not pass."""

    def __post_init__(self):
        require(min(self.screen, self.candidates) >= 1, "scheduler.speed: screen and candidates must be at least 1")
        require(self.rounds >= 2, "scheduler.speed.rounds: must be at least 2: the first step screens, then continues")


@dataclass(frozen=True)
class DotsConfig:
    """Predicted difficulty and rollout replay, arXiv 2506.05316; needs the embeddings that `fastsched cluster` computes."""
    reference: int = 256
    """Prompts rolled out last whose success predicts that of others."""
    refresh: int = 2
    """Steps between two looks at the references and two fits of the calibration."""
    pool: int = 16
    """Candidates for each prompt of a batch; never more than 1024, or twice the batch where that is more."""
    temperature: float = 1e-3
    """Of the softmax over candidates by distance of predicted success to 1/2."""
    replay: float = 0.5
    """Share of the trained groups that come from the replay buffer; 0 turns it off."""
    buffer: int = 512
    """Groups in the replay buffer; the oldest leave first."""
    max_age: int = 32
    """Weight versions after which a group leaves the buffer."""

    def __post_init__(self):
        require(min(self.reference, self.refresh, self.pool, self.buffer, self.max_age) >= 1,
                "scheduler.dots: reference, refresh, pool, buffer and max_age must be at least 1")
        require(self.temperature > 0, "scheduler.dots.temperature: must be positive")
        require(0 <= self.replay < 1, "scheduler.dots.replay: must lie in [0, 1): some of each batch has to be new")


@dataclass(frozen=True)
class LearnedConfig:
    """Contextual bandit (LinUCB) over groups of prompts; its reward is the progress of success for each token spent."""
    arms: Literal["bins", "clusters"] = "bins"
    """Difficulty bins, or the clusters that `fastsched cluster` computes."""
    exploration: float = 0.5
    """Weight of the standard deviation beside the predicted progress."""
    temperature: float = 0.5
    """Of the softmax over arms."""
    decay: float = 0.98
    """Forgetting of old rewards, each step that brings new ones."""

    def __post_init__(self):
        require(self.exploration >= 0 and self.temperature > 0, "scheduler.learned: exploration must be at least 0, temperature positive")
        require(0 < self.decay <= 1, "scheduler.learned.decay: must lie in (0, 1]")
