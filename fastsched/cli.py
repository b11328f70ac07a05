"""`fastsched train | cluster | eval | report | export | serve-bench | presets`.

Exit codes: 0 done, 2 bad configuration or input, 3 stopped by a guard or a failed part, 130 interrupted
(train: after a checkpoint), 143 ended by SIGTERM (eval, export, serve-bench; train: 130).
"""

import argparse
import os
import shlex
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Iterator, Sequence

from fastsched.config import BAD_INPUT, DONE, GUARD, INTERRUPTED, Config, ConfigError, FeaturesMissing
from fastsched.config.arguments import config_parser, parse_config, preset_names, preset_path
from fastsched.config.help import short_help
from fastsched.types import EngineError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. An error in configuration or input is one line on stderr."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    for library in ("HF_DATASETS", "HF_HUB"):
        os.environ.setdefault(f"{library}_DISABLE_PROGRESS_BARS", "1")  # the run's own progress is the only one
    arguments = [a for a in arguments if not a.startswith(("--local_rank", "--local-rank"))]  # the deepspeed launcher puts it first
    commands = {"train": _train, "cluster": _cluster, "eval": _eval, "report": _report, "export": _export, "serve-bench": _serve_bench,
                "presets": _presets}
    if not arguments or arguments[0] not in commands:
        print(f"usage: fastsched {{{','.join(commands)}}} ...  (fastsched COMMAND --help)", file=sys.stderr)
        return DONE if arguments and arguments[0] in ("-h", "--help") else BAD_INPUT
    try:
        with _cleaning_up(arguments[0] in ("eval", "export", "serve-bench")):
            return commands[arguments[0]](arguments[1:])
    except KeyboardInterrupt:
        print("fastsched: interrupted", file=sys.stderr)
        return INTERRUPTED
    except ConfigError as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"fastsched: {error}", file=sys.stderr)
        return BAD_INPUT
    except EngineError as error:
        print(f"fastsched: {error}", file=sys.stderr)
        return GUARD


@contextmanager
def _cleaning_up(wanted: bool) -> Iterator[None]:
    """SIGTERM ends a command as Ctrl-C does, through its context managers: models are copied into temporary folders."""
    former = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM)) if wanted else None
    try:
        yield
    finally:
        if wanted:
            signal.signal(signal.SIGTERM, former)


