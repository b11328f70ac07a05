"""`fastsched export`: a checkpoint's policy, or its average, in Hugging Face layout."""

import shutil
from pathlib import Path

from fastsched.commands.run_folder import checkpoint_for, require_empty
from fastsched.config import ConfigError
from fastsched.config.arguments import run_config


def export_run(run_dir: Path, out: Path, *, average: bool, best: bool = False) -> Path:
    """Write the last (`best`: the best) checkpoint's policy, or its average, as a folder that transformers and vLLM load."""
    require_empty(out)
    return export_checkpoint(run_dir, checkpoint_for(run_dir, "export", best=best), out, average=average)


def export_checkpoint(run_dir: Path, checkpoint: Path, out: Path, *, average: bool) -> Path:
    """The same of one checkpoint, which is known to be intact, into a folder that is empty or not there."""
    from fastsched.loop.prepare import prepare_model

    cfg = run_config(run_dir)
    model_path = prepare_model(cfg)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out: {out} cannot be made ({error.strerror}); give another folder") from error
    for file in model_path.iterdir():
        if file.is_file() and file.suffix not in (".safetensors", ".bin", ".pt") and file.name != "model.safetensors.index.json":
            shutil.copy(file, out)
    if average:
        _write_average(checkpoint / "average.safetensors", out / "model.safetensors", cfg.model.dtype)
    else:
        shutil.copy(checkpoint / "policy.safetensors", out / "model.safetensors")
    return out


def _write_average(source: Path, target: Path, dtype: str) -> None:
    """The averaged policy, fp32 in a checkpoint, in the model's dtype."""
    import torch
    from safetensors.torch import load_file, save_file

    save_file({name: w.to(getattr(torch, dtype)) for name, w in load_file(source).items()}, target, metadata={"format": "pt"})
