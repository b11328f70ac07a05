"""What travels between the rooms: frozen data, NumPy only.

P prompts, G responses a prompt, L tokens of one response, K difficulty bins.
"""

import math
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Mapping, NamedTuple, Optional, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


class EngineError(RuntimeError):
    """A call into a sampler failed: which one, and why. Exit code 3."""


class StartError(EngineError):
    """A sampler could not be started: which key decides about it, and why. Exit code 3."""


class Disagreement(RuntimeError):
    """The ranks did not decide the same step. Exit code 3."""


SAMPLER_ERRORS = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError, ArithmeticError, MemoryError, OSError)
"""What a sampler may raise that becomes an EngineError with the name of the call."""


class Ranks(Protocol):
    """The ranks of a run and their collectives; `engines.ranks` has them."""

    rank: int
    world_size: int

    def mine(self, count: int) -> range: ...
    def all_reduce(self, values: np.ndarray, op: str = "sum") -> np.ndarray: ...
    def all_gather(self, value: object) -> list: ...
    def agree(self, decided: Mapping[str, object], what: str) -> None: ...
    def barrier(self) -> None: ...


@dataclass(frozen=True)
class Prompt:
    """One dataset row. `row` is the group identity: two rows with the same text are two groups."""

    row: int
    token_ids: tuple[int, ...]
    text: str  # as shown in sample tables
    answer: str
    bin: int
    meta: Mapping[str, Any] = field(default_factory=dict)  # what the task's own verifier needs
    prefill: str = ""  # what the answer begins with, the end of `token_ids`


@dataclass(frozen=True)
class Features:
    """What the base policy says of every training row, computed once by `fastsched cluster`; arrays may be memory-mapped."""

    cluster: np.ndarray  # [N] int32 cluster of the prompt, 0..C-1, clusters may be empty
    difficulty: np.ndarray  # [N] float32 mean negative log-likelihood of the reference answer's tokens, nats
    embedding: np.ndarray  # [N, D] float16, the prompt's projected hidden states, unit length


@dataclass(frozen=True)
class Selection:
    """The prompts of one step, decided by the scheduler, the same on every rank."""

    rows: np.ndarray  # [P] int64 dataset rows
    bins: np.ndarray  # [P] int64 difficulty bin of each row
    responses: Optional[np.ndarray] = None  # [P] int64 responses of each prompt; None: G of every prompt


@dataclass(frozen=True)
class Response:
    """One sampled response, tokens as sampled: never decoded and encoded again."""

    row: int
    prompt_ids: tuple[int, ...]
    token_ids: tuple[int, ...]  # [L], the end token included when it was sampled
    logp: np.ndarray  # [L] float32, the sampler's log-probability of each token
    finish_reason: str  # "stop" | "length"
    weight_version: int


@dataclass(frozen=True)
class Outcomes:
    """What came of every prompt that was rolled out, gathered over all ranks, before any group is dropped.

    G is the largest number of responses; where a prompt got fewer, lengths are 0 and rewards NaN.
    """

    rows: np.ndarray  # [P] int64
    bins: np.ndarray  # [P] int64
    rewards: np.ndarray  # [P, G] float64; NaN where scoring failed
    lengths: np.ndarray  # [P, G] int64 response tokens
    truncated: np.ndarray  # [P, G] bool, stopped by the length limit
    continued: Optional[np.ndarray] = None  # [P] bool, further responses of a prompt counted before (SPEED); None: none
    unreadable: Optional[np.ndarray] = None  # [P, G] bool, scored 0 because nothing could be read out of them; None: none
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)  # [P, G] float64 by name, where several rewards were added up

    @property
    def sampled(self) -> np.ndarray:
        """[P, G] bool: there is such a response."""
        return self.lengths > 0

    @property
    def new_prompts(self) -> int:
        """Prompts rolled out, those that were only continued left out."""
        return len(self.rows) - (0 if self.continued is None else int(self.continued.sum()))


