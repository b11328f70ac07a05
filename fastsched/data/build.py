"""Build the training and the held-out part of a prompt set on disk: encode, check every row, cut bins, split, save.

N rows, K difficulty bins. A part is (encoded rows, bins [N] int64).
"""

import hashlib
import json
from pathlib import Path
from typing import Any, Optional

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from fastsched.config import ConfigError, DataConfig, require
from fastsched.data.chain import chain_held_out, chain_rows
from fastsched.data.difficulty import equal_count_bins
from fastsched.data.encode import Columns, Encoder, literal_frame, opening, prefills
from fastsched.data.sources import GENERATED, from_rows
from fastsched.data.tasks import Rows, arithmetic_held_out, arithmetic_rows, form_of, mix64, reasoning_gym_rows

BATCH = 2000  # rows rendered and tokenised at a time
SHOWN = 5  # row numbers in an error message
REPORTED = 1000  # row numbers in a report
ENCODED = pa.schema({
    "token_ids": pa.list_(pa.int32()), "text": pa.string(), "answer": pa.string(), "meta": pa.string(), "prefill": pa.string(),
    "source_row": pa.int64(), "difficulty": pa.float64(), "key": pa.int64(), "problem": pa.string(),
})
SAVED = pa.schema([*list(ENCODED)[:6], pa.field("bin", pa.int64())])

Part = tuple[datasets.Dataset, np.ndarray]


def build_sets(cfg: DataConfig, tokenizer, seed: int, source: Optional[datasets.Dataset], scratch: Path) -> Path:
    """Write the folders train and held_out; returns their parent. `source` is None for generated tasks."""
    report: dict[str, Any] = {"dropped": {}}
    if cfg.task in ("arithmetic", "chain"):
        train, held = arithmetic_parts(cfg, tokenizer, seed, report, scratch)
    else:
        train, held = split_parts(cfg, tokenizer, seed, source, report, scratch)
    bin_count = 1 + max(int(bins.max(initial=0)) for _, bins in (train, held))
    for name, (_, bins) in (("train_per_bin", train), ("held_out_per_bin", held)):
        report[name] = np.bincount(bins, minlength=bin_count).tolist()
    for name, part in (("train", train), ("held_out", held)):
        save_part(part, report, scratch / "sets" / name)
    return scratch / "sets"


def arithmetic_parts(cfg: DataConfig, tokenizer, seed: int, report: dict, scratch: Path) -> tuple[Part, Part]:
    rows, held_out, bins = ((chain_rows, chain_held_out, cfg.chain_steps) if cfg.task == "chain" else
                            (arithmetic_rows, arithmetic_held_out, cfg.digits))
    train = encode_generated(cfg, tokenizer, rows(cfg.size, bins, form_of(cfg), seed), scratch)
    held = encode_generated(cfg, tokenizer, held_out(cfg.eval_per_bin, bins, form_of(cfg)), scratch)
    parts = [check_rows(cfg, part, counts) for part, counts in ((train, report["dropped"]), (held, {}))]
    train, held = ((part, column(part, "difficulty").astype(np.int64)) for part in parts)
    return train, held


def split_parts(cfg: DataConfig, tokenizer, seed: int, source: Optional[datasets.Dataset], report: dict,
                scratch: Path) -> tuple[Part, Part]:
    """One source for both parts: the held-out rows are those of the smallest row-number hash in each bin."""
    if source is None:
        rows = reasoning_gym_rows(cfg.task.removeprefix("reasoning-gym:"), cfg.size + cfg.eval_per_bin, seed)
        encoded = encode_generated(cfg, tokenizer, rows, scratch)
    else:
        columns = Columns(cfg.prompt_column, cfg.answer_column, cfg.difficulty_column)
        encoded = encode(source, Encoder(tokenizer, cfg, columns), scratch)
    encoded = check_rows(cfg, encoded, report["dropped"])
    bins = difficulty_bins(cfg, encoded, report)
    source_rows, keys = column(encoded, "source_row"), column(encoded, "key")
    held = held_out_rows(source_rows, bins, cfg.eval_per_bin)
    train = np.setdiff1d(np.arange(len(bins)), held)
    repeats = np.isin(keys[train], keys[held])
    if repeats.any():
        count_dropped(report["dropped"], "same prompt as a held-out row", source_rows[train[repeats]])
        train = train[~repeats]
    for k in range(int(bins.max()) + 1):
        left, taken = np.count_nonzero(bins[train] == k), np.count_nonzero(bins[held] == k)
        require(left > 0, f"data.eval_per_bin: {taken} held-out rows leave none of bin {k} to train on; lower it")
    return (encoded.select(train), bins[train]), (encoded.select(held), bins[held])


def encode_generated(cfg: DataConfig, tokenizer, rows: Rows, scratch: Path) -> datasets.Dataset:
    frame = None
    if cfg.chat and cfg.task in ("arithmetic", "chain"):
        starts = None if cfg.prefill is None else prefills(cfg.prefill, {"problem": rows.problem}, len(rows.problem))
        frame = literal_frame(tokenizer, opening(cfg), rows.prompt, starts)
    return encode(from_rows(rows), Encoder(tokenizer, cfg, GENERATED, frame), scratch)


