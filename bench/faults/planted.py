"""Whole runs with a fault planted in each, against runs without: what the user saw, and what was lost.

    python -m bench.faults [--steps 1 2 ... ] [--only NAME ...] [--again]

tiny-cpu, 12 steps, a checkpoint after each, on the transformers sampler: seconds a run. Lost is whatever differs, bit for bit, between
the resumed run and one that nothing happened to: metrics.csv without clocks, samples, evaluations and every file of the last
checkpoint. Finished faults are remembered in the work folder by commit, so that a second start goes on. Exit code 1 if anything was lost.
"""

import argparse
import csv
import json
import os
import subprocess
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Callable

from fastsched.record.checkpoint import checkpoints, newest_intact, step_of
from fastsched.record.environment import write_environment

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parents[1] / "results"
STEPS = 12
PARTS = ("learn", "sync", "save", "log", "rollout")  # where kill -9 strikes, in turn: step 1 in learn, step 2 in sync, ...
CLOCKS = ("t_", "tokens_per_s", "peak_mem_gb")
OPTIONS = ("train", "--preset", "tiny-cpu", "--rollout.engine", "transformers", "--data.size", "400", "--data.eval_per_bin", "4",
           "--train.prompts_per_step", "8", "--rollout.responses", "4", "--learner.micro_batch_tokens", "64",
           "--train.checkpoint_every", "1", "--train.eval_every", "4", "--log.plots", "false", "--log.tensorboard", "false")
LIMIT_S = 600


@dataclass
class Outcome:
    fault: str
    saw: str
    lost: str  # "nothing", or what differs
    seconds: float


