"""The record of a run: one call a step writes metrics.csv, metrics.jsonl, TensorBoard and the console.

    with RunLog(run_dir, cfg.log, cfg.train.steps, window=cfg.scheduler.window) as log:
        log.capture_output()
        with log.phase("rollout"): ...
        log.step(row)          # t_rollout and the other t_ columns are filled in from the phases
"""

import os
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Mapping, Sequence

from rich.console import Console
from rich.text import Text

from fastsched.config import ConfigError, LogConfig
from fastsched.record.console import Capture, Heartbeat, Phases, TerminalDisplay, plain_block, step_text, terminal_block
from fastsched.record.dashboards import Dashboards
from fastsched.record.environment import peak_memory_gb
from fastsched.record.tables import COLUMNS, SAMPLE_KEYS, Value, csv_line, cut_csv, cut_jsonl, header, json_line, plain

LOSS_NOTE = ("A loss near 0 is normal: on-policy, advantages average to 0 and every ratio is 1, so the value vanishes "
             "while its gradient does not. Read reward, grad and flat groups instead.")


class RunLog:
    """Files and console of one run; a context manager that gives the console back however the run ends.

    Only the main rank writes tables and speaks on the console; the other ranks' notes go to their log-rankN.txt.
    `window` is the success band of the step block. `resume_step` N cuts every table back to step <= N and appends;
    without it, a folder that already holds metrics.csv raises ConfigError. `heartbeat` is in seconds.
    """

    def __init__(self, run_dir: Path, cfg: LogConfig, total_steps: int, *, resume_step: int | None = None,
                 is_main: bool = True, console: Console | None = None, window: tuple[float, float] | None = None,
                 heartbeat: float = 30.0):
        self.run_dir, self.cfg, self.total_steps, self.is_main = Path(run_dir), cfg, total_steps, is_main
        self.phases = Phases()
        self._console = console or Console(highlight=False)
        self._own_console = console is None
        self._window, self._heartbeat, self._done = window, heartbeat, resume_step or 0
        self._capture = self._display = None
        self._files, self._names, self._noted = {}, [], set()
        if not is_main:
            return
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._files["log.txt"] = self._open("log.txt")
        self._cut_back(resume_step)
        self._dashboards = Dashboards(self.run_dir, cfg, resume_step)

    def _open(self, name: str):
        return (self.run_dir / name).open("a", encoding="utf-8", newline="")

    def _cut_back(self, resume_step: int | None) -> None:
        metrics = self.run_dir / "metrics.csv"
        if resume_step is None:
            if metrics.exists():
                raise ConfigError(f"{self.run_dir} already holds a run: use --resume, or another --run_dir")
            return
        self._names, last = cut_csv(metrics, resume_step)
        for name in ("metrics.jsonl", "deciles.jsonl", "samples.jsonl", "evals.jsonl"):
            cut_jsonl(self.run_dir / name, resume_step or -1)  # from the start again: so is the evaluation before step 1
        if (last or 0) != resume_step:
            self.warn(f"metrics.csv ends at step {last or 0}, the checkpoint at {resume_step}: rows are missing")

    def capture_output(self, path: Path | None = None) -> None:
        """Send descriptors 1 and 2 of this process and its children to `path` until `close`; the console stays.

        By default log.txt, or log-rankN.txt on other ranks (N from the launcher's RANK), where the console goes too.
        """
        name = "log.txt" if self.is_main else f"log-rank{os.environ.get('RANK', 'N')}.txt"
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self._capture = Capture(path or self.run_dir / name)
        if self._own_console and self.is_main:
            self._console = Console(file=self._capture.stdout, highlight=False)

    def _start_display(self) -> None:
        if not self.is_main or self._display:
            return
        if self._console.is_terminal:
            self._display = TerminalDisplay(self._console, self.phases, self.total_steps, self._done)
        else:
            self._display = Heartbeat(self._console, self.phases, self._heartbeat)

    @contextmanager
    def phase(self, name: str):
        """Names what the run does. Seconds add up by name until the next `step`; an inner phase pauses its outer."""
        self._start_display()
        self.phases.enter(name)
        try:
            yield
        finally:
            self.phases.leave()

    def restart_clock(self) -> None:
        """Forget the phases so far, so that loading and the first evaluation do not count as part of the first step."""
        self.phases.reset()

    peak_memory_gb = staticmethod(peak_memory_gb)

    def step_seconds(self) -> float:
        """Seconds since the last `step` or `restart_clock`; for rates in the row."""
        return self.phases.step_seconds()

    def step(self, row: Mapping[str, Value]) -> None:
        """Writes one row everywhere and flushes.

        `row` needs every name of `columns(K)`, save the t_ columns, which default to the seconds of the phase of that
        name (t_step: since the last step). ConfigError names columns that are missing, or that the first row did not
        have; TypeError names a value that is no number, string or None.
        """
        row = {name: plain(name, value) for name, value in self._with_times(row).items()}
        self.phases.reset()
        if not self.is_main:
            return
        ordered = header(row)
        unknown = [name for name in row if self._names and name not in self._names]
        if unknown:
            raise ConfigError(f"metrics row of step {row['step']}: columns not in the first row: {', '.join(unknown)}")
        if not self._names:
            self._names = ordered
            self._append("metrics.csv", csv_line(ordered))
        self._append("metrics.csv", csv_line(row.get(name) for name in self._names))
        self._append("metrics.jsonl", json_line({name: row.get(name) for name in self._names}))
        self._dashboards.write(row)
        self._show(row)

    def _with_times(self, row: Mapping[str, Value]) -> dict[str, Value]:
        seconds = self.phases.seconds
        times = {name: seconds.get(name[2:], 0.0) for name in COLUMNS if name.startswith("t_")}
        times["t_step"] = self.phases.step_seconds()
        return {**times, **row}

    def _append(self, name: str, text: str) -> None:
        if name not in self._files:
            self._files[name] = self._open(name)
        self._files[name].write(text)
        self._files[name].flush()

    def _show(self, row: Mapping[str, Value]) -> None:
        self._start_display()
        self._display.advance(row["step"])
        lines = step_text(row, self.total_steps, self._window)
        self._append("log.txt", _stamped(plain_block(lines)))
        if self._console.is_terminal:
            self._console.print(terminal_block(lines, alarming=row["in_window"] != 1))
        else:
            self._print(plain_block(lines))
        self.note_once(LOSS_NOTE)

    def samples(self, step: int, rows: Sequence[Mapping]) -> None:
        """Appends the first `cfg.samples_per_step` rows to samples.jsonl; each needs `SAMPLE_KEYS`, more is kept."""
        if not self.is_main:
            return
        for row in rows[:self.cfg.samples_per_step]:
            missing = [key for key in SAMPLE_KEYS if key not in row]
            if missing:
                raise ConfigError(f"sample of step {step}: keys missing: {', '.join(missing)}")
            self._append("samples.jsonl", json_line({"step": step, **row}))

    def deciles(self, step: int, means: Mapping[str, Sequence[float]]) -> None:
        """Appends one row to deciles.jsonl: `records.DECILE_KEYS`, ten numbers each."""
        if self.is_main:
            self._append("deciles.jsonl", json_line({"step": step, **means}))

    def evaluation(self, step: int, accuracy: Mapping[str, float], counts: Mapping[str, int], failed: int = 0) -> None:
        """Appends held-out accuracy (0..1) and number of prompts, both by bin, to evals.jsonl, and shows them.

        `failed` of the prompts' responses could not be scored and count as wrong.
        """
        if not self.is_main:
            return
        if set(accuracy) != set(counts):
            raise ConfigError(f"evaluation of step {step}: bins {sorted(accuracy)}, but counts of {sorted(counts)}")
        self._append("evals.jsonl", json_line({"step": step, "accuracy": accuracy, "n": counts, "failed": failed}))
        row = {"step": step, **{name: plain(name, value) for name, value in accuracy.items()}}
        self._dashboards.write(row, "eval/")
        shown = ", ".join(f"{name} {value:.1%}" for name, value in accuracy.items())
        self.note(f"held-out accuracy at step {step}: {shown} ({sum(counts.values())} prompts, greedy)")

    def note(self, text: str) -> None:
        """A line on the console and, with the time, in log.txt."""
        if not self.is_main:
            print(text, flush=True)  # their captured stdout is log-rankN.txt
            return
        self._append("log.txt", _stamped(text))
        self._print(text)

    def note_once(self, text: str, key: str | None = None) -> None:
        """A note, unless one of the same `key` (by default: the same text) was made before."""
        if (key or text) not in self._noted:
            self._noted.add(key or text)
            self.note(text)

    def warn(self, text: str) -> None:
        """A note that stands out."""
        self.note(f"WARNING: {text}")

    def record(self, text: str) -> None:
        """A line in log.txt, or this rank's own log, that the console does not show."""
        if self.is_main:
            self._append("log.txt", _stamped(text))
        else:
            self.note(text)

    def _print(self, text: str) -> None:
        style = "bold yellow" if text.startswith("WARNING") else ""
        self._console.print(Text(text, style=style), highlight=False, soft_wrap=True)

    def close(self) -> None:
        """Stops the display, closes the files and gives descriptors 1 and 2 back. May be called twice."""
        if self._display:
            self._display.close()
        if self.is_main:
            self._dashboards.close()
        try:
            for file in self._files.values():
                file.close()
        finally:  # on a full disk a file cannot be closed: that must still reach the user
            if self._capture:
                self._capture.restore()
                self._console = Console(highlight=False) if self._own_console else self._console
            self._capture = self._display = None
            self._files = {}

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _stamped(text: str) -> str:
    return f"[{time.strftime('%Y-%m-%d %H:%M:%S')}] {text}\n"
