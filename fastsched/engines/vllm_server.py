"""vLLM's OpenAI-compatible server, started as a process of its own by `server_process.ServerProcess`.

    python -m fastsched.engines.vllm_server --fd N --parent PID [options of vLLM's server]

It listens on the socket N that its parent bound and holds, and dies with its parent.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from argparse import ArgumentParser

PR_SET_PDEATHSIG = 1  # linux/prctl.h


def main(arguments: list[str]) -> None:
    own = ArgumentParser(add_help=False)
    own.add_argument("--fd", type=int, required=True)
    own.add_argument("--parent", type=int, required=True)
    mine, rest = own.parse_known_args(arguments)
    die_with(mine.parent)
    asyncio.run(serve(socket.socket(fileno=mine.fd), rest))


def die_with(parent: int) -> None:
    """The kernel ends this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this server, is gone")


def _interrupt(number: int, frame) -> None:
    raise KeyboardInterrupt  # while the engine starts; uvicorn's own handlers follow


async def serve(sock: socket.socket, arguments: list[str]) -> None:
    from vllm.entrypoints.launchers.api_server.entry import run_server_worker

    signal.signal(signal.SIGTERM, _interrupt)
    host, port = sock.getsockname()[:2]
    await run_server_worker(f"http://{host}:{port}", sock, server_arguments([*arguments, "--host", host, "--port", str(port)]))


def server_arguments(arguments: list[str]):
    """Parsed and checked options of vLLM's server."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    return parsed


if __name__ == "__main__":
    main(sys.argv[1:])
