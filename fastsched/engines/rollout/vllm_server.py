"""vLLM's OpenAI-compatible server, started as a process of its own by `server_process.ServerProcess` or by hand.

    python -m fastsched.engines.rollout.vllm_server [--rollout] [--fd N --parent PID] [options of vLLM's server]

With --fd it listens on the socket that its parent bound and holds, and dies with its parent; without, on --host (loopback by
default) and --port. With --rollout it also serves `server_engine.ServerRollout`: the routes of `server_routes`, vLLM's own routes
for weight transfer with the backend of `vllm_worker`, and /collective_rpc. Those have no password: keep them on loopback or on a
network of their own.
"""

import asyncio
import ctypes
import os
import signal
import socket
import sys
from argparse import ArgumentParser, Namespace

PR_SET_PDEATHSIG = 1  # linux/prctl.h
ROLLOUT_OPTIONS = ("--worker-extension-cls", "fastsched.engines.rollout.vllm_worker.WorkerExtension",
                   "--weight-transfer-config", '{"backend": "safetensors"}', "--skip-tokenizer-init",
                   "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm")


def main(arguments: list[str]) -> None:
    own = ArgumentParser(add_help=False, allow_abbrev=False)
    own.add_argument("--fd", type=int)
    own.add_argument("--parent", type=int)
    own.add_argument("--rollout", action="store_true")
    mine, rest = own.parse_known_args(arguments)
    if mine.parent is not None:
        die_with(mine.parent)
    if mine.rollout:
        os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # vLLM has its routes for weight transfer under this switch
        rest = [*ROLLOUT_OPTIONS, *rest]
    sock = None if mine.fd is None else socket.socket(fileno=mine.fd)
    asyncio.run(serve(sock, rest, mine.rollout))


def die_with(parent: int) -> None:
    """The kernel ends this process when the one that started it ends, however that happens."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(f"process {parent}, which started this server, is gone")


def _interrupt(number: int, frame) -> None:
    raise KeyboardInterrupt  # while the engine starts; uvicorn's own handlers follow


async def serve(sock: socket.socket | None, arguments: list[str], rollout: bool) -> None:
    """vLLM's own start of one API server, with our routes where asked for."""
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.launcher import setup_server

    signal.signal(signal.SIGTERM, _interrupt)
    if sock is None:
        args = server_options(["--host", "127.0.0.1", *arguments])
        _, sock = setup_server(args, reuse_port=False)
    host, port = sock.getsockname()[:2]
    args = server_options([*arguments, "--host", host, "--port", str(port)])
    async with entry.build_async_engine_client(args) as client:
        if rollout:
            _add_routes_to(entry)
        finished = await entry.build_and_serve(client, f"http://{host}:{port}", sock, args)
    try:
        await finished
    finally:
        sock.close()


def _add_routes_to(entry) -> None:
    """vLLM builds its application inside `build_and_serve`; ours is the same with one router more."""
    from fastsched.engines.rollout.server_routes import router

    build_app = entry.build_app

    def with_rollout_routes(*given):
        app = build_app(*given)
        app.include_router(router)
        return app

    entry.build_app = with_rollout_routes


def server_options(arguments: list[str]) -> Namespace:
    """Parsed and checked options of vLLM's server."""
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parsed = make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)
    validate_parsed_serve_args(parsed)
    return parsed


if __name__ == "__main__":
    main(sys.argv[1:])
