"""What a person sees of a running run: one progress bar, one compact block a step, and no engine noise."""

import ctypes
import logging
import os
import sys
import threading
import time
from pathlib import Path
from typing import Mapping

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TextColumn, TimeRemainingColumn
from rich.text import Text

from fastsched.record.tables import bin_count


class Capture:
    """Sends file descriptors 1 and 2 to a file, so that C++ prints and child processes land there too, until `restore`.

    `stdout` is a text file on the original descriptor 1. Python's warnings and logging go to the file, with the time.
    """

    def __init__(self, path: Path):
        _flush()
        self._saved = [os.dup(1), os.dup(2)]
        self.stdout = os.fdopen(os.dup(1), "w", encoding=sys.stdout.encoding or "utf-8", errors="replace", buffering=1)
        target = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(target, 1)
        os.dup2(target, 2)
        os.close(target)
        self._handler = logging.FileHandler(path, encoding="utf-8")
        self._handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
        logging.getLogger().addHandler(self._handler)
        logging.captureWarnings(True)

    def restore(self) -> None:
        _flush()
        for descriptor, saved in zip((1, 2), self._saved, strict=True):
            os.dup2(saved, descriptor)
            os.close(saved)
        logging.getLogger().removeHandler(self._handler)
        logging.captureWarnings(False)
        self._handler.close()
        self.stdout.close()


def _flush() -> None:
    """Empty Python's and C's buffers, so that nothing written before a switch of descriptors appears behind it."""
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)


class Phases:
    """Seconds by phase since the last `reset`; an inner phase interrupts the outer one, so that the seconds add up."""

    def __init__(self):
        self.seconds: dict[str, float] = {}
        self._stack: list[list] = []  # [name, start of the phase, start of the part not yet counted]
        self._step_start = time.perf_counter()

    def enter(self, name: str) -> None:
        now = time.perf_counter()
        if self._stack:
            self._count(now)
        self._stack.append([name, now, now])

    def leave(self) -> None:
        now = time.perf_counter()
        self._count(now)
        self._stack.pop()
        if self._stack:
            self._stack[-1][2] = now

    def _count(self, now: float) -> None:
        name, _, counted = self._stack[-1]
        self.seconds[name] = self.seconds.get(name, 0.0) + now - counted

    def current(self) -> tuple[str, float]:
        """Name of the running phase and its age in seconds; ("", 0.0) between phases."""
        stack = self._stack[-1:]
        return (stack[0][0], time.perf_counter() - stack[0][1]) if stack else ("", 0.0)

    def step_seconds(self) -> float:
        return time.perf_counter() - self._step_start

    def reset(self) -> None:
        self.seconds = {}
        self._step_start = time.perf_counter()


class PhaseColumn(ProgressColumn):
    def __init__(self, phases: Phases):
        super().__init__()
        self._phases = phases

    def render(self, task) -> Text:
        name, age = self._phases.current()
        return Text(f"{name} {age:.0f} s" if name else "", style="cyan")


class TerminalDisplay:
    """A progress bar at the bottom of a terminal, with the current phase and its age beside it."""

    def __init__(self, console: Console, phases: Phases, total: int, done: int):
        self._progress = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TimeRemainingColumn(), PhaseColumn(phases),
            console=console, refresh_per_second=2, speed_estimate_period=600,
            redirect_stdout=False, redirect_stderr=False)
        self._task = self._progress.add_task("step", total=total, completed=done)
        self._progress.start()

    def advance(self, step: int) -> None:
        self._progress.update(self._task, completed=step)

    def close(self) -> None:
        self._progress.stop()


class Heartbeat:
    """Where there is no terminal: a line every `interval` seconds that a phase lasts."""

    def __init__(self, console: Console, phases: Phases, interval: float):
        self._console, self._phases, self._interval = console, phases, interval
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="fastsched-heartbeat", daemon=True)
        self._thread.start()

    def _beat(self) -> None:
        shown = 0
        while not self._stopped.wait(min(1.0, self._interval / 5)):
            name, age = self._phases.current()
            beats = int(age // self._interval)
            if name and beats > shown:
                self._console.print(f"  ... {name}: {age:.0f} s", highlight=False, markup=False)
            shown = beats

    def advance(self, step: int) -> None:
        pass

    def close(self) -> None:
        self._stopped.set()
        self._thread.join()


BLOCK = (
    (("success", "success", ".2f"), ("success_ema", "ema", ".2f"), ("reward_mean", "reward", ".3g")),
    (("entropy", "entropy", ".3g"), ("lambda_h", "lambda_H", ".3g"), ("kl", "KL", ".3g"),
     ("lambda_kl", "lambda_KL", ".3g"), ("drift", "drift", ".1e"), ("ema_alpha", "alpha", ".4g"), ("lr", "lr", ".1e")),
    (("kept_fraction", "kept", ".0%"), ("flat_groups", "flat groups", ".0%"), ("truncated", "truncated", ".0%"),
     ("ratio_deviation", "ratio deviation", ".1e"), ("grad_norm", "grad", ".3g"),
     ("skipped_nonfinite", "skipped", ".0f")),
    (("tokens_per_s", "tokens/s", ".0f"), ("peak_mem_gb", "peak GB", ".1f"), ("t_step", "seconds", ".1f")),
)
"""The lines of a step's block: (column, label, format)."""


def step_text(row: Mapping, total: int, window: tuple[float, float] | None) -> list[list[tuple[str, str]]]:
    """The block of one step as lines of (label, value) pairs; what was not measured shows as "-"."""

    def number(name: str, form: str) -> str:
        value = row.get(name)
        return "-" if value is None or value != value else format(value, form)

    lines = [[(label, number(name, form)) for name, label, form in line] for line in BLOCK]
    inside = {1: "in", 0: "OUT of" if row["window_reachable"] else "out of (not reachable)"}.get(row["in_window"], "?")
    if window:
        lines[0][1] = ("ema", f"{lines[0][1][1]} {inside} [{window[0]:.2f}, {window[1]:.2f}]")
    bins = range(bin_count(row))
    lines[0] += [("weights", " ".join(number(f"w_{b}", ".2f") for b in bins)),
                 ("success by bin", " ".join(number(f"p_{b}", ".2f") for b in bins))]
    if row.get("rule"):
        lines[1].append(("rule", str(row["rule"])))
    times = {name[2:]: row[name] for name in row if name.startswith("t_") and name != "t_step"}
    parts = ", ".join(f"{name} {s:.1f}" for name, s in times.items() if isinstance(s, float) and s >= 0.05)
    lines[3][2] = ("seconds", f"{lines[3][2][1]} ({parts})" if parts else lines[3][2][1])
    return [[(f"step {row['step']}/{total}", ""), *lines[0]], *lines[1:]]


def terminal_block(lines: list[list[tuple[str, str]]], alarming: bool) -> Text:
    """Four lines with dim labels; the success line is yellow while the window is missed, green otherwise."""
    block = Text()
    for number, line in enumerate(lines):
        for position, (label, value) in enumerate(line):
            block.append("" if number == 0 and position == 0 else "  ")
            block.append(label + (" " if value else ""), style="bold" if not value else "dim")
            block.append(value, style=("yellow" if alarming else "green") if label == "ema" else "")
        block.append("\n" if line is not lines[-1] else "")
    return block


def plain_block(lines: list[list[tuple[str, str]]]) -> str:
    """The same on two lines of plain text."""
    texts = ["  ".join(f"{label} {value}".rstrip() for label, value in line) for line in lines]
    return f"{texts[0]} | {texts[3]}\n    {texts[1]} | {texts[2]}"
