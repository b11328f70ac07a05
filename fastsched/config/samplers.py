"""The samplers that `scheduler.kind` chooses from: the options of those that have any, and what each needs and can (SAMPLERS)."""

from dataclasses import dataclass
from typing import Any, Callable, Literal

from fastsched.config.checks import require


@dataclass(frozen=True)
class SecConfig:
    """Self-evolving curriculum, arXiv 2505.14970."""
    temperature: float = 1.0
    """Of the softmax over bins; published: 0.2 to 1."""

    def __post_init__(self):
        require(self.temperature > 0, "scheduler.sec.temperature: must be positive")


@dataclass(frozen=True)
class MoppsConfig:
    """Posterior of every prompt's success, arXiv 2507.04632."""
    decay: float = 1.0
    """Forgetting of old outcomes; 1 never forgets."""
    pool: int = 8
    """Candidates for each prompt of a batch."""

    def __post_init__(self):
        require(0 < self.decay <= 1 and self.pool >= 1, "scheduler.mopps: decay must lie in (0, 1], pool must be at least 1")


@dataclass(frozen=True)
class AdsConfig:
    """Clusters by success, prompts inside a cluster by nearness to one half, arXiv 2606.22305; needs `fastsched cluster`."""
    clusters: int = 4
    """Clusters drawn for a batch; train.prompts_per_step is `clusters` times `size`."""
    size: int = 32
    """Prompts of a cluster's mini-cluster, the window on its prompts in order of difficulty."""
    alpha: float = 0.3
    """How fast the weights of the clusters follow their success."""
    band: tuple[float, float] = (0.33, 0.67)
    """Success, ends included, at which a prompt stays; below it an easier one takes its place, above it a harder one."""
    reset: bool = True
    """Back to the easiest prompts and equal weights after as many steps as the data has batches."""

    def __post_init__(self):
        require(min(self.clusters, self.size) >= 1, "scheduler.ads: clusters and size must be positive")
        require(0 <= self.alpha <= 1, "scheduler.ads.alpha: must lie in [0, 1]")
        require(0 <= self.band[0] <= self.band[1] <= 1, "scheduler.ads.band: need 0 <= low <= high <= 1")


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

    def __post_init__(self):
        require(min(self.screen, self.candidates) >= 1, "scheduler.speed: screen and candidates must be at least 1")


@dataclass(frozen=True)
class DotsConfig:
    """Predicted difficulty and rollout replay, arXiv 2506.05316; needs the embeddings that `fastsched cluster` computes."""
    pool: int = 16
    """Candidates for each prompt of a batch; never more than 1024, or twice the batch where that is more."""
    replay: float = 0.5
    """Share of the trained groups that come from the replay buffer; 0 turns it off."""
    buffer: int = 512
    """Groups in the replay buffer; the oldest leave first."""
    max_age: int = 32
    """Weight versions after which a group leaves the buffer."""

    def __post_init__(self):
        require(min(self.pool, self.buffer, self.max_age) >= 1, "scheduler.dots: pool, buffer and max_age must be at least 1")
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


Check = tuple[Callable[[Any], bool], Callable[[Any], str]]
"""(holds, message) over the whole Config."""


@dataclass(frozen=True)
class Traits:
    """What a sampler needs of the rest of a run and what may stand beside it; nothing but its class and this knows its kind."""
    batch: Literal["plain", "screened", "replayed"] = "plain"
    """How a step's groups come about (loop/batches.py): all new; completed after a screen, options `speed`; partly kept from earlier
    steps, options `dots`."""
    ahead: bool = True
    """The next batch may be drawn before this one is observed (`rollout.ahead`)."""
    draws_from_bins: bool = False
    """It weighs difficulty bins, so that `scheduler.inside_bins` says which prompts of a bin come."""
    weights_move: bool = False
    """Its weights of bins or clusters follow what it observes, every `scheduler.update_every` steps."""
    takes_weights: bool = False
    """It keeps `scheduler.fixed_weights`."""
    features: Callable[[Any], str | None] = lambda cfg: None
    """SchedulerConfig -> the setting that makes it need what `fastsched cluster` computes; None: it needs nothing."""
    buffer: Callable[[Any, int], int] = lambda cfg, prompts: 0
    """(SchedulerConfig, P) -> groups that wait or are kept from step to step (loop/buffers.py)."""
    checks: tuple[Check, ...] = ()
    """What must hold across sections of a configuration that chooses it."""

    @property
    def replays(self) -> bool:
        """It fills its batches from a buffer, and so trains responses of earlier weights."""
        return self.batch != "plain"


ADS_CHECKS: tuple[Check, ...] = (
    (lambda c: c.train.prompts_per_step == c.scheduler.ads.clusters * c.scheduler.ads.size,
     lambda c: f"train.prompts_per_step: {c.train.prompts_per_step}, but scheduler.ads draws {c.scheduler.ads.clusters} clusters of "
               f"{c.scheduler.ads.size} prompts; set it to {c.scheduler.ads.clusters * c.scheduler.ads.size}, or change "
               "scheduler.ads.clusters or scheduler.ads.size"),
)
SPEED_CHECKS: tuple[Check, ...] = (
    (lambda c: c.scheduler.speed.screen < c.rollout.responses,
     lambda c: f"scheduler.speed.screen: {c.scheduler.speed.screen} of rollout.responses {c.rollout.responses} leave nothing to continue; "
               "lower it"),
)

SAMPLERS: dict[str, Traits] = {
    "adaptive": Traits(draws_from_bins=True, weights_move=True),
    "fixed": Traits(draws_from_bins=True, takes_weights=True),
    "uniform": Traits(draws_from_bins=True),
    "sec": Traits(draws_from_bins=True, weights_move=True),
    "adarft": Traits(draws_from_bins=True, weights_move=True),
    "mopps": Traits(),
    "greso": Traits(),
    "ads": Traits(ahead=False, features=lambda cfg: "scheduler.kind ads", checks=ADS_CHECKS),
    "vcrl": Traits(),
    "replay": Traits(),
    # a step adds at most `candidates` times P screened groups to at most P left over
    "speed": Traits("screened", ahead=False, buffer=lambda cfg, prompts: (cfg.speed.candidates + 1) * prompts, checks=SPEED_CHECKS),
    "dots": Traits("replayed", ahead=False, features=lambda cfg: "scheduler.kind dots", buffer=lambda cfg, prompts: cfg.dots.buffer),
    "learned": Traits(weights_move=True,
                      features=lambda cfg: "scheduler.learned.arms clusters" if cfg.learned.arms == "clusters" else None),
}
"""One line a sampler; its class stands under the same name in control/samplers/table.py."""
