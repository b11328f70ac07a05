"""What every part of the configuration needs: the one error and where things made once are kept."""

import os
from pathlib import Path

DONE, BAD_INPUT, GUARD, INTERRUPTED = 0, 2, 3, 130
"""Exit codes: all well; configuration or input that cannot be run; a guard or a failed part; interrupted after a checkpoint."""


class ConfigError(ValueError):
    """A configuration or input that cannot be run; the message names the key or row and what to do. Exit code 2."""


class FeaturesMissing(ConfigError):
    """`fastsched cluster` has not been run for this model and data; the command line adds the command to the message."""


def require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def default_cache_dir() -> Path:
    """The folder of everything that is made once: FASTSCHED_CACHE, or `.cache/fastsched` in the working directory."""
    return Path(os.environ.get("FASTSCHED_CACHE") or ".cache/fastsched")
