"""What a response earns."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from fastsched.config.checks import require

OWN_KINDS = ("exact_number", "graded_number", "math_verify", "task")
TAKEN = ("mean", "std", "failures")
"""Other columns of metrics.csv begin with `reward_` and end so."""
LARGEST_WEIGHT = 1e6

Form = Literal["none", "boxed", "answer_tag"]


@dataclass(frozen=True)
class RewardPart:
    """One of several rewards of a response."""
    kind: str
    weight: float = 1.0
    name: str = ""
    require: Form = "none"

    @property
    def label(self) -> str:
        """Its column is `reward_LABEL`: the name, or the kind, or the function's own name."""
        return self.name or self.kind.rpartition(":")[2]

    @property
    def own(self) -> bool:
        """Ours: where it fails, the response or the answer is the reason, and not somebody's code."""
        return self.kind in OWN_KINDS

    def check(self, key: str) -> None:
        require(self.own or ":" in self.kind, f"{key}.kind: {self.kind!r} is none of {', '.join(OWN_KINDS)}, module:function")
        require(math.isfinite(self.weight) and abs(self.weight) <= LARGEST_WEIGHT,
                f"{key}.weight: {self.weight} is no number of at most {LARGEST_WEIGHT:g}")


@dataclass(frozen=True)
class RewardConfig:
    kind: str = "exact_number"
    """`exact_number`, `graded_number` (up to 0.5 for right digits of a wrong number), `math_verify`, `task` (reasoning-gym's own
    verifier) or a user's `module:function`."""
    require: Form = "none"
    """What a response must have to score above 0: a closed \\boxed{}, or <answer></answer>. Else the last number of any text counts."""
    extra: tuple[RewardPart, ...] = ()
    """Further rewards, added to that of `kind` with their weights: `[{kind: my_rewards:short, weight: 0.2}]`, each with a `name` and
    `require` of its own where wanted. Each reward is then a column `reward_NAME`; one of weight 0 is only shown."""
    prefill: bool = False
    """The reward reads what the answer began with (`data.prefill`, or the assistant turn that a row ends in) and the response together."""
    keep_tokens: tuple[str, ...] = ("<answer>", "</answer>")
    """Special tokens of the tokenizer that stay in the text which rewards and samples see; all others are left out of it."""
    workers: int = 2
    timeout_s: float = 5.0
    """Limit for one response; what runs longer is killed with all it has started, counted, and costs only that response."""

    @property
    def parts(self) -> tuple[RewardPart, ...]:
        """All rewards, that of `kind` first."""
        return (RewardPart(self.kind, 1.0, "", self.require), *self.extra)

    def __post_init__(self):
        for number, part in enumerate(self.parts):
            part.check(f"reward.extra[{number - 1}]" if number else "reward")
        labels = [part.label for part in self.parts]
        for label in labels if self.extra else []:
            require(bool(re.fullmatch(r"\w+", label)) and label not in TAKEN and labels.count(label) == 1,
                    f"reward.extra: a reward's column cannot be reward_{label}, because "
                    + ("two rewards have that name" if labels.count(label) > 1 else "that is another column's name" if label in TAKEN
                       else "names are of letters, digits and _") + "; give each a name of its own")
        require(self.workers >= 1 and self.timeout_s > 0, "reward: workers and timeout_s must be positive")
