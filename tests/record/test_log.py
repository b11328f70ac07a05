import csv
import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_run import BINS, metrics_row, quiet, sample

from fastsched.config import ConfigError, LogConfig
from fastsched.record.environment import write_config, write_environment
from fastsched.record.log import LOSS_NOTE, RunLog
from fastsched.record.tables import COLUMNS, OPTIONAL_COLUMNS, columns, csv_line, json_line

QUIET = LogConfig(tensorboard=False)
DESIGN_COLUMNS = (
    "step tokens_total prompts_total success success_ema in_window window_reachable reward_mean reward_std r_thr "
    "entropy entropy_ema kl kl_kind drift lambda_h lambda_kl ema_alpha lr lr_scale temporal_s kept_fraction "
    "flat_groups truncated clip_fraction ratio_deviation grad_norm grad_snr skipped_nonfinite w_0 w_1 p_0 p_1 "
    "response_len_mean t_rollout t_reward t_learn t_sync t_control t_step tokens_per_s peak_mem_gb").split()


def rows_of(total, seed=0):
    rng, state = np.random.default_rng(seed), {}
    return [metrics_row(step, total, rng, state=state) for step in range(1, total + 1)]


def read_csv(folder):
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_jsonl(path):
    def refuse(name):
        raise AssertionError(f"{name} is not valid JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_columns_are_those_of_the_design_in_order_and_all_are_explained():
    assert columns(2) == DESIGN_COLUMNS
    assert all(len(text) > 10 for text in {**COLUMNS, **OPTIONAL_COLUMNS}.values())


def test_row_reaches_csv_and_jsonl_at_once(tmp_path):
    row = rows_of(1)[0]
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        log.step(row)
        (in_csv,), (in_jsonl,) = read_csv(tmp_path), read_jsonl(tmp_path / "metrics.jsonl")
    assert list(in_csv)[:len(columns(4))] == columns(4)
    assert float(in_csv["success"]) == in_jsonl["success"] == row["success"]
    assert in_csv["rule"] == row["rule"] and in_csv["kl_kind"] == "exact"


@given(st.floats(allow_nan=False, allow_infinity=False))
@settings(max_examples=200, deadline=None)
def test_floats_round_trip_exactly(value):
    assert float(csv_line([value])) == value
    assert json.loads(json_line({"a": value}))["a"] == value
    assert float(csv_line([float(np.float32(1) / 3)])) == float(np.float32(1) / 3)


def test_not_measured_is_an_empty_cell_and_null(tmp_path):
    row = {**rows_of(1)[0], "kl": float("nan"), "grad_snr": None, "drift": np.float32("nan"), "entropy": float("inf")}
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        log.step(row)
    (in_csv,), (in_jsonl,) = read_csv(tmp_path), read_jsonl(tmp_path / "metrics.jsonl")
    assert [in_csv[name] for name in ("kl", "grad_snr", "drift", "entropy")] == ["", "", "", "inf"]
    assert [in_jsonl[name] for name in ("kl", "grad_snr", "drift", "entropy")] == [None] * 4


def test_missing_new_and_unwritable_columns_are_named(tmp_path):
    first, second = rows_of(2)
    with RunLog(tmp_path, QUIET, 2, console=quiet()) as log:
        with pytest.raises(ConfigError, match="step 1: columns missing: entropy_ema, w_1"):
            log.step({name: value for name, value in first.items() if name not in ("entropy_ema", "w_1")})
        log.step(first)
        with pytest.raises(ConfigError, match="step 2: columns not in the first row: novelty"):
            log.step({**second, "novelty": 1.0})
        with pytest.raises(TypeError, match="'entropy'.*list"):
            log.step({**second, "entropy": [1.0]})
    assert len(read_csv(tmp_path)) == 1


def write_all(log, rows):
    for row in rows:
        log.step(row)
        log.samples(row["step"], [sample(row["step"], 0, np.random.default_rng(row["step"]))])
        log.evaluation(row["step"], dict.fromkeys(BINS, row["step"] / 7), dict.fromkeys(BINS, 3))


def test_resume_after_kill_gives_the_files_of_an_uninterrupted_run(tmp_path):
    rows = rows_of(10)
    with RunLog(tmp_path / "whole", QUIET, 10, console=quiet()) as log:
        write_all(log, rows)
    cut = tmp_path / "cut"
    with RunLog(cut, QUIET, 10, console=quiet()) as log:
        write_all(log, rows[:8])
    tables = ("metrics.csv", "metrics.jsonl", "samples.jsonl", "evals.jsonl")
    for name in tables:  # torn lines, one of them with a row number that would be kept
        (cut / name).open("a").write("3,0.1" if name == "metrics.csv" else '{"step": 3, "su')
    with RunLog(cut, QUIET, 10, resume_step=6, console=quiet()) as log:
        assert [row["step"] for row in read_csv(cut)] == ["1", "2", "3", "4", "5", "6"]
        write_all(log, rows[6:])
    for name in tables:
        assert (cut / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), name
    assert not list(cut.glob("*.tmp"))


def test_resume_says_when_rows_are_missing(tmp_path):
    console = quiet()
    with RunLog(tmp_path, QUIET, 10, console=quiet()) as log:
        log.step(rows_of(1)[0])
    RunLog(tmp_path, QUIET, 10, resume_step=4, console=console).close()
    assert "WARNING: metrics.csv ends at step 1, the checkpoint at 4" in console.file.getvalue()


def test_folder_of_another_run_is_refused(tmp_path):
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        log.step(rows_of(1)[0])
    with pytest.raises(ConfigError, match="already holds a run: use --resume"):
        RunLog(tmp_path, QUIET, 1, console=quiet())


def test_small_loss_is_explained_once(tmp_path):
    console = quiet()
    with RunLog(tmp_path, QUIET, 2, console=console) as log:
        for row in rows_of(2):
            log.step(row)
    assert console.file.getvalue().count(LOSS_NOTE) == 1


def test_samples_respect_the_limit_and_name_missing_keys(tmp_path):
    rng = np.random.default_rng(0)
    with RunLog(tmp_path, LogConfig(tensorboard=False, samples_per_step=2), 1, console=quiet()) as log:
        log.samples(1, [sample(1, place, rng) for place in range(4)])
        with pytest.raises(ConfigError, match="sample of step 2: keys missing: answer"):
            log.samples(2, [{key: value for key, value in sample(2, 0, rng).items() if key != "answer"}])
    written = read_jsonl(tmp_path / "samples.jsonl")
    assert [(s["step"], s["row"]) for s in written] == [(1, 4), (1, 5)]


def test_evaluation_needs_counts_of_the_same_bins(tmp_path):
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        with pytest.raises(ConfigError, match="evaluation of step 5"):
            log.evaluation(5, {"a": 0.5}, {"b": 3})
        log.evaluation(6, {"a": np.float64(0.5), "b": float("nan")}, {"a": np.int64(3), "b": 0})
    (written,) = read_jsonl(tmp_path / "evals.jsonl")
    assert written == {"step": 6, "accuracy": {"a": 0.5, "b": None}, "n": {"a": 3, "b": 0}, "failed": 0}


def test_other_ranks_write_no_tables(tmp_path, capsys):
    console = quiet()
    with RunLog(tmp_path, LogConfig(), 1, is_main=False, console=console) as log:
        with log.phase("learn"):
            log.step(rows_of(1)[0])
        log.samples(1, [])
        log.evaluation(1, {}, {})
        log.note("from rank 1")
    assert list(tmp_path.iterdir()) == [] and console.file.getvalue() == ""
    assert capsys.readouterr().out == "from rank 1\n"


def scalars(folder, name):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder / "tensorboard"))
    events.Reload()
    return [(e.step, e.value) for e in events.Scalars(name)]


