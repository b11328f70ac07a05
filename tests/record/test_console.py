import io
from types import SimpleNamespace

import pytest
from processes import wait_until
from rich.console import Console
from synthetic_run import quiet
from test_log import QUIET, read_csv, rows_of

from fastsched.record import console as console_module
from fastsched.record.console import Phases
from fastsched.record.log import RunLog


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(console_module, "time", SimpleNamespace(perf_counter=lambda: now.value))
    return now


def test_phases_add_up_and_fill_the_time_columns(tmp_path, clock):
    row = {name: value for name, value in rows_of(1)[0].items() if not name.startswith("t_")}
    with RunLog(tmp_path, QUIET, 1, console=quiet()) as log:
        with log.phase("setup"):
            clock.value += 100
        log.restart_clock()
        with log.phase("learn"):
            clock.value += 2
            with log.phase("sync"):
                clock.value += 40
            clock.value += 1
        clock.value += 0.5
        log.step(row)
        assert log.phases.seconds == {}
    (written,) = read_csv(tmp_path)
    assert [float(written[name]) for name in ("t_learn", "t_sync", "t_step", "t_rollout")] == pytest.approx([3, 40, 43.5, 0])


def test_phase_ends_on_an_exception():
    phases = Phases()
    phases.enter("outer")
    phases.enter("inner")
    phases.leave()
    assert phases.current()[0] == "outer"
    phases.leave()
    assert phases.current() == ("", 0.0)


def test_heartbeat_names_a_long_phase_where_there_is_no_terminal(tmp_path, clock):
    console = quiet()
    with RunLog(tmp_path, QUIET, 1, console=console, heartbeat=0.05) as log:
        with log.phase("generate"):
            for seconds in (1, 2):
                clock.value = 100 + seconds
                wait_until(lambda said=f"... generate: {seconds} s": said in console.file.getvalue())
        spoken = console.file.getvalue()
        clock.value += 100
        log._display.close()  # its thread has looked once more, and ended
        assert console.file.getvalue() == spoken  # silent between phases


def test_terminal_shows_bar_phase_and_block(tmp_path, clock):
    console = Console(file=io.StringIO(), force_terminal=True, width=160, color_system=None)
    with RunLog(tmp_path, QUIET, 3, console=console, window=(0.4, 0.6)) as log:
        with log.phase("generate"):
            clock.value += 7
            wait_until(lambda: "generate 7 s" in console.file.getvalue())
        log.step(rows_of(3)[0])
    shown = console.file.getvalue()
    assert "step 0/3" in shown and "1/3" in shown
    assert "[0.40, 0.60]" in shown and "flat groups" in shown and "lambda_KL" in shown


@pytest.mark.parametrize("inside, reachable, words", [(1, 1, "in [0.4"), (0, 1, "OUT of"), (0, 0, "not reachable")])
def test_block_says_where_success_stands(tmp_path, inside, reachable, words):
    console = quiet()
    with RunLog(tmp_path, QUIET, 1, console=console, window=(0.4, 0.6)) as log:
        log.step({**rows_of(1)[0], "in_window": inside, "window_reachable": reachable})
    assert words in console.file.getvalue()
