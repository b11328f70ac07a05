"""Servers that fail, hang, lie or are shared: what the rollout engine says. The server here only injects faults."""

import io
import json
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from rollout_worker import prompt
from safetensors.torch import load_file

from fastsched.config import ConfigError, RolloutConfig
from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.rollout import server_engine
from fastsched.engines.rollout.contract import require_weights
from fastsched.engines.rollout.opening import open_rollout
from fastsched.engines.rollout.server_engine import Server
from fastsched.engines.rollout.server_process import ServerError, engine_options
from fastsched.engines.rollout.weights import SyncError, expected_shapes
from fastsched.types import Sampling


class Faulty:
    """An HTTP server whose answers are set by path: status, body. Keeps what it was sent, and the files it was told to load."""

    def __init__(self):
        self.answers: dict[str, tuple[int, bytes]] = {"/reset_prefix_cache": (200, b'{"success": true}')}
        self.calls: list[str] = []
        self.bodies: list[dict] = []
        self.files: list[tuple[str, dict]] = []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                length = int(self.headers.get("Content-Length") or 0)
                body = json.loads(self.rfile.read(length) or b"{}")
                path = self.path.partition("?")[0]
                outer.calls.append(self.path)
                outer.bodies.append(body)
                if path == "/update_weights":
                    file = body["update_info"]["path"]
                    outer.files.append((file, load_file(file)))
                status, answer = outer.answers.get(path, (200, b"{}"))
                self.send_response(status)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            do_POST = do_GET

            def log_message(self, *_):
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def close(self):
        self._http.shutdown()
        self._http.server_close()


@pytest.fixture
def faulty():
    server = Faulty()
    yield server
    server.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_tiny(tmp_path_factory.mktemp("model"), tied=True, seed=0)


def joined(folder, *urls, **options):
    cfg = RolloutConfig(engine="vllm_server", servers=urls, **options)
    return open_rollout(folder, cfg, dtype="float32", max_model_len=64, seed=0, stop_token_ids=[2])


def responses(lengths, versions) -> bytes:
    buffer = io.BytesIO()
    total = sum(lengths)
    np.savez(buffer, lengths=np.array(lengths), token_ids=np.arange(total), logp=np.full(total, -1, np.float32),
             stopped=np.array([True] * len(lengths)), versions=np.array(versions))
    return buffer.getvalue()


def test_a_server_that_does_not_answer_is_named_with_call_and_time():
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerError, match=rf"rollout server {url}, /fastsched/generate \(3 prompts.*\): ReadTimeout after [0-9.]+ s"):
            Server(url, 0.3).post("/fastsched/generate", {}, "3 prompts of 2 responses")


def test_time_limit_of_a_call_is_the_configured_one(folder):
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        with pytest.raises(ServerError, match=r"/health: ReadTimeout after [0-9.]+ s"):
            joined(folder, f"http://127.0.0.1:{silent.getsockname()[1]}", timeout_s=0.4)


def test_a_server_that_refuses_is_quoted(folder, faulty):
    engine = joined(folder, faulty.url)
    faulty.answers["/fastsched/generate"] = (500, b"out of memory in the engine")
    with pytest.raises(ServerError, match=f"{faulty.url}, /fastsched/generate .1 prompts, 2 responses.*out of memory in the engine"):
        engine.generate([prompt(0, 5)], Sampling(2, 4), [1])


def test_responses_of_other_weights_are_refused(folder, faulty):
    engine = joined(folder, faulty.url)
    faulty.answers["/fastsched/generate"] = (200, responses([3, 2], ["0", "0"]))
    assert [r.token_ids for r in engine.generate([prompt(0, 5)], Sampling(2, 4), [1])] == [(0, 1, 2), (3, 4)]
    faulty.answers["/fastsched/generate"] = (200, responses([3, 2], ["0", "0,1"]))
    with pytest.raises(SyncError, match=f"{faulty.url}: responses of weight version 0,1, expected 0"):
        engine.generate([prompt(0, 5)], Sampling(2, 4), [1])


