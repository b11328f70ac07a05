"""`fastsched serve-bench`: a run's policy behind vLLM's OpenAI-compatible server, and its latency under load from this process."""

import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Sequence

import httpx
import numpy as np

from fastsched.commands.export import export_checkpoint
from fastsched.commands.run_folder import checkpoint_for
from fastsched.config import Config, ConfigError, require
from fastsched.config.arguments import run_config
from fastsched.engines.models.loading import load_tokenizer, stop_token_ids
from fastsched.engines.rollout.server_process import ServerError, ServerProcess, engine_options
from fastsched.loop.prepare import load_data
from fastsched.record.checkpoint import step_of
from fastsched.record.tables import replace_text

START_S = 300.0
REQUEST_S = 120.0


@dataclass(frozen=True)
class Load:
    """What is asked of the server: `batch` requests at any time, `requests` in all, after `batch` that are not counted."""

    batch: int
    requests: int
    max_new_tokens: int
    temperature: float
    stop_token_ids: list[int]

    def __post_init__(self):
        require(min(self.batch, self.requests, self.max_new_tokens) >= 1,
                "serve-bench: --batch, --requests and --max_new_tokens must be positive")


@dataclass(frozen=True)
class Answer:
    seconds: float
    tokens: int


def serve_bench(run_dir: Path, *, batch: int, requests: int, max_new_tokens: int | None, average: bool, port: int = 0) -> dict:
    """Serve the last checkpoint on loopback, put it under load, write RUN/serve_bench.json and return what is in it.

    ConfigError: no checkpoint, a port that is taken, a server that dies or is not ready in `START_S`. ServerError: a request that
    fails or takes longer than `REQUEST_S`. The server's output is in RUN/serve_bench.log. It ends with this function, and with us.
    """
    checkpoint = checkpoint_for(run_dir, "serve-bench", best=False)
    with tempfile.TemporaryDirectory() as folder:
        model = export_checkpoint(run_dir, checkpoint, Path(folder) / "model", average=average)
        cfg = run_config(run_dir)
        load = Load(batch, requests, max_new_tokens or cfg.rollout.max_new_tokens, cfg.rollout.temperature,
                    stop_token_ids(model, cfg.model.trust_remote_code))
        prompts = _held_out(cfg, model)
        options = engine_options(cfg.rollout, dtype=cfg.rollout.dtype or cfg.model.dtype, seed=cfg.train.seed,
                                 max_model_len=cfg.data.max_prompt_tokens + load.max_new_tokens,
                                 trust_remote_code=cfg.model.trust_remote_code)
        log = run_dir / "serve_bench.log"
        log.unlink(missing_ok=True)
        with ServerProcess(model, options, log, port=port) as server:
            ready = server.wait_ready(START_S)
            print(f"server {server.url} ready after {ready:.0f} s; {load.requests} requests, {load.batch} at a time", flush=True)
            answers, seconds = put_under_load(server.url, str(model), prompts, load)
    result = {"step": step_of(checkpoint), "average": average, "model": cfg.model.name, "dtype": options[1],
              "cores": len(os.sched_getaffinity(0)), "server_start_s": ready, **_figures(load, answers, seconds)}
    replace_text(run_dir / "serve_bench.json", json.dumps(result, indent=2) + "\n")
    return result


def _held_out(cfg: Config, model: Path) -> list[list[int]]:
    _, heldout = load_data(cfg.data, load_tokenizer(model, cfg.model), cfg.train.seed, cfg.train.prompts_per_step)
    if not len(heldout):
        raise ConfigError("serve-bench: the run has no held-out prompts (data.eval_per_bin)")
    return [list(heldout.prompt(i).token_ids) for i in np.random.default_rng(0).permutation(len(heldout)).tolist()]


def put_under_load(url: str, model: str, prompts: Sequence[Sequence[int]], load: Load) -> tuple[list[Answer], float]:
    """Answers in order of their requests, and the seconds they took together; `load.batch` threads with one request open each."""
    with httpx.Client(base_url=url, timeout=REQUEST_S, limits=httpx.Limits(max_connections=load.batch)) as http:
        pool = ThreadPoolExecutor(load.batch)
        ask = lambda i: complete(http, model, prompts[i % len(prompts)], load, seed=i)
        try:
            list(pool.map(ask, range(load.batch)))  # opens the connections and warms the server up
            began = time.perf_counter()
            return list(pool.map(ask, range(load.requests))), time.perf_counter() - began
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def complete(http: httpx.Client, model: str, prompt: Sequence[int], load: Load, seed: int) -> Answer:
    """One /v1/completions request. ServerError names server, call and how long it took."""
    body = {"model": model, "prompt": list(prompt), "max_tokens": load.max_new_tokens, "temperature": load.temperature, "seed": seed,
            "stop_token_ids": load.stop_token_ids}
    began = time.perf_counter()
    try:
        answer = http.post("/v1/completions", json=body)
        answer.raise_for_status()
        tokens = answer.json()["usage"]["completion_tokens"]
    except httpx.HTTPError as error:
        text = error.response.text[:300] if isinstance(error, httpx.HTTPStatusError) else ""
        raise ServerError(f"{http.base_url}/v1/completions, request {seed} ({len(prompt)} prompt tokens): {type(error).__name__} after "
                          f"{time.perf_counter() - began:.1f} s: {error} {text}".rstrip()) from error
    return Answer(time.perf_counter() - began, tokens)


def _figures(load: Load, answers: Sequence[Answer], seconds: float) -> dict:
    latency = np.array([a.seconds for a in answers])
    tokens = sum(a.tokens for a in answers)
    p50, p95, p99 = np.percentile(latency, [50, 95, 99]).tolist()
    asked = {name: value for name, value in asdict(load).items() if name != "stop_token_ids"}
    return {**asked, "seconds": seconds, "latency_s": {"p50": p50, "p95": p95, "p99": p99, "max": float(latency.max())},
            "tokens": tokens, "tokens_per_s": tokens / seconds, "requests_per_s": load.requests / seconds}


def figures_text(result: dict) -> str:
    latency = result["latency_s"]
    return (f"{result['requests']} requests, {result['batch']} at a time, {result['tokens']} tokens in {result['seconds']:.1f} s\n"
            f"latency: p50 {latency['p50'] * 1e3:.0f} ms, p95 {latency['p95'] * 1e3:.0f} ms, p99 {latency['p99'] * 1e3:.0f} ms\n"
            f"{result['tokens_per_s']:.0f} tokens/s, {result['requests_per_s']:.1f} requests/s")
