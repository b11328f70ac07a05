"""The peer's process: reads a job, measures it, writes the result whole or not at all.

    python -m bench.step.trl_process JOB.json RESULT.json

TRL imports vLLM and DeepSpeed wherever they are installed. A user of a configuration without them need not have them, so they are
hidden from it: it starts faster and takes less memory.
"""

import json
import sys
from pathlib import Path

from bench.step.job import Job


def main(job_file: str, result_file: str) -> None:
    job, result = Job.read(Path(job_file)), Path(result_file)
    for package in ("vllm", "deepspeed"):
        if not job.candidate.get(package):
            sys.modules[package] = None
    from bench.step.trl_trainer import measure

    measured = measure(job, result.parent / "trl")
    partial = result.with_suffix(".partial")
    partial.write_text(json.dumps(measured))
    partial.rename(result)


if __name__ == "__main__":
    main(*sys.argv[1:])