@dataclass(frozen=True)
class Stats:
    """What the learner measured in one step, reduced over all ranks. NaN: not measured or not finite."""

    loss: float
    entropy: float  # mean over kept response tokens, nats
    kl: float  # mean over kept response tokens to the reference (average, copy or teacher), nats
    kl_kind: str
    drift: float  # ||theta - avg|| / ||avg||
    grad_norm: float
    grad_snr: float
    clip_fraction: float
    ratio_deviation: float  # mean |logp(learner) - logp(sampler)| over kept tokens
    kept_fraction: float  # kept / all response tokens
    flat_groups: float  # share of groups whose rewards are all equal
    skipped: int  # updates of this step skipped because something was not finite
    lr: float
    stale: float = 0.0  # share of responses sampled from older weights than the step's own
    correction_mean: float = math.nan  # of pi_old / pi_sampler over kept tokens, before any bound
    correction_max: float = math.nan
    correction_capped: float = math.nan  # share of kept tokens whose ratio was capped
    correction_rejected: float = math.nan  # share of kept tokens whose weight is 0
    entropy_quantile: float = math.nan  # of all response tokens, for the KL gate, nats
    snr_bins: tuple[float, ...] = ()  # gradient SNR by difficulty bin, where asked for
    deciles: Mapping[str, list[float]] | None = None  # by tenth of the response: kept share, entropy, kl, surprisal

    def columns(self) -> dict[str, Any]:
        """What of it is in metrics.csv, by column."""
        values = asdict(self)
        values["skipped_nonfinite"] = values.pop("skipped")
        values |= {f"snr_{b}": value for b, value in enumerate(values.pop("snr_bins"))}
        return {name: value for name, value in values.items() if name not in ("deciles", "entropy_quantile")}


@dataclass(frozen=True)
class Knobs:
    """What the scheduler decided for one step; identical on every rank."""

    weights: tuple[float, ...]  # [K] sampling weights
    r_threshold: float
    entropy_coef: float
    kl_coef: float
    ema_alpha: float
    lr_scale: float
    temporal_s: float  # share of each trajectory cut from the front, 0 trains everything
    rule: str  # the coefficient rules that fired, for the log
    kl_gate: Optional[float] = None  # h0 of the token-level KL gate, nats; None leaves the gate open
    copy_reference: bool = False  # the reference becomes a copy of the policy before this step's update


@dataclass(frozen=True)
class Sampling:
    """How one rollout batch is sampled. `temperature` 0 is greedy."""

    responses: int  # G
    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1


COMMON = -2  # a group id of MicroBatch


@dataclass(frozen=True)
class MicroBatch:
    """Packed sequences [B, W] and the R response tokens of them that are trained, as one forward and backward.

    Position i attends to j <= i of the same group when j is prompt (`response_ids` 0) or of the same response, and to the row's
    beginning of group COMMON, which stands for the first tokens of all its prompts. The prompt of a group may stand once before
    all its responses; `position_ids` then continue from the prompt for each response. The last token of a response is a target
    only and is not fed.
    """

    input_ids: np.ndarray  # [B, W] int64
    position_ids: np.ndarray  # [B, W] int64
    group_ids: np.ndarray  # [B, W] int64, -1 is padding, COMMON the beginning that all groups of a row share
    response_ids: np.ndarray  # [B, W] int64, 0 is prompt
    rows: np.ndarray  # [R] int64, flat position in B * W whose hidden state predicts the target
    targets: np.ndarray  # [R] int64
    advantages: np.ndarray  # [R] float32
    token_weights: np.ndarray  # [R] float32, mask over global denominator; 0 in the dummies that even out ranks
    sampler_logp: np.ndarray  # [R] float32
    responses: np.ndarray  # [R] int64, index of the response among the packed samples
    offsets: np.ndarray  # [R] int64, token position t in its response
    deciles: np.ndarray  # [R] int64, 0..9: tenth of its response
    groups: tuple[int, ...]  # prompt groups whose gradient this micro-batch carries; none in a dummy
    old_logp: np.ndarray | None = None  # [R] float32, NaN: unknown; None: the policy has not moved since
    kl_scale: np.ndarray | None = None  # [R] float32, factor of the KL coefficient; None: 1
    bin: int = -1  # difficulty bin of all its groups, where micro-batches are split by bin


class StepResult(NamedTuple):
    """One optimizer step."""

    grad_norm: float  # before clipping; NaN when the update was skipped
    applied: bool


class Head(NamedTuple):
    """Where hidden states become logits softcap(hidden @ weight.T + bias); what an engine hands to the loss."""

    hidden: "torch.Tensor"  # [R, H], one row a trained token
    weight: "torch.Tensor"  # [V, H]
    bias: "Optional[torch.Tensor]"  # [V]
    softcap: Optional[float]