def test_prompts_are_dealt_out_and_come_back_in_order(folder):
    servers = [Faulty(), Faulty()]
    engine = joined(folder, *(s.url for s in servers))
    for server, count in zip(servers, (2, 1), strict=True):
        server.answers["/fastsched/generate"] = (200, responses([1] * count, ["0"] * count))
    rows = [r.row for r in engine.generate([prompt(k, 5) for k in range(3)], Sampling(1, 4), [1, 2, 3])]
    assert rows == [0, 1, 2]
    sent = [[len(p["seeds"]) for p in s.bodies[-1]["prompts"]] for s in servers]
    assert sent == [[1, 1], [1]] and servers[0].bodies[-1]["prompts"][1]["token_ids"] == list(prompt(2, 5).token_ids)
    for server in servers:
        server.close()


def test_weights_travel_in_files_through_the_transfer_folder(folder, faulty, tmp_path, monkeypatch):
    monkeypatch.setattr(server_engine, "CHUNK_BYTES", 100_000)
    engine = joined(folder, faulty.url, transfer_dir=str(tmp_path))
    weights = {name: torch.randn(shape) for name, shape in expected_shapes(folder).items()}
    faulty.calls.clear()
    engine.load_weights(weights.items(), 3)
    calls = [call.partition("?")[0] for call in faulty.calls]
    assert calls[:2] == ["/pause", "/start_weight_update"] and calls.count("/update_weights") == len(faulty.files) > 1
    assert calls[-3:] == ["/finish_weight_update", "/reset_prefix_cache", "/resume"] and faulty.bodies[-3] == {"weight_version": "3"}
    received = {name: tensor for _, file in faulty.files for name, tensor in file.items()}
    assert received.keys() == weights.keys() and all(torch.equal(received[n], weights[n]) for n in weights)
    assert all(Path(path).parent == tmp_path for path, _ in faulty.files) and not list(tmp_path.iterdir())
    assert engine.weight_version == 3


def test_a_sync_that_breaks_leaves_the_engine_unusable(folder, faulty):
    engine = joined(folder, faulty.url)
    faulty.answers["/update_weights"] = (500, b"bad file")
    weights = {name: torch.zeros(shape) for name, shape in expected_shapes(folder).items()}
    with pytest.raises(ServerError, match="/update_weights .weight version 3, file 0 from model.*bad file"):
        engine.load_weights(weights.items(), 3)
    with pytest.raises(SyncError, match="unusable: loading weight version 3"):
        engine.generate([prompt(0, 5)], Sampling(2, 4), [1])


def test_a_server_that_keeps_its_prefixes_is_named(folder, faulty):
    engine = joined(folder, faulty.url)
    faulty.answers["/reset_prefix_cache"] = (200, b'{"success": false}')
    weights = {name: torch.zeros(shape) for name, shape in expected_shapes(folder).items()}
    with pytest.raises(SyncError, match=f"rollout server {faulty.url}: vLLM refused to drop its prefix cache"):
        engine.load_weights(weights.items(), 3)
    with pytest.raises(SyncError, match="unusable: loading weight version 3"):
        engine.score([3, 4])


def test_a_server_that_holds_other_weights_is_named(folder):
    """The second of two ignored one tensor."""
    servers = [Faulty(), Faulty()]
    engine = joined(folder, *(s.url for s in servers))
    held = {name: k for k, name in enumerate(expected_shapes(folder))}
    for server, answer in zip(servers, (held, held | {"model.norm.weight": -1}), strict=True):
        server.answers["/collective_rpc"] = (200, json.dumps({"results": [answer]}).encode())
    with pytest.raises(SyncError, match=f"{servers[1].url} does not hold .* 1 of {len(held)} tensors differ, first model.norm.weight$"):
        require_weights(engine, held, 0)
    for server in servers:
        server.close()


