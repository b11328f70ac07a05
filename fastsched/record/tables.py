"""The run folder's tables: what each column means, how rows are written, and how files are cut back for a resume.

metrics.csv is for people and spreadsheets (NaN is an empty cell), metrics.jsonl for programs (NaN is null); both hold
the same rows, and every float is written with `repr`, so that reading it back gives the same bits.
"""

import csv
import io
import json
import math
import numbers
import os
from pathlib import Path
from typing import Mapping

import numpy as np

from fastsched.config import ConfigError

Value = float | int | str | None

COLUMNS: dict[str, str] = {
    "step": "Optimizer step, counted from 1.",
    "tokens_total": "Response tokens sampled so far, summed over all ranks and steps.",
    "prompts_total": "Prompts rolled out so far, summed over all ranks and steps; one continued later (speed) counts once.",
    "success": "Share of this step's responses with reward above r_thr, over all ranks.",
    "success_ema": "Moving average of success; the number that the scheduler holds inside the window.",
    "in_window": "1 when success_ema lies inside the success window, else 0.",
    "window_reachable": "1 when some bin lies below the window's upper edge and some bin above its lower edge.",
    "reward_mean": "Mean reward over this step's scored responses.",
    "reward_std": "Standard deviation of the reward over the whole batch (not within groups).",
    "r_thr": "Reward above which a response counts as success.",
    "entropy": "Mean entropy of the policy over the response tokens in the loss, of all ranks, nats; flat groups may have left it.",
    "entropy_ema": "Moving average of entropy, the input of the coefficient rules, nats.",
    "kl": "Mean KL of the policy to its reference (average, copy or teacher) over the same tokens, nats a token.",
    "kl_kind": "How kl was computed: exact over the vocabulary, or an estimator on the sampled token.",
    "drift": "Distance of the weights from their average, divided by the norm of the average.",
    "lambda_h": "Entropy coefficient used in this step's loss.",
    "lambda_kl": "KL coefficient used in this step's loss.",
    "ema_alpha": "Momentum of the averaged weights (the KL reference).",
    "lr": "Learning rate of this step, scale included.",
    "lr_scale": "The scheduler's factor on the learning rate.",
    "temporal_s": "Share of each response that the temporal schedule leaves out of the loss; 0 trains every token.",
    "kept_fraction": "Response tokens that carry the loss, divided by all: what masks, flat and dropped groups leave.",
    "flat_groups": "Share of groups whose rewards are all equal; they give no policy gradient.",
    "truncated": "Share of responses stopped by the length limit.",
    "clip_fraction": "Share of kept tokens whose ratio was clipped; 0 when every batch is used once.",
    "ratio_deviation": "Mean |logp(learner) - logp(sampler)| over kept tokens, before any correction, nats.",
    "grad_norm": "Norm of the whole gradient before clipping.",
    "grad_snr": "Gradient signal-to-noise ratio of a prompt group, over micro-batches; empty where there is one, or one group lies in two.",
    "skipped_nonfinite": "Updates of this step skipped because a value was not finite.",
    "w_b": "Sampling weight of difficulty bin b (w_0, w_1, ...); they sum to 1.",
    "p_b": "Moving average of success in bin b (p_0, p_1, ...); empty until the bin was sampled.",
    "response_len_mean": "Mean response length, tokens.",
    "t_rollout": "Seconds spent generating.",
    "t_reward": "Seconds spent scoring.",
    "t_learn": "Seconds spent in forward, backward, optimizer and averaging.",
    "t_sync": "Seconds spent loading weights into the sampler and checking them.",
    "t_control": "Seconds spent in the scheduler.",
    "t_step": "Seconds of the whole step, logging and evaluation included.",
    "tokens_per_s": "Response tokens of this step divided by t_step.",
    "peak_mem_gb": "Peak memory of the main process: GPU memory where there is one, else resident memory, GB.",
}
"""Every column that a row must have, in file order. `w_b` and `p_b` stand for one column for each difficulty bin."""

