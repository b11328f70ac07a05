"""vLLM in the learner's process: one engine on each rank, or one that `rollout.tensor_parallel` ranks share."""

import logging
import os
import random
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Iterable, Optional, Sequence

import numpy as np
import torch
import torch.distributed as dist

from fastsched.config import RolloutConfig, require
from fastsched.engines.rollout.contract import check_request, each_response, require_usable
from fastsched.engines.rollout.vllm_model import model_fingerprints, repack_tied_head, watch_packing
from fastsched.engines.rollout.weights import SyncError, checked, expected_shapes
from fastsched.types import Prompt, Response, Sampling

CPU_BLOCK = 32  # the smallest that vLLM's CPU attention takes: the G responses of a prompt share its full blocks
CPU_BATCH_TOKENS = 8192
SHARED_PROMPTS = {"kv_connector": "PromptSharing", "kv_connector_module_path": "fastsched.engines.rollout.vllm_prompts",
                  "kv_role": "kv_both"}


class VllmRollout:
    """`RolloutEngine` on vLLM; see there for the contract.

    On a CPU the cache holds `cfg.kv_cache_gb`, on CUDA vLLM takes `cfg.gpu_memory_utilization` of the device.
    """

    def __init__(self, model_path: str | Path, cfg: RolloutConfig, *, dtype: str, max_model_len: int, seed: int,
                 stop_token_ids: Sequence[int], trust_remote_code: bool = False):
        self.weight_version = 0
        self.missing_logprobs = 0
        self.max_model_len = max_model_len
        self.dtype = getattr(torch, dtype)
        self._failed_version: int | None = None
        self._stop_token_ids = list(stop_token_ids)
        self._tensor_parallel, self._asleep = cfg.tensor_parallel, False
        self._shapes = expected_shapes(model_path, trust_remote_code)
        self._borrowed_group = dist.is_initialized()
        self._llm = _start(model_path, cfg, dtype, max_model_len, seed, trust_remote_code)
        if self._borrowed_group:  # the engine's own finalizer would destroy the learner's process group
            self._llm.llm_engine.engine_core._finalizer.detach()

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                 responses: Optional[Sequence[int]] = None) -> list[Response]:
        require_usable(self._failed_version)
        check_request(prompts, sampling, seeds, self.max_model_len, responses)
        # A cached prefix was computed in another batch; without it a batch depends on nothing that ran before.
        self._drop_prefixes()
        rows, row_seeds = each_response(prompts, sampling, seeds, responses)
        params = [self._params(sampling, seed) for seed in row_seeds]
        outputs = self._run([(list(row.token_ids), p) for row, p in zip(rows, params, strict=True)])
        return [self._response(row, output.outputs[0]) for row, output in zip(rows, outputs, strict=True)]

    def _run(self, asked: list[tuple[list[int], object]]) -> list:
        """Outputs for (token ids, sampling parameters). The ranks of a tensor parallel group run all of theirs together, in rank order."""
        together, start = _of_the_group(asked) if self._tensor_parallel > 1 else (asked, 0)
        if not together:
            return []
        with _torch_random_state_kept():
            outputs = self._llm.generate([{"prompt_token_ids": ids} for ids, _ in together], [p for _, p in together], use_tqdm=False)
        return outputs[start:start + len(asked)]

    def _params(self, sampling: Sampling, seed: int):
        from vllm import SamplingParams

        return SamplingParams(
            skip_clone=True,  # it serves this request alone
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, seed=seed,
            max_tokens=sampling.max_new_tokens, stop_token_ids=self._stop_token_ids, ignore_eos=True,
            logprobs=0, flat_logprobs=True, detokenize=False,
        )

    def _response(self, prompt: Prompt, completion) -> Response:
        logp = sampled_logp(completion.token_ids, completion.logprobs)
        self.missing_logprobs += int(np.isnan(logp).sum())
        return Response(prompt.row, tuple(prompt.token_ids), tuple(completion.token_ids), logp,
                        completion.finish_reason, self.weight_version)

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        require_usable(self._failed_version)
        self._failed_version = version
        self._wake()
        weights = checked(named_tensors, self._shapes, self.dtype)
        self._llm.collective_rpc("reload_weights", kwargs=dict(weights_iterator=weights, is_checkpoint_format=True))
        if "lm_head.weight" not in self._shapes:
            self._repack_tied_head()
        self._drop_prefixes()
        self.weight_version = version
        self._failed_version = None

    def _drop_prefixes(self) -> None:
        if not self._llm.reset_prefix_cache():
            raise SyncError("sampler: vLLM refused to drop its prefix cache, which requests that never ended still hold; what it computes "
                            "next could mix weights")

    def _repack_tied_head(self) -> None:
        self._llm.apply_model(repack_tied_head)

    def sleep(self) -> None:
        """Weights to host memory, cache dropped (vLLM's level 1), until `load_weights` or `_wake`; only with `rollout.sleep`."""
        self._llm.sleep(level=1)
        self._asleep = True

    def _wake(self) -> None:
        """Before weights are written: what is written into a sleeping engine is lost."""
        if self._asleep:
            if not self._llm.wake_up():
                raise SyncError("sampler: vLLM did not wake up in full (rollout.sleep); weights written now would be lost")
            self._asleep = False

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        require_usable(self._failed_version)
        from vllm import SamplingParams

        require(2 <= len(token_ids) < self.max_model_len,
                f"score: {len(token_ids)} tokens; needs at least 2 and fewer than the engine's {self.max_model_len}")
        params = SamplingParams(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)
        output, = self._run([(list(token_ids), params)])
        return sampled_logp(token_ids[1:], output.prompt_logprobs[1:])

    def fingerprints(self) -> dict[str, dict[str, int | None]]:
        held, = self._llm.apply_model(partial(model_fingerprints, dtype=self.dtype))
        return {"the sampler": held}

    def close(self) -> None:
        if self._llm is None:
            return
        engine_core = self._llm.llm_engine.engine_core
        if not self._borrowed_group:
            engine_core.shutdown()
        else:
            from vllm.distributed import parallel_state

            engine_core.engine_core.model_executor.shutdown()
            engine_core.engine_core.scheduler.shutdown()
            parallel_state.destroy_model_parallel()
            parallel_state.get_world_group().destroy()
            parallel_state._WORLD = None
        self._llm = None


