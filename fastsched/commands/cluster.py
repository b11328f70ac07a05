"""`fastsched cluster`: progress while the features are computed, and the table of the clusters."""

import time
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from fastsched.commands.source import config_of, show, source_file, source_parser
from fastsched.config import DONE, Config
from fastsched.data.datasets import PromptSet

INTERVAL = 30.0  # seconds between lines where there is no terminal
HELP = """usage: fastsched cluster [--preset NAME | --config FILE.yaml] [--section.key VALUE ...]

Embedding, difficulty and cluster of every training row, by the base policy of the configuration (model.name).
The keys are those of `fastsched train --help all`; its own are features.*. A killed run goes on where it stopped."""


def run(arguments: list[str]) -> int:
    if "-h" in arguments or "--help" in arguments:
        show(HELP)
        return DONE
    own, overrides = source_parser("cluster").parse_known_args(arguments)
    cluster(config_of(source_file(own), overrides))
    return DONE


class RowsPerSecond(ProgressColumn):
    def render(self, task) -> Text:
        speed = task.finished_speed or task.speed
        return Text(f"{speed:,.0f} rows/s" if speed else "- rows/s")


def cluster(cfg: Config) -> None:
    """Compute, or find, the features of the training rows and print the clusters. Raises ConfigError."""
    from fastsched.engines.models.loading import load_tokenizer
    from fastsched.loop.features import features_folder
    from fastsched.loop.prepare import data_lines, load_data, prepare_model

    console = Console(highlight=False)
    model_path = prepare_model(cfg)
    tokenizer = load_tokenizer(model_path, cfg.model)
    train_set, heldout = load_data(cfg.data, tokenizer, cfg.train.seed, cfg.train.prompts_per_step)
    for line in data_lines(train_set, heldout):
        console.print(line, markup=False, soft_wrap=True)
    folder = features_folder(cfg, model_path, train_set)
    if folder.exists():
        console.print(f"cached: {folder}", markup=False, soft_wrap=True)
    else:
        _compute(cfg, model_path, tokenizer, train_set, folder, console)
        console.print(f"written: {folder}", markup=False, soft_wrap=True)
    _print_table(folder, console)


def _compute(cfg: Config, model_path: Path, tokenizer, train_set: PromptSet, folder: Path, console: Console) -> None:
    from fastsched.loop.features import compute_features

    columns = (TextColumn("rows"), BarColumn(), MofNCompleteColumn(), RowsPerSecond(), TimeRemainingColumn())
    with Progress(*columns, console=console, refresh_per_second=2, speed_estimate_period=120) as progress:
        task, last_line = progress.add_task("rows", total=len(train_set)), time.monotonic()

        def advance(rows: float) -> None:
            nonlocal last_line
            progress.advance(task, rows)
            if not console.is_terminal and time.monotonic() - last_line >= INTERVAL:
                last_line, now = time.monotonic(), progress.tasks[0]
                speed, left = now.speed or 0, now.time_remaining or 0
                console.print(f"... {now.completed:,.0f} of {now.total:,} rows, {speed:,.0f} rows/s, {left:,.0f} s left")

        compute_features(cfg, model_path, tokenizer, train_set, folder, advance)


def _print_table(folder: Path, console: Console) -> None:
    from fastsched.data.feature_store import about_features, cluster_table, open_features

    about = about_features(folder)
    sizes, difficulty = cluster_table(open_features(folder), about["clusters"])
    table = Table("cluster", "prompts", "mean difficulty (nats)")
    for column in table.columns:
        column.justify = "right"
    for k, size in enumerate(sizes.tolist()):
        table.add_row(str(k), f"{size:,}", f"{difficulty[k]:.3f}" if size else "-")
    console.print(table)
    for message in about["messages"]:
        console.print(message, markup=False, soft_wrap=True)
