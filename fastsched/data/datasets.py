"""Prompt sets: rendered, tokenised and checked once, cached on disk, memory-mapped from there.

N prompts, K difficulty bins. Every rank may load the same set at the same time: one builds it, the others wait.
"""

import dataclasses
import hashlib
import importlib.metadata
import json
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping, Optional

import datasets
import numpy as np
import pyarrow.compute as pc
from filelock import FileLock

from fastsched.config import DataConfig, default_cache_dir, require
from fastsched.data.build import build_sets, column
from fastsched.data.encode import check_tokenizer
from fastsched.data.sources import files_of, find_broken_line, open_source, source_digest
from fastsched.types import Prompt

CACHE_FORMAT = 2  # raised when the same configuration must give other rows than before
VERSIONS = ("datasets", "tokenizers", "transformers", "reasoning-gym")  # packages whose change may change token ids


@dataclass(frozen=True)
class PromptSet:
    """N prompts, memory-mapped. A row number indexes this set and is the identity of the prompt's group."""

    rows: datasets.Dataset  # token_ids, text, answer, meta (JSON), prefill, source_row, bin
    bins: np.ndarray  # [N] int64 difficulty bin
    digest: str  # hash of the content
    report: Mapping[str, Any]  # what was dropped and counted

    def __len__(self) -> int:
        return len(self.bins)

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return pc.max(pc.list_value_length(self.rows.with_format("arrow")["token_ids"][:])).as_py()

    def prompt(self, row: int) -> Prompt:
        """The prompt of one row; IndexError outside 0..N-1."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of a prompt set of {len(self)}")
        values = self.rows[int(row)]
        return Prompt(row=int(row), token_ids=tuple(values["token_ids"]), text=values["text"], answer=values["answer"],
                      bin=int(self.bins[row]), meta=json.loads(values["meta"]), prefill=values["prefill"])


def require_batch(prompts: PromptSet, prompts_per_step: int) -> None:
    """ConfigError when the set cannot fill one batch of different prompts."""
    require(len(prompts) >= prompts_per_step,
            f"train.prompts_per_step: {prompts_per_step} prompts a step, but after the checks the data set has "
            f"{len(prompts)} to train on; lower it or add data")


def load_prompts(cfg: DataConfig, tokenizer, seed: int,
                 cache_dir: Optional[Path] = None) -> tuple[PromptSet, PromptSet]:
    """The training and the held-out prompts of `cfg`, which have no prompt in common.

    `tokenizer` is a fast transformers tokenizer. Token ids are those of its apply_chat_template with a generation
    prompt or, with data.chat false, of tokenizer(text). Every row is checked: over-long prompts, empty prompts, missing
    answers and difficulties that are no numbers raise ConfigError with their row numbers (counted from 0) or are
    dropped and counted, as `cfg` says. `seed` changes generated training rows only. `cache_dir` defaults to the
    environment's FASTSCHED_CACHE or `.cache/fastsched` in the working directory.
    """
    check_tokenizer(cfg, tokenizer)
    cache = Path(cache_dir or default_cache_dir())
    source = open_source(cfg, cache) if cfg.task == "dataset" else None
    folder = cache / "prompts" / cache_key(cfg, tokenizer, seed, "" if source is None else source_digest(cfg, source))
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            scratch = Path(tempfile.mkdtemp(prefix="build-", dir=folder.parent))
            try:
                build_sets(cfg, tokenizer, seed, source, scratch).rename(folder)
            except UnicodeDecodeError:  # the reader of .jsonl files does not look at the bytes
                for path in files_of(cfg.source):
                    find_broken_line(path)
                raise
            finally:
                shutil.rmtree(scratch)
    return open_set(folder / "train"), open_set(folder / "held_out")


def cache_key(cfg: DataConfig, tokenizer, seed: int, source: str) -> str:
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    tokens.update(truncation=None, padding=None)  # left over from whoever called the tokenizer last
    versions = [importlib.metadata.version(name) for name in VERSIONS]
    parts = [CACHE_FORMAT, versions, dataclasses.asdict(cfg), seed, source, tokens, tokenizer.chat_template]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def open_set(folder: Path) -> PromptSet:
    rows = datasets.Dataset.from_file(str(folder / "rows.arrow"))
    saved = json.loads((folder / "prompt_set.json").read_text())
    return PromptSet(rows=rows, bins=column(rows, "bin"), **saved)
