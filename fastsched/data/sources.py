"""Where prompts come from: generated rows, local files, hub data sets; each becomes one `datasets.Dataset` of rows."""

import hashlib
import json
from pathlib import Path

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from fastsched.config import ConfigError, DataConfig, require
from fastsched.data.encode import Columns
from fastsched.data.tasks import Rows

FORMATS = {".jsonl": "json", ".parquet": "parquet"}
GENERATED = Columns(prompt="prompt", answer="answer", difficulty="bin", meta="meta", answer_optional=True)


def from_rows(rows: Rows) -> datasets.Dataset:
    columns = {"prompt": rows.prompt, "answer": rows.answer, "bin": rows.bin, "meta": rows.meta, "problem": rows.problem}
    return datasets.Dataset.from_dict(columns)


def open_source(cfg: DataConfig, cache: Path) -> datasets.Dataset:
    """The rows of `data.source`, memory-mapped; ConfigError when missing, unreadable or without the columns named."""
    path = Path(cfg.source)
    if path.suffix in FORMATS:
        rows = open_file(cfg, path, cache)
    else:
        rows = open_hub(cfg)
    for key in ("prompt_column", "answer_column", "difficulty_column"):
        name = getattr(cfg, key)
        require(name is None or name in rows.column_names,
                f"data.{key}: {cfg.source} has no column {name!r}; it has {', '.join(rows.column_names)}")
    require(len(rows) > 0, f"data.source: {cfg.source} has no rows in split {cfg.split!r}")
    return rows


def open_file(cfg: DataConfig, path: Path, cache: Path) -> datasets.Dataset:
    require(path.is_file(), f"data.source: there is no file {path}")
    require(path.stat().st_size > 0, f"data.source: {path} is empty")
    try:
        return datasets.load_dataset(FORMATS[path.suffix], data_files=str(path), split=cfg.split,
                                     cache_dir=str(cache / "sources"))
    except (DatasetGenerationError, pa.ArrowInvalid) as error:
        if path.suffix == ".jsonl":
            find_broken_line(path)
        cause = error.__cause__ or error
        raise ConfigError(f"data.source: {path} cannot be read: {cause}") from error
    except ValueError as error:
        raise ConfigError(f"data.split: {cfg.split!r} of {path}: {error}") from error


def find_broken_line(path: Path) -> None:
    """Raise a ConfigError that names the first line of a .jsonl file that is not a JSON object, if there is one."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                broken = "" if not line.strip() or isinstance(json.loads(line), dict) else "not a JSON object"
            except ValueError as error:
                broken = str(error)
            require(not broken, f"data.source: {path}, line {number}: {broken}")


def open_hub(cfg: DataConfig) -> datasets.Dataset:
    try:
        return datasets.load_dataset(cfg.source, cfg.subset, split=cfg.split)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise ConfigError(f"data.source: {cfg.source!r} is no .jsonl or .parquet file, and as a data set of the hub it "
                          f"cannot be loaded: {error}") from error
    except ValueError as error:
        what = f"data.source {cfg.source}, data.subset {cfg.subset}, data.split {cfg.split}"
        raise ConfigError(f"{what}: {error}") from error


def source_digest(cfg: DataConfig, rows: datasets.Dataset) -> str:
    """Content hash of a local file; of a hub data set the fingerprint of its revision and split."""
    path = Path(cfg.source)
    if path.suffix not in FORMATS:
        return rows._fingerprint
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
