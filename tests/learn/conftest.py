import pytest

from fastsched.engines.models.tiny import random_tiny
from fastsched.engines.ranks import init_distributed, leave_distributed


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return random_tiny(tmp_path_factory.mktemp("model") / "tiny", tied=True, seed=0)


@pytest.fixture(autouse=True, scope="module")
def no_group_left():
    """Other tests of this process find it without a group."""
    yield
    leave_distributed()


@pytest.fixture(autouse=True)
def process_group():
    """A run in this process leaves the group when it ends; whichever tests came before, there is one here."""
    init_distributed()
