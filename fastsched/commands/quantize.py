"""`fastsched export --quantize nf4`: the policy in four bits, and what that costs in held-out accuracy."""

import importlib.metadata
import json
import shutil
import tempfile
from contextlib import closing
from dataclasses import replace
from pathlib import Path

from fastsched.commands.evaluate import in_one_process
from fastsched.commands.run_folder import checkpoint_for, export_checkpoint, require_empty
from fastsched.config import Config
from fastsched.config.arguments import run_config
from fastsched.engines.models.quantize import quantize_nf4
from fastsched.loop.assemble import assemble_evaluation, sampler_of
from fastsched.record.checkpoint import step_of
from fastsched.record.log import RunLog
from fastsched.record.tables import replace_text

LOADING = "transformers loads this folder, on a CPU and on CUDA; vLLM 0.32 refuses it (bitsandbytes is not among its quantisations)"


def export_quantized(run_dir: Path, out: Path, *, average: bool, best: bool = False) -> dict:
    """Write the last (`best`: the best) checkpoint's policy in NF4 to `out`, and beside it export.json, which is returned.

    Accuracy before and after is greedy, by bin, on the run's held-out prompts; both are sampled by the transformers engine in the
    run's dtype, so that they differ by the quantisation alone.
    """
    require_empty(out)
    checkpoint = checkpoint_for(run_dir, "export", best=best)
    step = step_of(checkpoint)
    with tempfile.TemporaryDirectory() as folder:
        plain = export_checkpoint(run_dir, checkpoint, Path(folder) / "plain", average=average)
        cfg = run_config(run_dir)
        size = quantize_nf4(plain, out, cfg.model.dtype)
        for file in plain.iterdir():
            if not (out / file.name).exists() and not file.name.endswith(".safetensors"):
                shutil.copy(file, out)
        before, after = _accuracies(cfg, plain, out, step, Path(folder) / "log")
    result = {"run": run_dir.resolve().name, "step": step, "average": average,
              "quantization": {"scheme": "nf4", "bitsandbytes": importlib.metadata.version("bitsandbytes"),
                               "linear_bytes_bfloat16": size.bfloat16, "linear_bytes_nf4": size.nf4},
              "accuracy_before": before, "accuracy_after": after, "loading": LOADING}
    replace_text(out / "export.json", json.dumps(result, indent=2) + "\n")
    print(f"linear layers: {size.nf4:,} bytes, {size.nf4 / size.bfloat16:.2f} of bfloat16")
    print(LOADING)
    for label, was in before.items():
        print(f"  {label:<10} {was:6.1%} -> {after[label]:6.1%}")
    return result


def _accuracies(cfg: Config, plain: Path, quantised: Path, step: int, log_dir: Path) -> tuple[dict[str, float], dict[str, float]]:
    rollout = replace(in_one_process(replace(cfg.rollout, replicas=1)), engine="transformers")
    cfg = replace(cfg, model=replace(cfg.model, name=str(plain)), rollout=rollout,
                  log=replace(cfg.log, tensorboard=False, wandb=False))
    with RunLog(log_dir, cfg.log, cfg.train.steps) as log:
        log.capture_output()
        with assemble_evaluation(cfg, log_dir, log) as evaluator:
            before = evaluator.evaluate(step).by_bin
            evaluator.rollout.close()
            with closing(sampler_of(cfg, quantised, log_dir, log.warn)) as rollout:
                return before, replace(evaluator, rollout=rollout).evaluate(step).by_bin
