"""What the base policy says of every training row: computed by `fastsched cluster`, cached by content, opened by a run."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Callable, Iterator

import numpy as np
from filelock import FileLock

from fastsched.config import Config, FeaturesMissing, default_cache_dir
from fastsched.config.features import SENTENCE_TRANSFORMERS
from fastsched.data.datasets import PromptSet
from fastsched.data.feature_store import FIT_ROWS, Blocks, about_features, cluster_table, finish, open_features
from fastsched.data.references import References, references
from fastsched.engines.models.embed import PolicyReader, SentenceEncoder

FORMAT = 1  # raised when the same configuration must give other features than before


def feature_user(cfg: Config) -> str | None:
    """The key that makes a run need features; None where none does."""
    user = cfg.scheduler.traits.features(cfg.scheduler)
    return user or (None if cfg.data.difficulty == "column" else f"data.difficulty {cfg.data.difficulty}")


def features_folder(cfg: Config, model_path: Path, train_set: PromptSet) -> Path:
    """Where the features of this model, these rows and these settings are, or will be."""
    settings = dataclasses.asdict(cfg.features)
    del settings["batch_tokens"]  # batching changes rounding only
    settings |= {"fit_rows": FIT_ROWS, "batch_tokens": 1}
    parts = [FORMAT, settings, cfg.model.dtype, model_digest(cfg.model.name, model_path), train_set.digest]
    return default_cache_dir() / "features" / hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def model_digest(name: str, path: Path) -> str:
    """Names the model's content: the folder of a builtin or hub model is named by it, other folders are read."""
    if name.startswith("builtin:"):
        return path.name
    if path.parent.name == "snapshots":
        return f"{name}@{path.name}"
    digest = hashlib.sha256()
    for file in sorted(p for p in path.iterdir() if p.is_file()):
        with file.open("rb") as content:
            digest.update(f"{file.name} {hashlib.file_digest(content, 'sha256').hexdigest()}\n".encode())
    return digest.hexdigest()


def find_features(cfg: Config, model_path: Path, train_set: PromptSet) -> Path | None:
    """The folder of the features that a run needs, or None where it needs none. Raises FeaturesMissing."""
    user = feature_user(cfg)
    if user is None:
        return None
    folder = features_folder(cfg, model_path, train_set)
    if not folder.exists():
        raise FeaturesMissing(f"{user}: needs an embedding and a difficulty of every training row, and they have not been computed "
                              "for this model, data and seed")
    return folder


def compute_features(cfg: Config, model_path: Path, tokenizer, train_set: PromptSet, folder: Path,
                     advance: Callable[[float], None]) -> None:
    """Compute what is missing, block by block, then cluster into `folder`. `advance` is told of rows that are done.

    One process at a time works on a folder; a killed one is continued from its finished blocks. Raises ConfigError.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if folder.exists():
            return
        blocks = Blocks(folder.with_name(f"{folder.name}.partial"), len(train_set))
        missing = blocks.missing()
        advance(len(train_set) - sum(stop - start for start, stop in missing))
        reader = PolicyReader(model_path, cfg.model, cfg.features.max_tokens, cfg.features.batch_tokens) if missing else None
        sentences = _sentence_encoder(cfg) if missing else None
        for start, stop in missing:
            rows = references(train_set, start, stop, tokenizer, cfg.data, cfg.features.reference_column)
            parts = sentences.embed(rows.texts) if sentences else reader.embed(rows.text_ids)
            blocks.write(start, _collect(parts, stop - start, advance), _nll(reader, rows, advance), rows.unreferenced)
        finish(blocks, folder, cfg.features)


def _sentence_encoder(cfg: Config) -> SentenceEncoder | None:
    if cfg.features.encoder == "policy":
        return None
    return SentenceEncoder(cfg.features.encoder.removeprefix(SENTENCE_TRANSFORMERS), cfg.features.max_tokens, cfg.features.batch_tokens)


def _nll(reader: PolicyReader, rows: References, advance: Callable[[float], None]) -> np.ndarray:
    return _collect(reader.answer_nll(rows.prompt_ids, rows.answer_ids), len(rows.texts), advance)


def _collect(parts: Iterator[tuple[np.ndarray, np.ndarray]], count: int, advance: Callable[[float], None]) -> np.ndarray:
    """Values of all rows in order; each row is half done by one of its two passes."""
    out = None
    for rows, values in parts:
        out = np.empty((count, *values.shape[1:]), values.dtype) if out is None else out
        out[rows] = values
        advance(len(rows) / 2)
    return out


def feature_lines(folder: Path) -> list[str]:
    """What a log says of features."""
    about = about_features(folder)
    sizes, _ = cluster_table(open_features(folder), about["clusters"])
    some = sizes[sizes > 0]
    return [f"features: {about['rows']:,} prompts in {len(some)} clusters of {some.min():,} to {some.max():,}",
            *(f"features: {message}" for message in about["messages"])]
