"""`fastsched export`: a checkpoint's policy, or its average, in Hugging Face layout."""

import argparse
from pathlib import Path

from fastsched.commands.run_folder import checkpoint_for, export_checkpoint, require_empty
from fastsched.config import DONE


def run(arguments: list[str]) -> int:
    own = _parser().parse_args(arguments)
    name = "export" + "-average" * own.average + (f"-{own.quantize}" if own.quantize else "")
    out = own.out or own.run / name
    if own.quantize:
        from fastsched.commands.quantize import export_quantized

        export_quantized(own.run, out, average=own.average, best=own.best)
    else:
        export_run(own.run, out, average=own.average, best=own.best)
    print(out)
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastsched export", description="Write the trained model in Hugging Face layout (safetensors).")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--best", action="store_true", help="the best checkpoint (train.keep_best) instead of the last")
    parser.add_argument("--quantize", choices=("nf4",), help="linear layers in four bits (bitsandbytes), with held-out accuracy before and "
                        "after; transformers loads the folder, vLLM does not")
    parser.add_argument("--out", type=Path, help="default: RUN/export, with -average and -nf4 where asked for")
    return parser


def export_run(run_dir: Path, out: Path, *, average: bool, best: bool = False) -> Path:
    """Write the last (`best`: the best) checkpoint's policy, or its average, as a folder that transformers and vLLM load."""
    require_empty(out)
    return export_checkpoint(run_dir, checkpoint_for(run_dir, "export", best=best), out, average=average)
