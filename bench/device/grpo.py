"""GRPO with transformers generate and DeepSpeed ZeRO-2 on a random Qwen3, of 0.6 B parameters unless SMALL.

What is learnt of a run is its metrics, which it appends after every update: whatever becomes of the process, the updates
that it made are reported. Model and run folder live in $SCRATCH and are not kept.
"""

import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from bench.device.rows import DEVICE, OUT, SMALL, row

STEPS = 2 if SMALL else 10
NEEDS = (
    "accelerate", "binpacking", "datasets", "deepspeed", "dill", "docstring_parser", "hjson", "jsonargparse", "multiprocess", "numpy",
    "pebble", "pydantic", "pydantic_core", "rich", "safetensors", "threadpoolctl", "transformers", "xxhash", "yaml",
)
"""What this run imports beside torch; the machine's image lacks some of it (see device.sh)."""


def coin(prompt, response, answer, meta) -> float:
    """A reward that no model can learn, so that every group carries a gradient."""
    return float(random.random() < 0.5)


def grpo() -> None:
    """Within $LIMIT seconds, less what ending takes."""
    deadline = time.monotonic() + float(os.environ.get("LIMIT", "140")) - 10
    if missing := [name for name in NEEDS if find_spec(name) is None]:
        row("grpo", "not run", note=f"missing here: {', '.join(missing)}; put their wheels into $WHEELS")
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(124))  # of `timeout`: what was started is ended too
    scratch = Path(tempfile.mkdtemp(dir=os.environ.get("SCRATCH")))
    try:
        make_model(scratch / "model")
        start = time.monotonic()
        ended = train(scratch / "model", scratch / "run", deadline)
        report(scratch / "run" / "metrics.jsonl", ended, time.monotonic() - start)
    finally:
        shutil.rmtree(scratch)


def train(model: Path, run: Path, deadline: float) -> str:
    """Runs until all updates are recorded, the process ends or the deadline comes; says which. The last checkpoint is not waited for."""
    options = {
        "model.name": model,
        "model.dtype": "float32" if SMALL else "bfloat16",
        "rollout.engine": "transformers",
        "rollout.max_new_tokens": 8 if SMALL else 128,
        "learner.zero_stage": 2,
        "learner.micro_batch_tokens": 1024 if SMALL else 16384,
        "train.steps": STEPS,
        "train.checkpoint_every": 0,
        "train.prompts_per_step": 4 if SMALL else 32,
        "train.eval_at_ends": "false",
        "reward.kind": "bench.device.grpo:coin",
        "data.size": 2000,
        "log.plots": "false",
        "log.tensorboard": "false",
        "run_dir": run,
    }
    arguments = [x for key, value in options.items() for x in (f"--{key}", str(value))]
    command = [sys.executable, "-m", "fastsched.cli", "train", "--preset", "tiny-cpu", *arguments]
    process = subprocess.Popen(command, stdout=sys.stderr, start_new_session=True)
    try:
        while process.poll() is None:
            if len(updates(run / "metrics.jsonl")) >= STEPS:
                return "all updates"
            if time.monotonic() > deadline:
                return "out of time"
            time.sleep(0.5)
        return f"exit code {process.returncode}"
    finally:
        end_session(process)


def end_session(process: subprocess.Popen) -> None:
    """The process and its reward workers, whether or not it still lives."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()


def updates(metrics: Path) -> list[dict]:
    lines = metrics.read_text().split("\n")[:-1] if metrics.exists() else []  # whole lines: the last one may be half written
    return [json.loads(line) for line in lines]


def report(metrics: Path, ended: str, seconds: float) -> None:
    """Medians without the first two updates, which compile, where there are more."""
    done = updates(metrics)
    if not done:
        row("grpo", f"no update in {seconds:.0f} s", note=ended)
        return
    shutil.copy(metrics, OUT / "grpo-metrics.jsonl")
    settled = done[2:] or done
    median = lambda name: statistics.median(x[name] for x in settled)
    row("grpo", f"{len(done)} of {STEPS} updates, {seconds:.0f} s in all, {ended}", ms=1e3 * median("t_step"),
        learn_ms=1e3 * median("t_learn"), tokens_per_s=median("tokens_per_s"), peak_gib=max(x["peak_mem_gb"] for x in done))


def make_model(folder: Path) -> None:
    from fastsched.engines.models.tiny import random_tiny, tiny_tokenizer

    if SMALL:
        random_tiny(folder)
        return
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
        num_key_value_heads=8, head_dim=128, tie_word_embeddings=True,
        bos_token_id=None, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id,
    )
    with torch.device(DEVICE):
        model = Qwen3ForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
