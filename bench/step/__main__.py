"""A whole training step of FastSched against another trainer's, in turns, by phase, with peak memory and the same learning curve.

    python -m bench.step --peer trl --model smollm2
    python -m bench.step --peer trl --model tiny --tokens 8 32

Writes bench/results/step-MODEL.{md,json}. Every finished process is kept: run it again to go on. TRL of the pinned version is taken
from this environment, or installed once beside it (.cache/fastsched/peers), without its dependencies, which are ours.
"""

import argparse
import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from bench.learning.summary import provenance
from bench.step import pairs, tables
from bench.step.peers import CANDIDATES, REQUIREMENTS, peer_folder, requirement
from bench.step.rounds import Bench, Failed, keep, kept, run_ours, run_peer
from bench.step.workload import WORKLOADS, config
from fastsched.config import BAD_INPUT, DONE, INTERRUPTED, ConfigError, require
from fastsched.report.runs import load_run

TRIAL_STEPS = 2
TRIAL_FASTER, STALE = 10.0, 0.1
"""A configuration is tried at ten times the learning rate, so that a sampler which missed the first update shows in the second step: more
than so many nats between sampler and learner, and it does not count as working."""
IMPORT_VLLM = """
import sys, torch, transformers
from fastsched.record.environment import peak_memory_gb
before = peak_memory_gb()
from vllm import LLM
print(peak_memory_gb() - before)
"""


def main(arguments: list[str] | None = None) -> int:
    own = parser().parse_args(arguments)
    try:
        work = WORKLOADS[own.model]
        work = replace(work, rounds=own.rounds or work.rounds, steps=own.steps or work.steps, tokens=tuple(own.tokens or work.tokens))
        require(work.steps > pairs.WARMUP, f"--steps: the first {pairs.WARMUP} of a process is not counted; give at least 2")
        bench = Bench.open(own.model, work, peer_folder(own.peer))
        command = " ".join(["python -m bench.step", *(arguments if arguments is not None else sys.argv[1:])])
        print(tables.write(measure(bench, own.peer, own.curve, command), own.out))
    except ConfigError as error:
        print(f"bench.step: {str(error).removeprefix('bench.step: ')}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("bench.step: interrupted; what has finished is kept", file=sys.stderr)
        return INTERRUPTED
    return DONE


def parser() -> argparse.ArgumentParser:
    own = argparse.ArgumentParser(prog="bench.step", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                  allow_abbrev=False)
    own.add_argument("--peer", choices=sorted(REQUIREMENTS), required=True)
    own.add_argument("--model", choices=sorted(WORKLOADS), required=True)
    own.add_argument("--tokens", type=int, nargs="+", help="longest response, one measurement each")
    own.add_argument("--rounds", type=int, help="a process of each side in every round")
    own.add_argument("--steps", type=int, help="of a process; the first is not counted")
    own.add_argument("--curve", type=int, default=20, help="steps of the learning curve; 0 leaves it out")
    own.add_argument("--out", type=Path, default=Path("bench/results"))
    return own


def measure(bench: Bench, peer: str, curve_steps: int, command: str) -> tables.Measured:
    """Trials of the peer's configurations, then the rounds, then the learning curve."""
    work, cfg = bench.work, config(bench.work, bench.work.tokens[0], 1)
    trials = {name: tried(bench, i, candidate) for i, (name, candidate) in enumerate(CANDIDATES[bench.model].items())}
    chosen = pairs.fastest(trials, CANDIDATES[bench.model])
    require(chosen is not None, f"--peer {peer}: none of its configurations works here; see {bench.folder}")
    candidate = CANDIDATES[bench.model][chosen]
    lengths = {tokens: pairs.compare([one_round(bench, candidate, tokens, seed) for seed in range(work.rounds)]) for tokens in work.tokens}
    curve = learning_curve(bench, candidate, curve_steps) if curve_steps else None
    size = f"{work.prompts} prompts x {work.responses} responses"
    runs = [load_run(file.parent) for file in sorted(bench.folder.glob("*-ours/environment.json"))]
    return tables.Measured(bench.model, size, cfg.model.dtype, requirement(peer), chosen, command, work.rounds, work.steps, trials, lengths,
                           curve, None if candidate.get("vllm") else vllm_import_gb(bench), provenance(runs))


def tried(bench: Bench, number: int, candidate: dict) -> dict:
    """{seconds, memory_gb, deviation} of one configuration of the peer, or {failed: why}; kept either way."""
    file = bench.folder / f"trial-{number}.verdict.json"
    return kept(file) or keep(file, attempt(bench, f"trial-{number}", candidate))


def attempt(bench: Bench, name: str, candidate: dict) -> dict:
    say(bench, name)
    try:
        steps = run_peer(bench, name, candidate, bench.work.tokens[0], TRIAL_STEPS, faster=TRIAL_FASTER)["steps"]
    except Failed as failure:
        return {"failed": str(failure).removeprefix("bench.step: ").split(" (all of it")[0]}
    deviation = steps[-1]["deviation"]
    if deviation is not None and deviation > STALE:
        return {"failed": f"its sampler is {deviation:.2f} nats from its learner: it samples from other weights"}
    return {"seconds": pairs.typical(steps, "total"), "memory_gb": pairs.peak(steps), "deviation": deviation}


def one_round(bench: Bench, candidate: dict, tokens: int, seed: int) -> tuple[list[dict], list[dict]]:
    name, steps = f"tokens-{tokens}-steps-{bench.work.steps}-round-{seed}", bench.work.steps
    say(bench, name)
    ours = run_ours(bench, f"{name}-ours", tokens, steps, seed)
    return ours["steps"], run_peer(bench, f"{name}-peer-{digest(candidate)}", candidate, tokens, steps, seed)["steps"]


def learning_curve(bench: Bench, candidate: dict, steps: int) -> dict[str, dict]:
    name, tokens = f"curve-{steps}", bench.work.tokens[0]
    say(bench, name)
    return {"FastSched": run_ours(bench, f"{name}-ours", tokens, steps, curve=True),
            "TRL": run_peer(bench, f"{name}-peer-{digest(candidate)}", candidate, tokens, steps, curve=True)}


def digest(candidate: dict) -> str:
    """Names a configuration of the peer in the files of its processes."""
    return hashlib.sha256(json.dumps(candidate, sort_keys=True).encode()).hexdigest()[:8]


def vllm_import_gb(bench: Bench) -> float:
    file = bench.folder / "vllm-import.json"
    if (found := kept(file)) is None:
        done = subprocess.run([sys.executable, "-c", IMPORT_VLLM], capture_output=True, text=True)
        require(done.returncode == 0, f"vLLM cannot be imported: {done.stderr[-300:]}")
        found = keep(file, {"gb": float(done.stdout.split()[-1])})
    return found["gb"]


def say(bench: Bench, name: str) -> None:
    print(f"== {bench.model} {name}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
