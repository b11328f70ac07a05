"""`fastsched train | eval | report | export | presets`.

Exit codes: 0 done, 2 bad configuration or input, 3 stopped by a guard, 130 interrupted after a checkpoint.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Sequence

from fastsched.arguments import config_parser, parse_config, preset_names, preset_path
from fastsched.config import ConfigError

DONE, BAD_INPUT, GUARD, INTERRUPTED = 0, 2, 3, 130


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error in configuration or input is one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for library in ("HF_DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")  # the run's own progress is the only one
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]  # the deepspeed launcher puts it first
    commands = {"train": _train, "eval": _eval, "report": _report, "export": _export, "presets": _presets}
    if not arguments or arguments[0] not in commands:
        print(f"usage: fastsched {{{','.join(commands)}}} ...  (fastsched COMMAND --help)", file=sys.stderr)
        return DONE if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    try:
        return commands[arguments[0]](arguments[1:])
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"fastsched: {error}", file=sys.stderr)
        return BAD_INPUT


def _train(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        config_parser().print_help()
        return DONE
    own, rest = _train_parser().parse_known_args(arguments)
    if own.preset and own.config:
        raise ConfigError("--preset and --config exclude each other: copy the preset's file and edit it, or override single keys")
    source = str(preset_path(own.preset)) if own.preset else own.config
    run_dir = Path(own.run_dir or f"runs/{own.preset or Path(own.config or 'train').stem}")
    if own.resume and not source:
        source = str(run_dir / "config.yaml")
    cfg = parse_config((["--config", source] if source else []) + rest)
    if own.dry_run:
        from fastsched.dryrun import dry_run

        print(dry_run(cfg, run_dir))
        return DONE
    from fastsched.commands import train

    return train(cfg, run_dir, resume=own.resume)


def _train_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="fastsched train", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    parser.add_argument("--run_dir", "--run-dir")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    return parser


def _eval(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched eval", description="Greedy held-out accuracy by bin of a run's last checkpoint.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    own = parser.parse_args(arguments)
    from fastsched.commands import evaluate_run

    return evaluate_run(own.run, average=own.average)


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched report", description="Plots and report.html of one run, or several overlaid.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: RUN/report.html; for several runs report-overlay.html beside the first")
    own = parser.parse_args(arguments)
    from fastsched.report import write_report

    out = own.out or (own.runs[0] / "report.html" if len(own.runs) == 1 else own.runs[0].parent / "report-overlay.html")
    print(write_report(own.runs, out))
    return DONE


def _export(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched export", description="Write the trained model in Hugging Face layout (safetensors).")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--out", type=Path, help="default: RUN/export or RUN/export-average")
    own = parser.parse_args(arguments)
    from fastsched.commands import export_run

    print(export_run(own.run, own.out or own.run / ("export-average" if own.average else "export"), average=own.average))
    return DONE


def _presets(arguments: list[str]) -> int:
    for name in preset_names():
        first = preset_path(name).read_text().splitlines()[0].removeprefix("#").strip()
        print(f"{name:28} {first}")
    return DONE


if __name__ == "__main__":
    sys.exit(main())
