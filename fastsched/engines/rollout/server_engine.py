"""The rollout engine on vLLM servers: replicas that this rank starts on loopback, or servers that are already there.

P prompts, G responses a prompt, N servers of this rank.
"""

import io
import os
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Iterable, Iterator, Mapping, Optional, Sequence

import httpx
import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file

from fastsched.config import RolloutConfig, require
from fastsched.engines.rollout.contract import check_request, require_usable, response_seed
from fastsched.engines.rollout.server_process import ServerError, ServerProcess, engine_options
from fastsched.engines.rollout.weights import SyncError, checked, expected_shapes
from fastsched.types import Prompt, Response, Sampling

CHUNK_BYTES = 2**30  # of weights in one file
DYING_S = 2.0  # between a connection that breaks and the end of its process


class Server:
    """One server by its URL; every call has a time limit and an error that names server, call and how long it took."""

    def __init__(self, url: str, timeout_s: float, process: ServerProcess | None = None):
        self.url, self.process = url, process
        self._http = httpx.Client(base_url=url, timeout=timeout_s)

    def post(self, call: str, body: dict | None = None, what: str = "", **query: str) -> httpx.Response:
        return self._ask("POST", call, body, what, query)

    def get(self, call: str) -> httpx.Response:
        return self._ask("GET", call, None, "", {})

    def _ask(self, method: str, call: str, body: dict | None, what: str, query: dict[str, str]) -> httpx.Response:
        began = time.monotonic()
        try:
            answer = self._http.request(method, call, json=body, params=query)
            answer.raise_for_status()
            return answer
        except httpx.HTTPError as error:
            detail = f": {error.response.text[:500]}" if isinstance(error, httpx.HTTPStatusError) else f" ({error})"
            message = (f"rollout server {self.url}, {call}{f' ({what})' if what else ''}: {type(error).__name__} after "
                       f"{time.monotonic() - began:.1f} s{detail}{self._fate()}")
        raise ServerError(message)

    def _fate(self) -> str:
        if self.process is None:
            return ""
        ended = self.process.ended(DYING_S)
        return f"; the server {f'ended with code {ended}' if ended is not None else 'is running'}, its log: {self.process.log}"

    def close(self) -> None:
        self._http.close()
        if self.process:
            self.process.close()


