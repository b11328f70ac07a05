"""Where prompts come from: generated rows, local files, hub data sets; each becomes one `datasets.Dataset` of rows."""

import csv
import glob
import hashlib
import json
from pathlib import Path

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetGenerationError, DatasetNotFoundError

from fastsched.config import ConfigError, DataConfig, require
from fastsched.data.encode import Columns
from fastsched.data.tasks import Rows

FORMATS = {".jsonl": "json", ".parquet": "parquet", ".csv": "csv"}
GENERATED = Columns(prompt="prompt", answer="answer", difficulty="bin", meta="meta", answer_optional=True)


def from_rows(rows: Rows) -> datasets.Dataset:
    columns = {"prompt": rows.prompt, "answer": rows.answer, "bin": rows.bin, "meta": rows.meta, "problem": rows.problem}
    return datasets.Dataset.from_dict(columns)


def open_source(cfg: DataConfig, cache: Path) -> datasets.Dataset:
    """The rows of `data.source`, memory-mapped; ConfigError when missing, unreadable or without the columns named.

    A column inside another one is named with a dot, as in `reward_model.ground_truth`.
    """
    files = files_of(cfg.source)
    rows = open_files(cfg, files, cache) if files else open_hub(cfg)
    named = {key: getattr(cfg, key) for key in ("prompt_column", "answer_column", "difficulty_column")}
    if any(name and "." in name and name not in rows.column_names for name in named.values()):
        rows = rows.flatten()
    for key, name in named.items():
        require(name is None or name in rows.column_names,
                f"data.{key}: {cfg.source} has no column {name!r}; it has {', '.join(rows.column_names)}")
    require(len(rows) > 0, f"data.source: {cfg.source} has no rows in split {cfg.split!r}")
    return _numeric(rows, cfg.difficulty_column)


def files_of(source: str) -> list[Path]:
    """The local file, or the files that a pattern ("shards/*.jsonl") matches, by name; [] for a hub data set."""
    path = Path(source)
    if path.suffix not in FORMATS:
        return []
    if path.exists() or not glob.has_magic(source):
        return [path]
    found = sorted(map(Path, glob.glob(source, recursive=True)))
    require(bool(found), f"data.source: no file matches {source}")
    return found


def _numeric(rows: datasets.Dataset, name: str | None) -> datasets.Dataset:
    """The difficulty of a .csv file, which arrives as text."""
    if name is None or rows.features[name] != datasets.Value("string"):
        return rows
    try:
        return rows.cast_column(name, datasets.Value("float64"))
    except (pa.ArrowInvalid, ValueError) as error:
        raise ConfigError(f"data.difficulty_column: {name!r} holds text that is no number ({error})") from error


def open_files(cfg: DataConfig, files: list[Path], cache: Path) -> datasets.Dataset:
    for path in files:
        require(path.is_file(), f"data.source: there is no file {path}")
        require(path.stat().st_size > 0, f"data.source: {path} is empty")
    try:
        return datasets.load_dataset(FORMATS[files[0].suffix], data_files=list(map(str, files)), split=cfg.split,
                                     cache_dir=str(cache / "sources"), **as_written(files[0]))
    except (DatasetGenerationError, pa.ArrowInvalid, UnicodeDecodeError) as error:
        for path in files:
            find_broken_line(path)
        cause = error.__cause__ or error
        raise ConfigError(f"data.source: {cfg.source} cannot be read: {cause}") from error
    except ValueError as error:
        raise ConfigError(f"data.split: {cfg.split!r} of {cfg.source}: {error}") from error


def as_written(path: Path) -> dict:
    """Options of the reader for .csv files, which would guess types: 007 would become 7, and NA nothing."""
    if path.suffix != ".csv":
        return {}
    with path.open(newline="", encoding="utf-8-sig", errors="replace") as file:
        names = next(csv.reader(file), [])
    return {"features": datasets.Features({name: datasets.Value("string") for name in names}), "keep_default_na": False}


def find_broken_line(path: Path) -> None:
    """Raise a ConfigError that names the first line that is no text, or in a .jsonl file no JSON object, if there is one."""
    if path.suffix == ".parquet":
        return
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            try:
                text = line.decode()
                good = path.suffix == ".csv" or not text.strip() or isinstance(json.loads(text), dict)
                broken = "" if good else "not a JSON object"
            except ValueError as error:
                broken = str(error)
            require(not broken, f"data.source: {path}, line {number}: {broken}")


def open_hub(cfg: DataConfig) -> datasets.Dataset:
    try:
        return datasets.load_dataset(cfg.source, cfg.subset, split=cfg.split)
    except (DatasetNotFoundError, ConnectionError, FileNotFoundError) as error:
        raise ConfigError(f"data.source: {cfg.source!r} is no .jsonl, .parquet or .csv file, and as a data set of the hub it "
                          f"cannot be loaded: {error}") from error
    except ValueError as error:
        what = f"data.source {cfg.source}, data.subset {cfg.subset}, data.split {cfg.split}"
        raise ConfigError(f"{what}: {error}") from error


def source_digest(cfg: DataConfig, rows: datasets.Dataset) -> str:
    """Content hash of local files; of a hub data set the fingerprint of its revision and split."""
    files = files_of(cfg.source)
    if not files:
        return rows._fingerprint
    digest = hashlib.sha256()
    for path in files:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()
