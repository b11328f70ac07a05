"""The sampler's part of the configuration: engine, servers, sampling, correction of what sampler and learner disagree on."""

from dataclasses import dataclass
from typing import Literal

from fastsched.config.checks import require

LOWEST_TEMPERATURE = 0.01  # below it vLLM clamps, and sampler and learner would disagree


@dataclass(frozen=True)
class RolloutConfig:
    engine: Literal["vllm", "vllm_server", "transformers"] = "vllm"
    """vLLM in each rank's process, vLLM servers beside it (`replicas`, or `servers`), or the transformers parity reference."""
    replicas: int = 1
    """`vllm_server`: servers that each rank starts, on loopback and on free ports; a rank's prompts are dealt out to them."""
    servers: tuple[str, ...] = ()
    """`vllm_server`: URLs of running servers (`python -m fastsched.engines.rollout.vllm_server --rollout --model ...`), dealt out to the
    ranks."""
    timeout_s: float = 1800.0
    """Limit of every call into the sampler or a server; what takes longer ends the run with the call's name (exit code 3). The other
    ranks wait a minute longer for one that is late, and half an hour at least."""
    start_timeout_s: float = 300.0
    """`vllm_server`: limit for a server's start."""
    transfer_dir: str | None = None
    """`vllm_server`: folder through which weights pass; servers must see it. By default shared memory, else the temporary folder."""
    tensor_parallel: int = 1
    """`vllm`: so many neighbouring ranks share one engine (tensor parallel) and sample the prompts of all of them together."""
    sleep: bool = False
    """`vllm` on CUDA: during the update the sampler's weights lie in host memory and its cache is given back (vLLM's sleep level 1)."""
    ahead: Literal[0, 1] = 0
    """1: the servers sample the next step's batch while the learner updates, with weights that are one version old (`vllm_server` only)."""
    responses: int = 8
    """G, responses per prompt; the group of GRPO."""
    max_new_tokens: int = 16
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1 is off."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Sampler dtype; the model's by default."""
    head_dtype: Literal["bf16", "fp32"] | None = None
    """Dtype of a bf16 sampler's logits (vLLM's head_dtype); by default as `learner.logits`. Logits that round on one side only are further
    apart than where both round to the same grid. `servers` that others started must have been told themselves."""
    kv_cache_gb: float = 1.0
    gpu_memory_utilization: float = 0.45
    max_num_seqs: int = 256
    correction: Literal["none", "token_tis", "sequence_tis", "token_mis", "sequence_mis", "icepop", "geometric"] = "none"
    """Weight of the surrogate for the engine/learner mismatch rho = pi_old / pi_sampler (algorithms.md 5.1): truncated or masked
    importance sampling by token or response, IcePop (arXiv 2510.18855), or keeping the responses whose geometric mean of rho lies
    within the bounds. For stale responses rho also holds the change of the weights since they were sampled,
    and the clipped ratio stays that to the learner's own; without a correction that ratio is taken against the sampler."""
    correction_cap: float | None = None
    """Upper bound of the ratio; by default 2 (token_tis, sequence_tis, token_mis), 3 (sequence_mis), 5 (icepop), 1.001 (geometric)."""
    correction_floor: float | None = None
    """Lower bound of token_mis (0.5), icepop (0.5) and geometric (0.999)."""
    correction_veto: float = 0.0
    """A response with a token of rho below this gets weight 0; published 1e-4, 0 is off."""
    correction_divide: bool = False
    """Divide the weights by their mean over the batch; needs one more pass over the batch."""
    sync_tolerance: float | None = None
    """Largest mean |logp(sampler) - logp(learner)| on the re-scored prompt; by default 1e-4 in fp32, 0.25 in bf16."""

    def __post_init__(self):
        require(min(self.responses, self.max_new_tokens, self.max_num_seqs) >= 1,
                "rollout: responses, max_new_tokens and max_num_seqs must be at least 1")
        require(min(self.replicas, self.timeout_s, self.start_timeout_s) > 0, "rollout: replicas and time limits must be positive")
        require(self.tensor_parallel >= 1, "rollout.tensor_parallel: must be at least 1")
        require(self.engine == "vllm" or self.tensor_parallel == 1 and not self.sleep,
                f"rollout.tensor_parallel, rollout.sleep: for rollout.engine vllm, not {self.engine}")
        require(self.engine == "vllm_server" or not self.servers and self.replicas == 1,
                f"rollout.servers, rollout.replicas: for rollout.engine vllm_server, not {self.engine}")
        require(self.engine == "vllm_server" or not self.ahead,
                f"rollout.ahead: needs rollout.engine vllm_server; {self.engine} samples in the learner's own process, on its cores or GPU "
                "and while it waits, so nothing would run at the same time")
        require(self.temperature >= LOWEST_TEMPERATURE,
                f"rollout.temperature: must be at least {LOWEST_TEMPERATURE} for training (evaluation is greedy)")
        require(0 < self.top_p <= 1, f"rollout.top_p: {self.top_p} does not lie in (0, 1]")
        require(self.top_k == -1 or self.top_k >= 1, f"rollout.top_k: {self.top_k} is neither -1 (off) nor positive")
        require(self.kv_cache_gb > 0 and 0 < self.gpu_memory_utilization < 1,
                "rollout: kv_cache_gb must be positive and gpu_memory_utilization lie in (0, 1)")
        require(self.top_p == 1.0 and self.top_k == -1 or self.correction == "none",
                "rollout.correction: the sampler renormalises after top_p/top_k, the learner does not; use top_p=1, top_k=-1")
        require(self.correction_floor is None or self.correction in ("token_mis", "icepop", "geometric"),
                f"rollout.correction_floor: {self.correction} has no lower bound; leave it out")
        require(0 <= (self.correction_floor or 0) <= (self.correction_cap or float("inf")) and self.correction_veto >= 0,
                "rollout.correction: need 0 <= correction_floor <= correction_cap and correction_veto >= 0")
