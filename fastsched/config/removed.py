"""Keys that configurations of before may hold: what became of each, and what is said of it."""

from typing import Any, Callable

from fastsched.config.checks import ConfigError

REMOVED: dict[str, tuple[Any, str]] = {
    "features.fit_rows": (100_000, "it is the constant 100000 in data/feature_store.py now"),
    "scheduler.adarft.alpha": (2.0, "it is the constant 2 in control/samplers/adarft.py now"),
    "scheduler.adarft.beta": (0.5, "it is the constant 0.5 in control/samplers/adarft.py now"),
    "scheduler.adarft.eta": (50.0, "it is the constant 50 in control/samplers/adarft.py now"),
    "scheduler.dead_band": (0.05, "it is the constant 0.05 in control/coefficients.py now"),
    "scheduler.dots.reference": (256, "it is the constant 256 in control/samplers/dots.py now"),
    "scheduler.dots.refresh": (2, "it is the constant 2 in control/samplers/dots.py now"),
    "scheduler.dots.temperature": (1e-3, "it is the constant 0.001 in control/samplers/dots.py now"),
    "scheduler.greso.flat_share": (0.25, "it is the constant 0.25 in control/samplers/greso.py now"),
    "scheduler.kl_gate.tokens": (1, "the gate follows the entropy of each token alone now, as it did with 1"),
    "scheduler.sec.rate": (0.5, "it is the constant 0.5 in control/samplers/sec.py now"),
    "scheduler.speed.rounds": (4, "it is the constant 4 in loop/batches.py now"),
    "scheduler.temporal.alpha": (0.4, "it is the constant 0.4 in learn/credit.py now"),
    "scheduler.temporal.kappa": (2.0, "it is the constant 2 in learn/credit.py now"),
}
"""Key: (what it was by default and is now, what became of it)."""


def refuse_removed_option(argument: str) -> None:
    """ConfigError where a command line argument is the option of a removed key."""
    key = argument.removeprefix("--").partition("=")[0]
    if argument.startswith("--") and key in REMOVED:
        raise ConfigError(f"{key}: was removed; {REMOVED[key][1]}; leave the option out")


def without_removed(tree: dict, warn: Callable[[str], None] | None, prefix: str = "") -> dict:
    """`tree`, a configuration file, without its removed keys and the sections that held nothing else.

    With `warn`, for the file of a run that was started before, a key whose value is what holds now is left out with a line;
    any other value, and every removed key without `warn`, is a ConfigError.
    """
    out = {}
    for name, value in tree.items():
        key = f"{prefix}{name}"
        if key in REMOVED:
            _report(key, value, warn)
        elif not isinstance(value, dict):
            out[name] = value
        elif (inner := without_removed(value, warn, f"{key}.")) or not value:
            out[name] = inner
    return out


def _report(key: str, value: Any, warn: Callable[[str], None] | None) -> None:
    now, why = REMOVED[key]
    if warn is None:
        raise ConfigError(f"{key}: was removed; {why}; delete the line")
    if value != now:
        raise ConfigError(f"{key}: was removed; {why}, and the run had {value}; start a new run, or delete the line to go on without it")
    warn(f"{key}: was removed; {why}, as the run had it")