def start(run_dir: Path, *extra: str, ranks: int = 1, fault: str = "", resume: bool = False, path: str = "") -> tuple[int, str]:
    """One start of the command line; returns (exit code, console). A killed process has code -9, or what its launcher says."""
    module = ("-m", "bench.faults.injection") if fault else ("-m", "fastsched.cli")
    launcher = ("-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}") if ranks > 1 else ()
    command = [sys.executable, *launcher, *module, *OPTIONS, "--train.steps", str(STEPS), "--run_dir", str(run_dir), *extra]
    search = os.pathsep.join(filter(None, (path, str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", ""))))
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": search, **({"FAULT": fault} if fault else {})}
    done = subprocess.run([*command, *(["--resume"] if resume else [])], env=environment, cwd=ROOT, capture_output=True, text=True,
                          timeout=LIMIT_S)
    return done.returncode, done.stdout + done.stderr


def straight(work: Path, ranks: int) -> Path:
    """The run that nothing happens to, made once a commit."""
    run_dir = work / f"straight-{ranks}"
    if not any(step_of(c) == STEPS for c in checkpoints(run_dir)):
        code, console = start(run_dir, ranks=ranks)
        if code:
            raise SystemExit(f"the run without a fault ended with {code}:\n{console[-3000:]}")
    return run_dir


def rows(run_dir: Path) -> list[dict]:
    with (run_dir / "metrics.csv").open() as file:
        return [{k: v for k, v in row.items() if not k.startswith(CLOCKS)} for row in csv.DictReader(file)]


def difference(run_dir: Path, other: Path) -> str:
    """The first thing that is not bit for bit the same in both runs; "nothing" when all is."""
    for mine, theirs in zip(rows(run_dir), rows(other), strict=False):
        if mine != theirs:
            return f"step {mine['step']}: {', '.join(k for k in mine if mine[k] != theirs.get(k))} differ"
    if len(rows(run_dir)) != STEPS:
        return f"{len(rows(run_dir))} rows of {STEPS}"
    for name in ("samples.jsonl", "evals.jsonl"):
        if (run_dir / name).read_text() != (other / name).read_text():
            return f"{name} differs"
    markers = [json.loads((folder / f"checkpoints/step-{STEPS}/COMPLETE").read_text())["files"] for folder in (run_dir, other)]
    changed = [name for name in markers[0] if markers[0][name] != markers[1].get(name)]
    return f"{', '.join(changed)} of the last checkpoint differ" if changed else "nothing"


def said(console: str, *words: str) -> str:
    """The first line of the console with one of the words, shortened."""
    for line in console.splitlines():
        if any(word in line for word in words):
            return line.strip()[:240]
    return "no such line: " + " | ".join(console.strip().splitlines()[-3:])[:240]


def killed(work: Path, ranks: int, steps: list[int]) -> tuple[str, str]:
    """SIGKILL in every step of one run, resumed each time from where the last kill left it."""
    run_dir, last = work / f"killed-{ranks}", ""
    for step in steps:
        part = PARTS[(step - 1) % len(PARTS)]
        code, console = start(run_dir, ranks=ranks, fault=f"{part}:{step}", resume=run_dir.exists())
        found = newest_intact(run_dir, lambda line: None)
        if code == 0 or (step_of(found) if found else 0) != step - 1:
            return console[-300:], f"kill in {part} of step {step}: exit code {code}, newest checkpoint {found and found.name}"
    code, console = start(run_dir, ranks=ranks, resume=True)
    last = said(console, "resumed step-")
    return last, difference(run_dir, straight(work, ranks)) if code == 0 else f"exit code {code}: {console[-600:]}"


def resumed(work: Path, run_dir: Path, ranks: int, code: int, console: str, *words: str) -> tuple[str, str]:
    """What a guard said, and what a resume then gives."""
    saw = said(console, *words)
    if code == 0 or saw.startswith("no such line"):
        return saw, f"the run ended with {code} and did not say why"
    code, console = start(run_dir, ranks=ranks, resume=True)
    return saw, difference(run_dir, straight(work, ranks)) if code == 0 else f"resume ended with {code}: {console[-600:]}"


def dead_rank(work: Path) -> tuple[str, str]:
    run_dir, begun = work / "dead-rank", time.monotonic()
    code, console = start(run_dir, ranks=2, fault="learn:5:1")
    took = time.monotonic() - begun
    saw, lost = resumed(work, run_dir, 2, code, console + (run_dir / "log.txt").read_text(), "another rank ended")
    return f"{saw[:200]} (all processes ended {took:.0f} s after the start)", lost


def broken_sync(work: Path) -> tuple[str, str]:
    code, console = start(work / "broken-sync", fault="raise:5")
    return resumed(work, work / "broken-sync", 1, code, console, "weight sync, version 5")


def full_disk(work: Path) -> tuple[str, str]:
    """In a mount namespace of its own: a tmpfs that holds two checkpoints and no third."""
    disk = work / "disk"
    disk.mkdir(exist_ok=True)
    straight(work, 1)
    inside = [sys.executable, "-m", "bench.faults", "--work", str(work), "--inside", str(disk)]
    mounted = f"mount -t tmpfs -o size=27m tmpfs '{disk}' && exec \"$@\""
    done = subprocess.run(["unshare", "-rm", "sh", "-c", mounted, "sh", *inside], cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        return done.stderr[-300:], "not run: no tmpfs can be mounted here (needs root or user namespaces)"
    saw, lost = json.loads(done.stdout.splitlines()[-1])
    return f"{saw} (tmpfs of 27 MB)", lost


def inside_full_disk(work: Path, disk: Path) -> tuple[str, str]:
    code, console = start(disk / "run")
    newest = newest_intact(disk / "run", lambda line: None)
    if newest is None:
        return console[-300:], "no intact checkpoint is left"
    subprocess.run(["mount", "-o", "remount,size=200m", str(disk)], check=True)
    return resumed(work, disk / "run", 1, code, console, "could not be written", "disk is full")


def hanging_reward(work: Path) -> tuple[str, str]:
    (work / "hanging.py").write_text(
        "import time\n\n\ndef score(response, **_):\n    kind = sum(map(ord, response)) % 16\n"
        "    if kind == 4:\n        time.sleep(3600)\n    return kind / 16\n")
    run_dir = work / "hanging"
    code, console = start(run_dir, "--reward.kind", "hanging:score", "--reward.timeout_s", "0.5", path=str(work))
    failures = [float(row["reward_failures"]) for row in rows(run_dir)]
    good = code == 0 and len(failures) == STEPS and 0 < sum(failures) < 32 * STEPS
    return f"{said(console, 'reward failed (timeout)')} ({sum(failures):.0f} of {32 * STEPS} responses)", (
        "nothing" if good else f"exit code {code}, {len(failures)} rows, {sum(failures):.0f} failures")


def nan_gradient(work: Path) -> tuple[str, str]:
    run_dir = work / "nan"
    code, console = start(run_dir, fault="nan:5")
    skipped = [int(float(row["skipped_nonfinite"])) for row in rows(run_dir)]
    dumped = (run_dir / "nonfinite-step-5-rank-0.npz").exists()
    finite = all(row["entropy"] and row["kl"] and (row["grad_norm"] or row["step"] == "5") for row in rows(run_dir))
    good = code == 0 and skipped == [int(step == 5) for step in range(1, STEPS + 1)] and dumped and finite
    lines = [line.strip() for line in console.splitlines() if "skipped 1" in line]
    saw = f"...{lines[0][-60:]} (step 5's update left out, its batch in nonfinite-step-5-rank-0.npz, the run goes on)" if lines else "-"
    return saw, "nothing" if good else f"exit code {code}, skipped {skipped}, dumped {dumped}, finite {finite}"


def faults(steps: list[int]) -> dict[str, Callable[[Path], tuple[str, str]]]:
    listed = "each of the 12 steps" if len(steps) == STEPS else "steps " + ", ".join(map(str, steps))
    kills = f"kill -9 in {listed}, in turn in learn (inside the accumulation), sync, save, log, rollout; resumed after each"
    return {
        f"{kills}; 1 rank": lambda work: killed(work, 1, steps),
        f"{kills}; 2 ranks": lambda work: killed(work, 2, steps),
        "a rank dies (1 of 2, kill -9 in step 5)": dead_rank,
        "the disk is full": full_disk,
        "a reward that hangs": hanging_reward,
        "the engine raises in the middle of a weight sync (step 5)": broken_sync,
        "a NaN in the gradient (step 5)": nan_gradient,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, nargs="+", default=list(range(1, STEPS + 1)), help="steps to kill in")
    parser.add_argument("--only", nargs="+", default=[""], help="faults whose name contains one of these")
    parser.add_argument("--again", action="store_true", help="also what is done at this commit")
    parser.add_argument("--work", type=Path, help="default: runs/faults-COMMIT")
    parser.add_argument("--out", type=Path, help="folder of the table; default: bench/results once every fault of the full list is done at "
                                                 "this commit, --work until then")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True).stdout.strip() or "unknown"
    work = (own.work or ROOT / f"runs/faults-{commit}").resolve()
    if own.inside:
        print(json.dumps(inside_full_disk(work, own.inside)))
        return 0
    work.mkdir(parents=True, exist_ok=True)
    done = run_all(work, faults(own.steps), own.only, own.again)
    whole = set(faults(list(range(1, STEPS + 1)))) <= {outcome.fault for outcome in done}
    write_table(work, done, own.out or (RESULTS if whole else work))
    return int(any(outcome.lost != "nothing" for outcome in done))


def run_all(work: Path, planned: dict, only: list[str], again: bool) -> list[Outcome]:
    store = work / "done.json"
    done = {o["fault"]: Outcome(**o) for o in json.loads(store.read_text())} if store.exists() else {}
    for name, run in planned.items():
        if not any(part in name for part in only) or (name in done and not again):
            continue
        for old in work.iterdir():  # what an earlier, unfinished try left
            if old.is_dir() and not old.name.startswith("straight"):
                subprocess.run(["rm", "-rf", str(old)], check=True)
        begun = time.monotonic()
        saw, lost = run(work)
        done[name] = Outcome(name, saw, lost, round(time.monotonic() - begun, 1))
        print(f"{name}\n    saw:  {saw}\n    lost: {lost}\n", flush=True)
        store.write_text(json.dumps([asdict(o) for o in done.values()], indent=1))
    return list(done.values())


def write_table(work: Path, done: list[Outcome], out: Path) -> None:
    """faults.md and faults.json in `out`."""
    write_environment(work)
    on = json.loads((work / "environment.json").read_text())
    head = {"date": on["started"][:10], "cpu": on["cpu"], "cores": on["cores"], "memory_gb": on["memory_gb"], "git": on["git"]}
    cell = lambda text: text.replace("|", "\\|").replace("\n", " ").replace(str(ROOT) + "/", "")
    commit = (on["git"] or {}).get("commit", "unknown")[:12]
    lines = [f"{head['date']}, {head['cpu']}, {head['cores']} cores, {head['memory_gb']} GB, commit {commit}; "
             "`python -m bench.faults`: tiny-cpu, 12 steps, a checkpoint after each.", "",
             "| fault | what the user saw | what was lost | seconds |", "|---|---|---|---|"]
    lines += [f"| {cell(o.fault)} | {cell(o.saw)} | {cell(o.lost)} | {o.seconds:.0f} |" for o in done]
    out.mkdir(parents=True, exist_ok=True)
    (out / "faults.md").write_text("\n".join(lines) + "\n")
    (out / "faults.json").write_text(json.dumps({**head, "faults": [asdict(o) for o in done]}, indent=1) + "\n")
    print("\n".join(lines), out / "faults.md", sep="\n\n")