def encode(source: datasets.Dataset, encoder: Encoder, scratch: Path) -> datasets.Dataset:
    file = scratch / f"encoded-{len(list(scratch.iterdir()))}.arrow"
    with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, ENCODED) as writer:
        start = 0
        for batch in source.iter(batch_size=BATCH):
            columns = encoder(batch, start)
            writer.write_batch(pa.RecordBatch.from_pydict(columns, schema=ENCODED))
            start += len(columns["token_ids"])
    return datasets.Dataset.from_file(str(file))


def column(rows: datasets.Dataset, name: str) -> np.ndarray:
    return rows.with_format("numpy")[name][:]


def check_rows(cfg: DataConfig, encoded: datasets.Dataset, dropped: dict) -> datasets.Dataset:
    """The usable rows. Others raise ConfigError or are counted in `dropped`, by `cfg.invalid` and `cfg.overlong`."""
    source_rows, problems = column(encoded, "source_row"), column(encoded, "problem")
    lengths = pc.list_value_length(encoded.with_format("arrow")["token_ids"][:]).to_numpy()
    invalid, overlong = problems != "", lengths > cfg.max_prompt_tokens
    if invalid.any() and cfg.invalid == "error":
        listed = [f"row {source_rows[i]} ({problems[i]})" for i in np.flatnonzero(invalid)[:SHOWN]]
        raise ConfigError(f"data: {invalid.sum()} of {len(encoded)} rows cannot be used: "
                          f"{listing(listed, invalid.sum())}; mend them or set data.invalid drop")
    if overlong.any() and cfg.overlong == "error":
        listed = [f"row {source_rows[i]} ({lengths[i]} tokens)" for i in np.flatnonzero(overlong)[:SHOWN]]
        raise ConfigError(f"data.max_prompt_tokens: {overlong.sum()} of {len(encoded)} prompts are longer than "
                          f"{cfg.max_prompt_tokens} tokens: {listing(listed, overlong.sum())}; the longest has "
                          f"{lengths.max()}; raise it or set data.overlong drop")
    for problem in np.unique(problems[invalid]):
        count_dropped(dropped, str(problem), source_rows[problems == problem])
    if overlong.any():
        count_dropped(dropped, f"longer than {cfg.max_prompt_tokens} tokens", source_rows[overlong])
    kept = np.flatnonzero(~(invalid | overlong))
    require(len(kept) > 0, f"data: every one of the {len(encoded)} rows was dropped: {dropped}")
    return encoded if len(kept) == len(encoded) else encoded.select(kept)


def listing(listed: list[str], total: int) -> str:
    return ", ".join(listed) + (" and so on" if total > len(listed) else "")


def count_dropped(dropped: dict, reason: str, source_rows: np.ndarray) -> None:
    dropped[reason] = {"count": len(source_rows), "rows": source_rows[:REPORTED].tolist()}


def difficulty_bins(cfg: DataConfig, encoded: datasets.Dataset, report: dict) -> np.ndarray:
    """Bins [N] int64 from the difficulty column, or one bin; says in the report when there are fewer than asked for."""
    if cfg.task != "dataset" or cfg.difficulty_column is None:
        return np.zeros(len(encoded), dtype=np.int64)
    bins = equal_count_bins(column(encoded, "difficulty"), cfg.bins)
    found = int(bins.max()) + 1
    if found < cfg.bins:
        report["bins"] = f"{cfg.difficulty_column!r} has too many equal values for data.bins {cfg.bins}; {found} used"
    return bins


def held_out_rows(source_rows: np.ndarray, bins: np.ndarray, per_bin: int) -> np.ndarray:
    """Sorted positions of the `per_bin` rows of each bin whose hashed source row number is smallest."""
    order = np.argsort(mix64(source_rows), kind="stable")
    return np.sort(np.concatenate([order[bins[order] == k][:per_bin] for k in range(int(bins.max()) + 1)]))


def save_part(part: Part, report: dict, folder: Path) -> None:
    """Write rows.arrow, to be memory-mapped, and prompt_set.json: the report and a digest of what a run depends on."""
    encoded, bins = part
    digest = hashlib.sha256()
    folder.mkdir(parents=True)
    with pa.OSFile(str(folder / "rows.arrow"), "wb") as sink, pa.ipc.new_stream(sink, SAVED) as writer:
        start = 0
        for table in encoded.with_format("arrow").iter(batch_size=BATCH):
            columns = [table[name] for name in SAVED.names[:-1]]
            table = pa.Table.from_arrays([*columns, pa.array(bins[start:start + len(table)])], schema=SAVED)
            writer.write_table(table.combine_chunks())
            add_to_digest(digest, table)
            start += len(table)
    (folder / "prompt_set.json").write_text(json.dumps({"digest": digest.hexdigest(), "report": report}))


def add_to_digest(digest, table: pa.Table) -> None:
    """Token ids, answers, bins and meta of some rows; the text and source row only serve messages."""
    digest.update(pc.list_value_length(table["token_ids"]).to_numpy().tobytes())
    digest.update(pc.list_flatten(table["token_ids"]).to_numpy().tobytes())
    digest.update(table["bin"].to_numpy().tobytes())
    digest.update(json.dumps([table["answer"].to_pylist(), table["meta"].to_pylist()]).encode())