def sampled_logp(token_ids: Sequence[int], logprobs) -> np.ndarray:
    """[L] float32 log-probability of each token out of vLLM's {token: Logprob} a position; NaN where it gave none."""
    found = [(position or {}).get(token) for token, position in zip(token_ids, logprobs, strict=True)]
    return np.array([entry.logprob if entry and entry.logprob is not None else np.nan for entry in found], np.float32)


def _start(model_path: str | Path, cfg: RolloutConfig, dtype: str, max_model_len: int, seed: int, trust_remote_code: bool):
    """Import vLLM under the right environment and construct its engine, leaving the process as it was."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine lives in this process
    os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override kv_cache_memory_bytes
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    os.environ.setdefault("VLLM_CONFIGURE_LOGGING", "0")  # its records go to the root logger, and so to log.txt
    logging.getLogger("vllm.renderers").setLevel(logging.ERROR)  # a traceback about the tokenizer it was told to skip
    launched = dist.is_initialized() or int(os.environ.get("WORLD_SIZE", "1")) > 1
    if dist.is_initialized():
        os.environ.setdefault("RANK", str(dist.get_rank()))
        os.environ.setdefault("WORLD_SIZE", str(dist.get_world_size()))
        os.environ.setdefault("LOCAL_RANK", "0")
    with _process_state_kept():
        from vllm import LLM
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        _require_possible(cfg, on_cpu)
        watch_packing()
        if on_cpu:
            torch._dynamo.config.disable = True  # else the first sampled batch compiles C++ for half a minute
        return LLM(
            model=str(model_path), dtype=dtype, seed=seed, max_model_len=max_model_len, max_num_seqs=cfg.max_num_seqs,
            tensor_parallel_size=cfg.tensor_parallel, distributed_executor_backend="external_launcher" if launched else None,
            enable_sleep_mode=cfg.sleep,
            enforce_eager=on_cpu, kv_cache_memory_bytes=int(cfg.kv_cache_gb * 2**30) if on_cpu else None,
            block_size=CPU_BLOCK if on_cpu else None,
            kv_transfer_config=SHARED_PROMPTS if on_cpu else None,
            # A prompt cut in two rewinds the generator of a seeded request, which CPU generators cannot.
            enable_chunked_prefill=not on_cpu, max_num_batched_tokens=max(CPU_BATCH_TOKENS, max_model_len) if on_cpu else None,
            gpu_memory_utilization=cfg.gpu_memory_utilization, skip_tokenizer_init=True, generation_config="vllm",
            logprobs_mode="processed_logprobs", enable_prefix_caching=True, use_tqdm_on_load=False,
            trust_remote_code=trust_remote_code, hf_overrides={"head_dtype": "float32"} if cfg.head_dtype == "fp32" else {},
        )


def _require_possible(cfg: RolloutConfig, on_cpu: bool) -> None:
    """ConfigError for what this machine or this number of ranks cannot do."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    require(world % cfg.tensor_parallel == 0,
            f"rollout.tensor_parallel: {world} ranks cannot be split into groups of {cfg.tensor_parallel}; start a multiple of it")
    require(not (cfg.sleep and on_cpu), "rollout.sleep: vLLM sleeps on CUDA only; set it to false")
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        segments = "expandable_segments:true" in os.environ.get(name, "").lower()
        require(not (cfg.sleep and segments),
                f"rollout.sleep: vLLM's sleep cannot free memory under expandable_segments; take it out of {name}")


def _of_the_group(asked: list) -> tuple[list, int]:
    """What all ranks of this tensor parallel group ask for, in rank order, and where this rank's part of it begins."""
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()
    parts: list = [None] * group.world_size
    dist.all_gather_object(parts, asked, group=group.cpu_group)
    return [one for part in parts for one in part], sum(map(len, parts[:group.rank_in_group]))


@contextmanager
def _process_state_kept():
    """vLLM reseeds every global generator and, on a CPU, turns torch.set_num_threads into a no-op."""
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    python_state, numpy_state = random.getstate(), np.random.get_state()
    with _torch_random_state_kept():
        yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_num_threads = set_num_threads
    torch.set_num_threads(threads)


def _torch_random_state_kept():
    """vLLM's CPU sampler draws from torch's global generator even where every request is seeded."""
    return torch.random.fork_rng(devices=[torch.cuda.current_device()] if torch.cuda.is_available() else [])
