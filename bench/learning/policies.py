"""Makes the warm-started policies that the package brings, with their tokenizer, and prints their lines of shipped.POLICIES.

    python -m bench.learning.policies                                  # into fastsched/engines/models/policies, some minutes
    python -m bench.learning.policies --only arithmetic --out made     # to look at

On another machine the sums of the warm start round otherwise, so the weights differ in their last digits and the checksums with them.
"""

import argparse
import hashlib
import tempfile
from pathlib import Path

from fastsched.config import ModelConfig
from fastsched.config.arguments import parse_config, preset_path
from fastsched.engines.models import shipped, tiny
from fastsched.engines.models.loading import load_policy
from fastsched.loop.prepare import warm_start_rows

PRESETS = {"arithmetic": "tiny-cpu", "chain": "chain-tiny"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False)
    parser.add_argument("--only", choices=PRESETS, nargs="+", default=list(PRESETS))
    parser.add_argument("--out", type=Path, default=shipped.FOLDER)
    own = parser.parse_args()
    own.out.mkdir(parents=True, exist_ok=True)
    for name in own.only:
        print(make(name, own.out), flush=True)


def make(name: str, out: Path) -> str:
    """Warms a policy up for the task of its preset and writes it with the tokenizer; its line of the table."""
    cfg = parse_config(["--config", str(preset_path(PRESETS[name]))])
    rows, accuracy = warm_start_rows(cfg.data), cfg.model.warm_start_accuracy
    with tempfile.TemporaryDirectory() as folder:
        tiny.warm_start(Path(folder), rows, accuracy)
        shipped.pack(load_policy(Path(folder), ModelConfig()), out / f"{name}.safetensors")
        (out / shipped.TOKENIZER[0]).write_bytes((Path(folder) / "tokenizer.json").read_bytes())
    sums = [hashlib.sha256((out / file).read_bytes()).hexdigest() for file in (f"{name}.safetensors", shipped.TOKENIZER[0])]
    return f'Policy("{name}.safetensors", "{shipped.recipe_hash(rows, accuracy)}", "{sums[0]}")  # tokenizer {sums[1]}'


if __name__ == "__main__":
    main()
