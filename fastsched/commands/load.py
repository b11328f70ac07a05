"""Load on a server that speaks OpenAI's completions: requests from this process, and what they took."""

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import Sequence

import httpx
import numpy as np

from fastsched.config import require
from fastsched.engines.rollout.server_process import ServerError

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


def figures(load: Load, answers: Sequence[Answer], seconds: float) -> dict:
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
