import io
import time

import pytest
from rich.console import Console
from synthetic_run import quiet
from test_log import QUIET, read_csv, rows_of

from fastsched.record.console import Phases
from fastsched.record.log import RunLog


def test_phases_add_up_and_fill_the_time_columns(tmp_path):
    row = {name: value for name, value in rows_of(1)[0].items() if not name.startswith("t_")}
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        with log.phase("setup"):
            time.sleep(0.1)
        log.restart_clock()
        with log.phase("learn"):
            time.sleep(0.02)
            with log.phase("sync"):
                time.sleep(0.04)
        log.step(row)
        assert log.phases.seconds == {}
    (written,) = read_csv(tmp_path)
    learn, sync, step = (float(written[name]) for name in ("t_learn", "t_sync", "t_step"))
    assert 0.02 <= learn < 0.04 <= sync and learn + sync <= step < 0.1
    assert float(written["t_rollout"]) == 0.0


def test_phase_ends_on_an_exception():
    phases = Phases()
    phases.enter("outer")
    phases.enter("inner")
    phases.leave()
    assert phases.current()[0] == "outer"
    phases.leave()
    assert phases.current() == ("", 0.0)


def test_heartbeat_names_a_long_phase_where_there_is_no_terminal(tmp_path):
    console = quiet()
    with RunLog(tmp_path, QUIET, 1, console=console, heartbeat=0.05) as log:
        with log.phase("generate"):
            time.sleep(0.3)
        spoken = console.file.getvalue()
        time.sleep(0.15)
        assert console.file.getvalue() == spoken  # silent between phases
    assert spoken.count("... generate: 0 s") >= 2


def test_terminal_shows_bar_phase_and_block(tmp_path):
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    with RunLog(tmp_path, QUIET, 3, console=console, window=(0.4, 0.6)) as log:
        with log.phase("generate"):
            until = time.monotonic() + 30
            while "generate 1 s" not in console.file.getvalue() and time.monotonic() < until:
                time.sleep(0.1)
        log.step(rows_of(3)[0])
    shown = console.file.getvalue()
    assert "step 0/3" in shown and "generate 1 s" in shown and "1/3" in shown
    assert "[0.40, 0.60]" in shown and "flat groups" in shown and "lambda_KL" in shown


@pytest.mark.parametrize("inside, reachable, words", [(1, 1, "in [0.4"), (0, 1, "OUT of"), (0, 0, "not reachable")])
def test_block_says_where_success_stands(tmp_path, inside, reachable, words):
    console = quiet()
    with RunLog(tmp_path, QUIET, 1, console=console, window=(0.4, 0.6)) as log:
        log.step({**rows_of(1)[0], "in_window": inside, "window_reachable": reachable})
    assert words in console.file.getvalue()
