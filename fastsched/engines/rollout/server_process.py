"""A vLLM server in a process of its own: bound to loopback, watched while it starts, ended with us."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Sequence

import httpx
import torch

from fastsched.config import ConfigError, RolloutConfig
from fastsched.engines.rollout.vllm_engine import CPU_BATCH_TOKENS, CPU_BLOCK, SHARED_PROMPTS
from fastsched.types import EngineError

HOST = "127.0.0.1"
POLL_S = 0.2
GRACE_S = 15.0  # for vLLM to end its engine process
LAST_LINES = 12  # of the log, in the error of a server that died
LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GROUP_RANK")


class ServerError(EngineError):
    """A server did not answer, refused, or died: which server, which call, after how long."""


def engine_options(cfg: RolloutConfig, *, dtype: str, max_model_len: int, seed: int, trust_remote_code: bool = False) -> list[str]:
    """Options of vLLM's server that give the engine of `vllm_engine`: there is why each of them is set."""
    options = ["--dtype", dtype, "--seed", str(seed), "--max-model-len", str(max_model_len), "--max-num-seqs", str(cfg.max_num_seqs),
               "--generation-config", "vllm", "--logprobs-mode", "processed_logprobs", "--enable-prefix-caching",
               "--gpu-memory-utilization", str(cfg.gpu_memory_utilization)]
    if not torch.cuda.is_available():
        options += ["--enforce-eager", "--kv-cache-memory-bytes", str(int(cfg.kv_cache_gb * 2**30)), "--block-size", str(CPU_BLOCK),
                    "--kv-transfer-config", json.dumps(SHARED_PROMPTS), "--no-enable-chunked-prefill",
                    "--max-num-batched-tokens", str(max(CPU_BATCH_TOKENS, max_model_len))]
    if cfg.head_dtype == "fp32":
        options += ["--hf-overrides", json.dumps({"head_dtype": "float32"})]
    return options + ["--trust-remote-code"] * trust_remote_code


class ServerProcess:
    """Starts at construction; call `wait_ready` before the first request and `close` at the end, or use it as a context manager.

    The socket is bound here, before anything else, and inherited: no other process can take the port in between. Port 0 is any
    free one. What the server prints goes to `log`. The process leads its own session, so that Ctrl-C reaches us alone and we end it.
    """

    def __init__(self, model: Path, options: Sequence[str], log: Path, *, port: int = 0, threads: int | None = None,
                 environment: dict[str, str] | None = None):
        sock = bound_socket(port)
        self.port, self.log = sock.getsockname()[1], Path(log)
        self.url = f"http://{HOST}:{self.port}"
        command = [sys.executable, "-m", "fastsched.engines.rollout.vllm_server", "--fd", str(sock.fileno()), "--parent", str(os.getpid()),
                   "--model", str(model), *options]
        self.started = time.monotonic()
        with self.log.open("ab") as out, sock:
            self._process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT,
                                             env=server_environment(threads) | (environment or {}), pass_fds=[sock.fileno()],
                                             start_new_session=True)

    def wait_ready(self, timeout_s: float) -> float:
        """Seconds from construction to the first answer of /health. ConfigError with the end of the log if it dies or is too slow."""
        while time.monotonic() < self.started + timeout_s:
            self.require_alive("start")
            try:
                if httpx.get(f"{self.url}/health", timeout=POLL_S).status_code == 200:
                    return time.monotonic() - self.started
            except httpx.TransportError:
                pass
            time.sleep(POLL_S)
        raise ConfigError(f"vLLM server {self.url}: not ready after {timeout_s:g} s; the end of {self.log}:\n{self.last_lines()}")

    def require_alive(self, call: str) -> None:
        code = self._process.poll()
        if code is not None:
            raise ConfigError(f"vLLM server {self.url}: ended with code {code} during {call}, {time.monotonic() - self.started:.0f} s "
                              f"after its start; the end of {self.log}:\n{self.last_lines()}")

    def ended(self, patience_s: float) -> int | None:
        """The exit code, None if the server still runs after `patience_s`."""
        try:
            return self._process.wait(patience_s)
        except subprocess.TimeoutExpired:
            return None

    def last_lines(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-LAST_LINES:])

    def close(self) -> None:
        """End the server and what it started; a second call does nothing."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                pass
        try:
            os.killpg(self._process.pid, signal.SIGKILL)  # an engine process may outlive the one that answers HTTP
        except ProcessLookupError:
            pass
        self._process.wait()

    def __enter__(self) -> "ServerProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()


def bound_socket(port: int) -> socket.socket:
    """A listening loopback socket. ConfigError when the port is taken."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.bind((HOST, port))
    except OSError as error:
        sock.close()
        raise ConfigError(f"port {port} of {HOST} cannot be had ({error.strerror}); give another one, or 0 for any free one") from error
    return sock


def server_environment(threads: int | None) -> dict[str, str]:
    """This process's environment without its launcher's variables, with `threads` OpenMP threads a server."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER}
    own = {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    if not torch.cuda.is_available():
        own |= {"TORCHDYNAMO_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}  # no C++ compiled at the first batch; cores are shared
    for name in ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_CONFIGURE_LOGGING", "VLLM_CPU_KVCACHE_SPACE"):
        kept.pop(name, None)  # meant for an engine in this process
    return kept | own | ({"OMP_NUM_THREADS": str(threads)} if threads else {})