def test_servers_that_disagree_are_named(folder):
    servers = [Faulty(), Faulty()]
    engine = joined(folder, *(s.url for s in servers))
    for server, value in zip(servers, (-1.0, -1.5), strict=True):
        buffer = io.BytesIO()
        np.savez(buffer, logp=np.full(4, value, np.float32))
        server.answers["/fastsched/score"] = (200, buffer.getvalue())
    with pytest.raises(SyncError, match=f"{servers[0].url} and {servers[1].url} disagree at weight version 0: .* 0.5 at most"):
        engine.score([3, 4, 5, 6, 7])
    for server in servers:
        server.close()


def test_servers_are_dealt_out_to_ranks(folder, faulty, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="rollout.servers: 1 servers cannot be split over 2 ranks"):
        joined(folder, faulty.url)
    monkeypatch.setenv("RANK", "1")
    joined(folder, "http://127.0.0.1:9", faulty.url)  # nobody listens on the first, which is rank 0's
    assert "/health" in faulty.calls


def test_a_transfer_folder_that_is_missing_is_named(folder, faulty):
    with pytest.raises(ConfigError, match="rollout.transfer_dir: there is no folder"):
        joined(folder, faulty.url, transfer_dir="/no/such/folder")


def test_engine_options_carry_every_setting():
    cfg = RolloutConfig(max_num_seqs=33, kv_cache_gb=0.25, gpu_memory_utilization=0.3)
    options = engine_options(cfg, dtype="bfloat16", max_model_len=77, seed=5)
    pairs = dict(zip(options, options[1:], strict=False))
    expected = {"--dtype": "bfloat16", "--max-model-len": "77", "--seed": "5", "--max-num-seqs": "33", "--gpu-memory-utilization": "0.3"}
    assert expected.items() <= pairs.items() and "--hf-overrides" not in pairs
    wide = engine_options(RolloutConfig(head_dtype="fp32"), dtype="bfloat16", max_model_len=77, seed=5)
    assert wide[wide.index("--hf-overrides") + 1] == '{"head_dtype": "float32"}'
    if not torch.cuda.is_available():
        assert pairs["--kv-cache-memory-bytes"] == str(2**28)


@pytest.mark.parametrize("rank, visible, own", [("1", "4,5,6", "5"), ("0", " 3 , 4", "3"), ("2", None, "2"), (None, None, "0"),
                                                ("1", "GPU-a,MIG-b", "MIG-b")])
def test_the_servers_of_a_rank_see_its_device_only(rank, visible, own):
    """The fault: without LOCAL_RANK, which servers are not given, all of them took the first GPU."""
    environment = {name: value for name, value in (("LOCAL_RANK", rank), ("CUDA_VISIBLE_DEVICES", visible)) if value is not None}
    assert server_engine.own_device(environment) == {"CUDA_VISIBLE_DEVICES": own}


def test_a_rank_without_a_device_is_refused():
    with pytest.raises(ConfigError, match="LOCAL_RANK 2: CUDA_VISIBLE_DEVICES lists 2 devices"):
        server_engine.own_device({"LOCAL_RANK": "2", "CUDA_VISIBLE_DEVICES": "0,1"})


@pytest.mark.parametrize("cuda", [False, True])
def test_the_device_is_handed_on_where_there_is_one(monkeypatch, tmp_path, cuda):
    handed = []

    class Process:
        url = "http://127.0.0.1:1"

        def __init__(self, *_, environment, **__):
            handed.append(environment)

        def wait_ready(self, timeout_s):
            pass

    monkeypatch.setattr(server_engine, "ServerProcess", Process)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "6,7")
    server_engine._started(tmp_path, RolloutConfig(engine="vllm_server", replicas=2), [], 1, 2, tmp_path)
    assert handed == [{"CUDA_VISIBLE_DEVICES": "7"} if cuda else {}] * 2
