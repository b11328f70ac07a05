"""Where the command line runs in tests, and in which environment."""

import os
from pathlib import Path

ROOT = Path(__file__).parent.parent


def environment() -> dict[str, str]:
    """This process's, without what a launcher or an earlier test set for torch.distributed."""
    return {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")}