def _train(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        _print(config_parser().format_help() if "all" in arguments else short_help())
        return DONE
    own, rest = _train_parser().parse_known_args(arguments)
    source = _source(own)
    run_dir = Path(own.run_dir or f"runs/{own.preset or Path(own.config or 'train').stem}")
    if own.resume and not source:
        source = str(run_dir / "config.yaml")
    cfg = _config(source, rest, resumed=own.resume)
    if own.dry_run:
        from fastsched.commands.dry_run import dry_run

        _print(dry_run(cfg, run_dir))
        return DONE
    from fastsched.commands.train import train

    try:
        return train(cfg, run_dir, resume=own.resume)
    except FeaturesMissing as error:
        given = ["--preset", own.preset] if own.preset else ["--config", source] if source else []
        raise ConfigError(f"{error}; run `{shlex.join(['fastsched', 'cluster', *given, *rest])}`") from error


def _cluster(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        _print("usage: fastsched cluster [--preset NAME | --config FILE.yaml] [--section.key VALUE ...]\n\n"
               "Embedding, difficulty and cluster of every training row, by the base policy of the configuration (model.name).\n"
               "The keys are those of `fastsched train --help all`; its own are features.*. A killed run goes on where it stopped.")
        return DONE
    own, rest = _source_parser("cluster").parse_known_args(arguments)
    cfg = _config(_source(own), rest)
    from fastsched.commands.cluster import cluster

    return cluster(cfg)


def _source(own: argparse.Namespace) -> str | None:
    if own.preset and own.config:
        raise ConfigError("--preset and --config exclude each other: copy the preset's file and edit it, or override single keys")
    return str(preset_path(own.preset)) if own.preset else own.config


def _config(source: str | None, overrides: list[str], *, resumed: bool = False) -> Config:
    """`resumed`: keys that were removed since and change nothing are left out; the log of the run names those of its own file."""
    return parse_config((["--config", source] if source else []) + overrides, warn=(lambda line: None) if resumed else None)


def _source_parser(command: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=f"fastsched {command}", add_help=False, allow_abbrev=False)
    parser.add_argument("--preset")
    parser.add_argument("--config")
    return parser


def _train_parser() -> argparse.ArgumentParser:
    parser = _source_parser("train")
    parser.add_argument("--run_dir", "--run-dir")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--dry-run", "--dry_run", action="store_true")
    return parser


def _eval(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched eval", description="Greedy held-out accuracy by bin of a run's last checkpoint.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--best", action="store_true", help="the best checkpoint (train.keep_best) instead of the last")
    own = parser.parse_args(arguments)
    from fastsched.commands.evaluate import evaluate_run

    return evaluate_run(own.run, average=own.average, best=own.best)


def _report(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched report", description="Plots and report.html of one run, or several overlaid.")
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, help="default: RUN/report.html; for several runs report-overlay.html beside the first")
    parser.add_argument("--tp-score", action="store_true", help="of one run: where in a response each token occurs (arXiv 2605.25381)")
    own = parser.parse_args(arguments)
    from fastsched.commands.report import report

    out = own.out or (own.runs[0] / "report.html" if len(own.runs) == 1 else own.runs[0].parent / "report-overlay.html")
    print(report(own.runs, out, tp_score=own.tp_score))
    return DONE


def _export(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched export", description="Write the trained model in Hugging Face layout (safetensors).")
    parser.add_argument("run", type=Path)
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--best", action="store_true", help="the best checkpoint (train.keep_best) instead of the last")
    parser.add_argument("--quantize", choices=("nf4",), help="linear layers in four bits (bitsandbytes), with held-out accuracy before and "
                        "after; transformers loads the folder, vLLM does not")
    parser.add_argument("--out", type=Path, help="default: RUN/export, with -average and -nf4 where asked for")
    own = parser.parse_args(arguments)
    name = "export" + "-average" * own.average + (f"-{own.quantize}" if own.quantize else "")
    out = own.out or own.run / name
    if own.quantize:
        from fastsched.commands.quantize import export_quantized

        export_quantized(own.run, out, average=own.average, best=own.best)
    else:
        from fastsched.commands.export import export_run

        export_run(own.run, out, average=own.average, best=own.best)
    print(out)
    return DONE


def _serve_bench(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="fastsched serve-bench", description="Latency and throughput of a run's policy behind vLLM's "
                                     "OpenAI-compatible server, on loopback, under load from this process. Writes RUN/serve_bench.json.")
    parser.add_argument("run", type=Path)
    parser.add_argument("--batch", type=int, default=4, help="requests open at any time")
    parser.add_argument("--requests", type=int, default=64, help="requests in all; as many as --batch come before and are not counted")
    parser.add_argument("--max_new_tokens", "--max-new-tokens", type=int, help="default: rollout.max_new_tokens of the run")
    parser.add_argument("--average", action="store_true", help="the averaged policy instead of the policy")
    parser.add_argument("--port", type=int, default=0, help="default: any free one")
    own = parser.parse_args(arguments)
    from fastsched.commands.serve_bench import figures_text, serve_bench

    result = serve_bench(own.run, batch=own.batch, requests=own.requests, max_new_tokens=own.max_new_tokens, average=own.average,
                         port=own.port)
    print(figures_text(result))
    return DONE


def _presets(arguments: list[str]) -> int:
    _print("\n".join(f"{name:28} {_first_line(preset_path(name))}" for name in preset_names()))
    return DONE


def _first_line(path: Path) -> str:
    return path.read_text().splitlines()[0].removeprefix("#").strip()


def _print(text: str) -> None:
    """To stdout; a reader that has seen enough (`| head`, `less`) is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more when it ends


if __name__ == "__main__":
    sys.exit(main())
