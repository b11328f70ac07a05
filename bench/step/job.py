"""What the peer's process is told. Imports nothing heavy: that process's memory is compared."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class Job:
    """What the peer's process reads. Prompts are texts whose encoding is ours, `held_out` rows have prompt, answer and bin."""

    model: str
    reward: str
    prompts: list[str]
    answers: list[str]
    prompts_per_step: int
    responses: int
    tokens: int
    longest: int
    steps: int
    seed: int
    temperature: float
    lr: float
    betas: tuple[float, float]
    weight_decay: float
    grad_clip: float
    clip: tuple[float, float]
    candidate: dict
    held_out: list[dict] = field(default_factory=list)

    @classmethod
    def read(cls, file: Path) -> "Job":
        return cls(**json.loads(file.read_text()))

    def write(self, file: Path) -> None:
        file.write_text(json.dumps(asdict(self)))
