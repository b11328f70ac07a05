"""One rank under plain Python: no launcher, and no port that somebody else may hold."""

import socket
import subprocess
import sys

from command_line import ROOT, environment

PROGRAM = """
import torch.distributed as dist
from fastsched.engines.ranks import init_distributed
init_distributed()
dist.barrier()
init_distributed()  # a second call finds the group
print(dist.get_rank(), dist.get_world_size(), dist.get_backend())
"""


def test_h8_h9_two_runs_beside_each_other_need_no_port():
    """The fault: the port that the shell's MASTER_PORT names is held by another program."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        held.listen()
        taken = environment() | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(held.getsockname()[1])}
        runs = [subprocess.Popen([sys.executable, "-c", PROGRAM], cwd=ROOT, env=taken, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                 text=True) for _ in range(2)]
        for run in runs:
            out, err = run.communicate(timeout=240)
            assert run.returncode == 0 and out.split()[-3:] == ["0", "1", "gloo"], err[-2000:]