def test_tensorboard_follows_the_option_and_forgets_purged_steps(tmp_path):
    rows = rows_of(4)
    with RunLog(tmp_path / "on", LogConfig(), 4, console=quiet()) as log:
        for row in rows[:3]:
            log.step({**row, "lambda_h": row["step"]})
        assert scalars(tmp_path / "on", "lambda_h") == [(1, 1.0), (2, 2.0), (3, 3.0)]  # flushed every step
    time.sleep(1.1)  # event files are ordered by the second in their name
    with RunLog(tmp_path / "on", LogConfig(), 4, resume_step=2, console=quiet()) as log:
        log.step({**rows[2], "lambda_h": 30})
    assert scalars(tmp_path / "on", "lambda_h") == [(1, 1.0), (2, 2.0), (3, 30.0)]
    RunLog(tmp_path / "off", QUIET, 4, console=quiet()).close()
    assert not (tmp_path / "off" / "tensorboard").exists()


def test_wandb_that_is_not_installed_is_one_clear_error(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match="log.wandb: .*pip install wandb"):
        RunLog(tmp_path, LogConfig(tensorboard=False, wandb=True), 1, console=quiet())


WANDB = """
import sys
from pathlib import Path
import numpy as np
from synthetic_run import LogConfig, RunLog, metrics_row, quiet
for resumed in (None, 1):
    with RunLog(Path(sys.argv[1]), LogConfig(tensorboard=False, wandb=True), 2, resume_step=resumed, console=quiet()) as log:
        log.step(metrics_row(2 if resumed else 1, 1, np.random.default_rng(0)))
"""


