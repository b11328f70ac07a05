import pytest

from fastsched.engines.deepspeed_engine import init_distributed, leave_distributed
from fastsched.engines.tiny import random_tiny


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    init_distributed()
    yield random_tiny(tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=0)
    leave_distributed()
