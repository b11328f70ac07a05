"""Where TRL comes from, and the configurations of it that are tried on this machine before anything is measured."""

import importlib.metadata
import shutil
import subprocess
import sys
from pathlib import Path

from fastsched.config import ConfigError, default_cache_dir

REQUIREMENTS = {"trl": Path(__file__).with_name("trl.txt")}
ZERO_1 = {"zero_optimization": {"stage": 1}, "bf16": {"enabled": "auto"}, "gradient_clipping": "auto",
          "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto", "zero_allow_untested_optimizer": True}
CANDIDATES = {
    "tiny": {
        "transformers generate": {"weights": "float32", "autocast": False, "parts": 1},
        "transformers generate, 4 micro-batches": {"weights": "float32", "autocast": False, "parts": 4},
        "continuous batching": {"weights": "float32", "autocast": False, "parts": 1,
                                "options": {"use_transformers_continuous_batching": True,
                                            "transformers_continuous_batching_config": {"max_memory_percent": 0.02}}},
        "vLLM colocated": {"weights": "float32", "autocast": False, "parts": 1, "vllm": True},
    },
    "smollm2": {
        "transformers generate, autocast": {"weights": "float32", "autocast": True, "parts": 1},
        "transformers generate, autocast, 4 micro-batches": {"weights": "float32", "autocast": True, "parts": 4},
        "transformers generate, DeepSpeed ZeRO-1": {"weights": "float32", "autocast": True, "parts": 4, "deepspeed": True,
                                                    "options": {"deepspeed": ZERO_1}},
        "vLLM colocated, autocast": {"weights": "float32", "autocast": True, "parts": 4, "vllm": True},
        "transformers generate, bf16 weights, no fp32 master": {"weights": "bfloat16", "autocast": False, "parts": 4, "other": True},
    },
}
"""`weights`: dtype of the parameters as loaded, and of the optimizer's state; `autocast`: bf16 products over fp32 weights; `parts`:
micro-batches of a step; `vllm`, `deepspeed`: the package is used (else it is hidden); `options`: further arguments of GRPOConfig; `other`:
another optimizer than ours (its weights are rounded to bf16 after every step), tried and shown, never chosen. Continuous batching would
take most of the machine's memory for its cache."""


def requirement(peer: str) -> str:
    """As pip takes it: trl==1.16.0."""
    return REQUIREMENTS[peer].read_text().split()[0]


def peer_folder(peer: str) -> Path | None:
    """The folder to put in front of the peer's import path; None where this environment holds the pinned version already.

    It is filled once, without dependencies, so that both sides run the same torch and transformers. ConfigError where pip cannot.
    """
    wanted = requirement(peer)
    name, version = wanted.split("==")
    if installed_version(name) == version:
        return None
    folder = default_cache_dir().resolve() / "peers" / wanted.replace("==", "-")
    if not folder.is_dir():
        install(peer, folder)
    return folder


def installed_version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def install(peer: str, folder: Path) -> None:
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    done = subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps",
                           "--require-hashes", "--target", str(partial), "-r", str(REQUIREMENTS[peer])], capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise ConfigError(f"--peer {peer}: {requirement(peer)} is not installed and pip could not fetch it ({said[-1][:300]}); give pip an "
                          f"index that has it, or install it into this environment: pip install --no-deps {requirement(peer)}")
    partial.rename(folder)