def test_wandb_receives_rows_and_goes_on_with_the_same_run_after_resume(tmp_path):
    pytest.importorskip("wandb")
    env = {**os.environ, "WANDB_MODE": "offline", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", WANDB, str(tmp_path)], check=True, env=env)
    binaries = list(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    assert binaries and {path.stem for path in binaries} == {f"run-{(tmp_path / 'wandb_id.txt').read_text()}"}
    assert all(b"lambda_kl" in path.read_bytes() for path in binaries)


NOISY = """
import logging, os, sys, warnings
from pathlib import Path
from fastsched.config import LogConfig
from fastsched.record.log import RunLog
with RunLog(Path(sys.argv[1]), LogConfig(tensorboard=False), 1, is_main=sys.argv[2] == "main") as log:
    log.capture_output()
    print("python noise")
    os.system("echo child noise")
    os.write(2, b"descriptor noise\\n")
    warnings.warn("warning noise")
    logging.getLogger("engine").warning("logging noise")
    log.note("for the reader")
    raise ValueError("the error")
"""


@pytest.mark.parametrize("rank, file", [("main", "log.txt"), ("other", "log-rank3.txt")])
def test_engine_noise_goes_to_the_log_and_errors_to_the_user(tmp_path, rank, file):
    done = subprocess.run([sys.executable, "-c", NOISY, str(tmp_path), rank], capture_output=True, text=True,
                          env={**os.environ, "RANK": "3"})
    assert done.returncode == 1 and done.stderr.startswith("Traceback") and "ValueError: the error" in done.stderr
    assert done.stdout == ("for the reader\n" if rank == "main" else "")
    text = (tmp_path / file).read_text()
    for words in ("python", "child", "descriptor", "warning", "logging"):
        assert f"{words} noise" in text
    assert "for the reader" in text and "the error" not in text


def test_environment_and_config_are_recorded(tmp_path):
    write_environment(tmp_path)
    write_config(tmp_path, "train:\n  steps: 3\n")
    environment = json.loads((tmp_path / "environment.json").read_text())
    assert environment["packages"]["torch"] and environment["cores"] >= 1 and environment["memory_gb"] > 0
    assert environment["command"] == sys.argv and "commit" in (environment["git"] or {"commit": None})
    assert (tmp_path / "config.yaml").read_text() == "train:\n  steps: 3\n"
