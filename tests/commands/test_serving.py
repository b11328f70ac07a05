"""`serve-bench` with a real vLLM server, and what it says when the server cannot be had, dies or does not answer."""

import json
import re
import shutil
import signal
import socket
import subprocess
import sys

import pytest
from command_line import ROOT, environment
from one_array import OneArray
from processes import alive, children, members, wait_until

from fastsched.commands.load import Load, put_under_load
from fastsched.config import ConfigError
from fastsched.config.arguments import config_to_yaml, parse_config
from fastsched.engines.rollout.server_process import ServerError, ServerProcess
from fastsched.record.checkpoint import save_checkpoint

LOAD = Load(batch=2, requests=6, max_new_tokens=5, temperature=1.0, stop_token_ids=[2])


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory, random_model):
    """A run folder as far as `export` needs it: configuration and one complete checkpoint."""
    run = tmp_path_factory.mktemp("run")
    options = ["--model.name", str(random_model), "--data.size", "100", "--data.eval_per_bin", "2", "--rollout.kv_cache_gb", "0.125",
               "--train.prompts_per_step", "4", "--data.max_prompt_tokens", "64"]
    (run / "config.yaml").write_text(config_to_yaml(parse_config(options)))
    learner = OneArray()
    learner.save = lambda folder: [shutil.copy(random_model / "model.safetensors", folder / f"{name}.safetensors")
                                   for name in ("policy", "average")]
    save_checkpoint(run, 7, learner, {}, keep=1)
    return run


@pytest.mark.slow
def test_serve_bench_measures_a_real_server_and_ends_it(fastsched, run_dir):
    done = fastsched("serve-bench", str(run_dir), "--batch", "3", "--requests", "7", "--max_new_tokens", "4", "--average")
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((run_dir / "serve_bench.json").read_text())
    assert (result["requests"], result["batch"], result["max_new_tokens"], result["average"], result["step"]) == (7, 3, 4, True, 7)
    latency = result["latency_s"]
    assert 0 < latency["p50"] <= latency["p95"] <= latency["p99"] <= latency["max"] <= result["seconds"]
    assert 7 <= result["tokens"] <= 28 and result["tokens_per_s"] == pytest.approx(result["tokens"] / result["seconds"])
    assert "p50" in done.stdout and "p99" in done.stdout and "tokens/s" in done.stdout
    assert (run_dir / "serve_bench.log").read_text().count("POST /v1/completions") == 10  # 7 and 3 to warm up
    host, port = re.search(r"http://([\d.]+):(\d+) ready", done.stdout).groups()
    with socket.socket() as s, pytest.raises(ConnectionRefusedError):
        s.connect((host, int(port)))


@pytest.mark.slow
@pytest.mark.parametrize("number, when", [(signal.SIGINT, "starting"), (signal.SIGKILL, "serving")])
def test_the_server_dies_with_us(run_dir, number, when):
    port = free_port()
    command = [sys.executable, "-m", "fastsched.cli", "serve-bench", str(run_dir), "--port", str(port), "--requests", "99999"]
    process = subprocess.Popen(command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_until(lambda: children(f"--parent\0{process.pid}\0"), 120)
        if when == "serving":
            assert "ready" in next(line for line in process.stdout if "ready" in line)
        session = children(f"--parent\0{process.pid}\0")[0]
        assert len(members(session)) >= (2 if when == "serving" else 1)  # the HTTP server, and the engine when it has started
        process.send_signal(number)
        process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == (130 if number == signal.SIGINT else -signal.SIGKILL)
    wait_until(lambda: not members(session))
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # closed connections may linger
        s.bind(("127.0.0.1", port))


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_a_port_that_is_taken_is_named(run_dir, capsys):
    from fastsched.cli import main

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        assert main(["serve-bench", str(run_dir), "--port", str(port)]) == 2
    assert f"port {port} of 127.0.0.1 cannot be had (Address already in use)" in capsys.readouterr().err


def test_a_server_that_dies_at_its_start_is_named_with_the_end_of_its_log(tmp_path):
    with ServerProcess(tmp_path, ["--no-such-option"], tmp_path / "log") as server:
        with pytest.raises(ConfigError, match=rf"(?s){server.url}: ended with code 2 during start.*no-such-option"):
            server.wait_ready(120)


def test_a_server_that_is_not_ready_in_time_is_ended(tmp_path):
    with ServerProcess(tmp_path, [], tmp_path / "log") as server:
        with pytest.raises(ConfigError, match=f"{server.url}: not ready after 0.5 s"):
            server.wait_ready(0.5)
    assert not alive(server._process.pid)


def test_requests_that_fail_or_hang_are_named(monkeypatch):
    monkeypatch.setattr("fastsched.commands.load.REQUEST_S", 0.3)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(ServerError, match=f"{url}/v1/completions, request 0 .3 prompt tokens.: ConnectError after"):
            put_under_load(url, "m", [[5, 6, 7]], LOAD)
        silent.listen()
        with pytest.raises(ServerError, match="request 0 .*ReadTimeout after [0-9.]+ s"):
            put_under_load(url, "m", [[5, 6, 7]], LOAD)


def test_nothing_to_ask_is_refused():
    with pytest.raises(ConfigError, match="--batch, --requests"):
        Load(batch=0, requests=1, max_new_tokens=1, temperature=1.0, stop_token_ids=[])


def test_export_in_four_bits_says_what_it_costs(fastsched, run_dir, tmp_path):
    out = tmp_path / "nf4"
    done = fastsched("export", str(run_dir), "--quantize", "nf4", "--out", str(out))
    assert done.returncode == 0 and done.stdout.strip().splitlines()[-1] == str(out), done.stdout + done.stderr
    result = json.loads((out / "export.json").read_text())
    assert result["step"] == 7 and result["quantization"]["scheme"] == "nf4"
    assert result["accuracy_before"].keys() == result["accuracy_after"].keys() == {"1 digit", "2 digits", "3 digits", "4 digits"}
    assert "->" in done.stdout and (out / "tokenizer.json").exists() and (out / "model.safetensors").exists()
    again = fastsched("export", str(run_dir), "--quantize", "nf4", "--out", str(out))
    assert again.returncode == 2 and "is not empty" in again.stderr