class ServerRollout:
    """`RolloutEngine` on N servers; see there for the contract, and `RolloutConfig` for replicas, servers and time limits.

    Prompt i goes to server i mod N. Weights travel as safetensors files through vLLM's own weight transfer routes.
    """

    def __init__(self, model_path: str | Path, cfg: RolloutConfig, *, dtype: str, max_model_len: int, seed: int,
                 stop_token_ids: Sequence[int], trust_remote_code: bool = False, log_dir: Path | None = None):
        self.weight_version = 0
        self.missing_logprobs = 0
        self.max_model_len = max_model_len
        self.dtype = getattr(torch, dtype)
        self._failed_version: int | None = None
        self._stop_token_ids = list(stop_token_ids)
        self._shapes = expected_shapes(model_path, trust_remote_code)
        self._transfer_dir = transfer_dir(cfg.transfer_dir)
        self._rank, world = _rank_and_world()
        self._servers: list[Server] = []
        try:
            options = engine_options(cfg, dtype=dtype, max_model_len=max_model_len, seed=seed, trust_remote_code=trust_remote_code)
            self._servers += _joined(cfg, self._rank, world) or _started(model_path, cfg, options, self._rank, world, log_dir)
            self._pool = ThreadPoolExecutor(len(self._servers))
            self._everywhere(lambda server: server.post("/update_weight_version", {"new_version": "0"}))
        except BaseException:
            self.close()
            raise

    def generate(self, prompts: Sequence[Prompt], sampling: Sampling, seeds: Sequence[int],
                 responses: Optional[Sequence[int]] = None) -> list[Response]:
        require_usable(self._failed_version)
        check_request(prompts, sampling, seeds, self.max_model_len, responses)
        counts = [sampling.responses] * len(prompts) if responses is None else responses
        rows = [{"token_ids": list(p.token_ids), "seeds": [response_seed(s, g) for g in range(count)]}
                for p, s, count in zip(prompts, seeds, counts, strict=True)]
        n = len(self._servers)
        shares = [k for k in range(n) if rows[k::n]]
        parts = list(self._pool.map(lambda k: self._generate(self._servers[k], rows[k::n], prompts[k::n], sampling), shares))
        return [response for i in range(len(prompts)) for response in parts[i % n][i // n]]

    def _generate(self, server: Server, rows: list[dict], prompts: Sequence[Prompt], sampling: Sampling) -> list[list[Response]]:
        """The responses of each prompt, one for each of its row's seeds."""
        body = {"prompts": rows, "sampling": {
            "temperature": sampling.temperature, "top_p": sampling.top_p, "top_k": sampling.top_k, "max_tokens": sampling.max_new_tokens,
            "stop_token_ids": self._stop_token_ids, "ignore_eos": True, "logprobs": 0, "detokenize": False}}
        asked = sum(len(row["seeds"]) for row in rows)
        answer = _arrays(server.post("/fastsched/generate", body, f"{len(rows)} prompts, {asked} responses"))
        stale = set(answer["versions"].tolist()) - {str(self.weight_version)}
        if stale:
            raise SyncError(f"rollout server {server.url}: responses of weight version {', '.join(sorted(stale))}, "
                            f"expected {self.weight_version}; does another run use this server?")
        ends = np.cumsum(answer["lengths"])[:-1]
        tokens, logps = np.split(answer["token_ids"], ends), np.split(answer["logp"], ends)
        self.missing_logprobs += int(np.isnan(answer["logp"]).sum())
        stops = np.cumsum([len(row["seeds"]) for row in rows])
        return [[Response(prompt.row, tuple(prompt.token_ids), tuple(tokens[i].tolist()), logps[i],
                          "stop" if answer["stopped"][i] else "length", self.weight_version)
                 for i in range(stop - len(row["seeds"]), stop)] for prompt, row, stop in zip(prompts, rows, stops, strict=True)]

    def load_weights(self, named_tensors: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        require_usable(self._failed_version)
        self._failed_version = version
        self._everywhere(lambda server: server.post("/pause", mode="wait"))
        self._everywhere(lambda server: server.post("/start_weight_update"))
        for number, chunk in enumerate(_chunks(checked(named_tensors, self._shapes, self.dtype))):
            self._send(chunk, f"weight version {version}, file {number} from {next(iter(chunk))}")
        self._everywhere(lambda server: server.post("/finish_weight_update", {"weight_version": str(version)}))
        self._everywhere(_drop_prefixes)
        self._everywhere(lambda server: server.post("/resume"))
        self.weight_version = version
        self._failed_version = None

    def _send(self, chunk: dict[str, torch.Tensor], what: str) -> None:
        with tempfile.NamedTemporaryFile(dir=self._transfer_dir, prefix="fastsched-weights-", suffix=".safetensors") as file:
            save_file(chunk, file.name)
            self._everywhere(lambda server: server.post("/update_weights", {"update_info": {"path": file.name}}, what))

    def score(self, token_ids: Sequence[int]) -> np.ndarray:
        """The same of every server; the check of a weight sync sees the one that is furthest off."""
        require_usable(self._failed_version)
        require(2 <= len(token_ids) < self.max_model_len,
                f"score: {len(token_ids)} tokens; needs at least 2 and fewer than the engine's {self.max_model_len}")
        body = {"token_ids": list(map(int, token_ids))}
        scores = [_arrays(answer)["logp"] for answer in self._everywhere(lambda server: server.post("/fastsched/score", body))]
        for server, logp in zip(self._servers[1:], scores[1:], strict=True):
            if not np.array_equal(logp, scores[0]):
                raise SyncError(f"rollout servers {self._servers[0].url} and {server.url} disagree at weight version "
                                f"{self.weight_version}: |difference of logp| {np.abs(logp - scores[0]).max():.3g} at most")
        return scores[0]

    def fingerprints(self) -> dict[str, dict[str, int | None]]:
        answers = self._everywhere(lambda server: server.post("/collective_rpc", {"method": "fingerprints"}))
        return {f"rollout server {s.url}": a.json()["results"][0] for s, a in zip(self._servers, answers, strict=True)}

    def _everywhere(self, call) -> list:
        return list(self._pool.map(call, self._servers))

    def close(self) -> None:
        for server in self._servers:
            server.close()
        self._servers = []


def _drop_prefixes(server: Server) -> None:
    if not server.post("/reset_prefix_cache").json().get("success"):
        raise SyncError(f"rollout server {server.url}: vLLM refused to drop its prefix cache, which requests that never ended, or another "
                        "run's, still hold; what it computes next could mix weights")


def _arrays(answer: httpx.Response) -> dict[str, np.ndarray]:
    with np.load(io.BytesIO(answer.content)) as arrays:
        return dict(arrays)


def _chunks(weights: Iterator[tuple[str, torch.Tensor]]) -> Iterator[dict[str, torch.Tensor]]:
    """Weights in CPU memory, about `CHUNK_BYTES` at a time."""
    chunk: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        chunk[name] = tensor.cpu().contiguous()
        if sum(t.nbytes for t in chunk.values()) >= CHUNK_BYTES:
            yield chunk
            chunk = {}
    if chunk:
        yield chunk


def _rank_and_world() -> tuple[int, int]:
    if dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def transfer_dir(asked: str | None) -> Path:
    """Where weights pass: the folder asked for, shared memory, or the folder for temporary files. Removes nothing."""
    if asked:
        require(Path(asked).is_dir(), f"rollout.transfer_dir: there is no folder {asked}")
        return Path(asked)
    shared = Path("/dev/shm")
    return shared if shared.is_dir() and shutil.disk_usage(shared).free > CHUNK_BYTES else Path(tempfile.gettempdir())


def _joined(cfg: RolloutConfig, rank: int, world: int) -> list[Server]:
    """This rank's share of `cfg.servers`; each must be ready."""
    if not cfg.servers:
        return []
    require(len(cfg.servers) % world == 0, f"rollout.servers: {len(cfg.servers)} servers cannot be split over {world} ranks")
    servers = [Server(url.rstrip("/"), cfg.timeout_s) for url in cfg.servers[rank::world]]
    for server in servers:
        server.get("/health")
    return servers


def own_device(environment: Mapping[str, str]) -> dict[str, str]:
    """What shows the servers of a rank that rank's GPU only: they know no LOCAL_RANK, and all would take the first one."""
    place = int(environment.get("LOCAL_RANK", "0"))
    visible = [name.strip() for name in environment.get("CUDA_VISIBLE_DEVICES", "").split(",") if name.strip()]
    require(not visible or place < len(visible),
            f"LOCAL_RANK {place}: CUDA_VISIBLE_DEVICES lists {len(visible)} devices; start as many ranks as devices, or show more of them")
    return {"CUDA_VISIBLE_DEVICES": visible[place] if visible else str(place)}


def _started(model_path: str | Path, cfg: RolloutConfig, options: list[str], rank: int, world: int, log_dir: Path | None) -> list[Server]:
    """`cfg.replicas` servers for this rank, ready; cores are shared out among those of all ranks."""
    folder = log_dir or Path(tempfile.mkdtemp(prefix="fastsched-servers-"))
    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    threads = int(os.environ.get("OMP_NUM_THREADS", "0")) or max(1, len(os.sched_getaffinity(0)) // (cfg.replicas * local))
    device = own_device(os.environ) if torch.cuda.is_available() else {}
    processes: list[ServerProcess] = []
    try:
        for k in range(cfg.replicas):
            log = folder / f"server-{rank * cfg.replicas + k}.log"
            processes.append(ServerProcess(Path(model_path), ["--rollout", *options], log, threads=threads, environment=device))
        for process in processes:
            process.wait_ready(cfg.start_timeout_s)
    except BaseException:
        for process in processes:
            process.close()
        raise
    return [Server(process.url, cfg.timeout_s, process) for process in processes]
