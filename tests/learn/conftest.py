import pytest

from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.ranks import init_distributed, leave_distributed


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    """A tiny random model, and one process group for all modules here: DeepSpeed keeps groups of its own and survives no second one."""
    init_distributed()
    yield random_tiny(tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=0)
    leave_distributed()
