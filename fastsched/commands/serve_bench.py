"""`fastsched serve-bench`: a run's policy behind vLLM's OpenAI-compatible server, and its latency under load from this process."""

import argparse
import json
import os
import tempfile
from pathlib import Path

import numpy as np

from fastsched.commands.run_folder import checkpoint_for, export_checkpoint
from fastsched.config import DONE, Config, ConfigError
from fastsched.config.arguments import run_config
from fastsched.record.checkpoint import step_of
from fastsched.record.tables import replace_text

START_S = 300.0


def run(arguments: list[str]) -> int:
    own = _parser().parse_args(arguments)
    result = serve_bench(own.run, batch=own.batch, requests=own.requests, max_new_tokens=own.max_new_tokens, average=own.average,
                         port=own.port)
    from fastsched.commands.load import figures_text

    print(figures_text(result))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastsched serve-bench", description="Latency and throughput of a run's policy behind vLLM's "
                                     "OpenAI-compatible server, on loopback, under load from this process. Writes RUN/serve_bench.json.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, default=4, help="requests open at any time")
    parser.add_argument("--requests", type=int, default=64, help="requests in all; as many as --batch come before and are not counted")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, help="default: rollout.max_new_tokens of the run")
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    return parser


def serve_bench(run_dir: Path, *, batch: int, requests: int, max_new_tokens: int | None, average: bool, port: int = 0) -> dict:
    """Serve the last checkpoint on loopback, put it under load, write RUN/serve_bench.json and return what is in it.

    ConfigError: no checkpoint, a port that is taken, a server that dies or is not ready in `START_S`. ServerError: a request that
    fails or takes longer than `REQUEST_S`. The server's output is in RUN/serve_bench.log. It ends with this function, and with us.
    """
    checkpoint = checkpoint_for(run_dir, "serve-bench", best=False)
    from fastsched.commands.load import Load, figures, put_under_load
    from fastsched.engines.models.loading import stop_token_ids
    from fastsched.engines.rollout.server_process import ServerProcess, engine_options

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
              "cores": len(os.sched_getaffinity(0)), "server_start_s": ready, **figures(load, answers, seconds)}
    replace_text(run_dir / "serve_bench.json", json.dumps(result, indent=2) + "\n")
    return result


def _held_out(cfg: Config, model: Path) -> list[list[int]]:
    from fastsched.engines.models.loading import load_tokenizer
    from fastsched.loop.prepare import load_data

    _, heldout = load_data(cfg.data, load_tokenizer(model, cfg.model), cfg.train.seed, cfg.train.prompts_per_step)
    if not len(heldout):
        raise ConfigError("serve-bench: the run has no held-out prompts (data.eval_per_bin)")
    return [list(heldout.prompt(i).token_ids) for i in np.random.default_rng(0).permutation(len(heldout)).tolist()]