OPTIONAL_COLUMNS: dict[str, str] = {
    "responses_total": "Responses sampled so far, summed over all ranks and steps; what train.rollout_budget limits.",
    "loss": "The loss. On-policy its value is close to 0 while its gradient is not: read reward and grad_norm instead.",
    "rule": "The coefficient rules that fired.",
    "kl_ema": "Moving average of kl, nats.",
    "drift_ema": "Moving average of drift.",
    "reward_failures": "Responses of this step whose scoring raised, timed out or was not finite; they are left out.",
    "failed_scores": "The same, summed over all steps so far.",
    "unreadable": "Responses of this step that score 0 because nothing could be read out of them, or not within the time limit.",
    "reward_NAME": "Mean of one of several rewards (reward.extra), without its weight; reward_mean is that of the weighted sum.",
    "initial_entropy": "H_0, against which entropy counts as low or recovered, nats; empty until it is known.",
    "nonfinite_observations": "Statistics ignored so far because they were not finite.",
    "p_std_b": "Posterior standard deviation of success in bin b (p_std_0, p_std_1, ...).",
    "trained_groups": "Groups trained in this step, over all ranks; fewer than the batch where too few were complete (speed).",
    "buffered_groups": "Groups kept for later steps: waiting for their other responses (speed) or to be trained again (dots).",
    "stale": "Share of responses sampled from older weights; with any, and no rollout.correction, ratios are taken against the sampler.",
    "correction_mean": "Mean of pi_old / pi_sampler over kept tokens, before any bound; empty without rollout.correction.",
    "correction_max": "Largest pi_old / pi_sampler of a kept token.",
    "correction_capped": "Share of kept tokens whose ratio, of the token or its response, was cut to correction_cap.",
    "correction_rejected": "Share of kept tokens whose correction weight is 0: outside the bounds, or vetoed.",
    "kl_gate": "h0 of the KL gate, nats: below this entropy the KL term acts on a token; empty while it acts on all.",
    "reference_copied": "1 when the reference became a copy of the policy before this step's update.",
    "snr_b": "Gradient signal-to-noise ratio of bin b (snr_0, snr_1, ...); grad_snr then includes the differences between bins.",
    "staleness": "Weight versions by which the oldest trained response lags behind the policy: at most rollout.ahead, but for speed, dots.",
    "missing_logprobs": "Sampled tokens so far for which the sampler gave no log-probability.",
}
"""Columns that a row may add; any other name is allowed too, without an entry in the glossary."""

DECILE_KEYS: dict[str, str] = {
    "kept": "Share of response tokens that carry the loss.",
    "entropy": "Mean entropy of the policy over kept tokens, nats.",
    "kl": "Mean KL to the reference over kept tokens, nats.",
    "surprisal": "Mean -logp(sampler) over all tokens, nats: an unbiased estimate of the sampler's entropy, kept or not.",
}
"""Each row of deciles.jsonl: ten numbers by tenth of the response t / L, null where there is no token."""

SAMPLE_KEYS = ("row", "prompt", "response", "answer", "reward", "finish_reason", "length")


def columns(bins: int) -> list[str]:
    """Names of the required columns for `bins` difficulty bins, in file order."""
    names = []
    for name in COLUMNS:
        names += [f"{name[:-1]}{b}" for b in range(bins)] if name in ("w_b", "p_b") else [name]
    return names


def bin_count(names) -> int:
    """K, from the column names w_0 .. w_{K-1}."""
    return sum(name.startswith("w_") and name[2:].isdigit() for name in names)


def header(row: Mapping[str, Value]) -> list[str]:
    """Column order of a run that starts with `row`: required ones, then its own. Missing ones raise ConfigError."""
    required = columns(max(bin_count(row), 1))
    missing = [name for name in required if name not in row]
    if missing:
        raise ConfigError(f"metrics row of step {row.get('step')}: columns missing: {', '.join(missing)}")
    return required + [name for name in row if name not in required]


def plain(name: str, value) -> Value:
    """`value` as a Python int, float, str or None; NumPy scalars are converted exactly. TypeError names the column."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, (numbers.Integral, np.bool_)):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    raise TypeError(f"column {name!r}: {type(value).__name__} is not a number, a string or None")


def csv_line(values) -> str:
    """One line of metrics.csv from plain values, newline included."""
    line = io.StringIO()
    csv.writer(line, lineterminator="\n").writerow(_cell(value) for value in values)
    return line.getvalue()


def _cell(value: Value) -> str:
    if value is None or value != value:
        return ""
    return repr(value) if isinstance(value, float) else str(value).replace("\n", " ")


def json_line(record: Mapping) -> str:
    """One line of strictly valid JSON; NaN and infinities become null, at any depth."""
    return json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) + "\n"


def _finite(value):
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v) for v in value]
    value = plain("json", value)
    return None if isinstance(value, float) and not math.isfinite(value) else value


def complete_lines(path: Path) -> list[str]:
    """Lines of a text file, none when it does not exist; a torn last line (kill -9 while writing) is left out."""
    return path.read_bytes().decode(errors="replace").split("\n")[:-1] if path.exists() else []


def read_jsonl(path: Path) -> list[dict]:
    """Records of a .jsonl file, none when it does not exist. A broken line raises ConfigError with its number."""
    records = []
    for number, line in enumerate(complete_lines(path), 1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{path}, line {number}: not valid JSON ({error}); delete the line") from error
    return records


def replace_text(path: Path, text: str) -> None:
    """Write `text` so that a reader, or a run killed in between, sees the old file or the new one, never a part."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)


def cut_csv(path: Path, step: int) -> tuple[list[str], int | None]:
    """Keep the rows of metrics.csv with step <= `step`; returns the header and the last step kept (None: no row)."""
    lines = complete_lines(path)
    if not lines:
        path.unlink(missing_ok=True)
        return [], None
    names, *rows = csv.reader(lines)
    kept = [row for row in rows if int(row[names.index("step")]) <= step]
    replace_text(path, csv_line(names) + "".join(csv_line(row) for row in kept))
    return names, int(kept[-1][names.index("step")]) if kept else None


def cut_jsonl(path: Path, step: int) -> None:
    """Keep the records of a .jsonl file whose "step" is at most `step`."""
    if path.exists():
        replace_text(path, "".join(json_line(r) for r in read_jsonl(path) if r["step"] <= step))
