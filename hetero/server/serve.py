"""Listening: the socket is taken before the model is loaded, so that a taken port fails at once."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import signal
import socket
import sys
from collections.abc import Callable
from types import FrameType

import uvicorn

from hetero.core import InputError, MachineError
from hetero.engine.generate import Engine
from hetero.server.app import create_app

# An answer in progress may end by itself for this long after the first signal; a second one stops at once.
DRAIN_S = 10
# Most time that a step, after which a stopped answer ends, is waited for.
STEP_S = 20


def open_socket(host: str, port: int, allow_remote: bool = False) -> socket.socket:
    """A listening socket. Raises InputError for a host that others can reach without ``allow_remote`` or one
    that is not this machine's, MachineError for a port that cannot be had."""
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be from 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host}: not an address of this machine: {error}") from None
    if not ipaddress.ip_address(str(address[0]).split("%")[0]).is_loopback and not allow_remote:
        raise InputError(
            f"--host {host}: anyone who reaches this address could use the server, which asks for no key; "
            "add --allow-remote if that is meant"
        )
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
        listener.listen(128)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise MachineError(f"port {port} of {host} is already in use: choose another --port") from None
        if error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"--host {host}: not an address of this machine") from None
        raise MachineError(f"cannot listen on {host} port {port}: {error.strerror}") from None
    return listener


def serve(engine: Engine, name: str, listener: socket.socket) -> None:
    """Serve until SIGTERM or SIGINT, then let the running answer end within DRAIN_S."""
    # uvicorn raises the signal again after its own shutdown; a finished server is a success.
    signal.signal(signal.SIGTERM, _leave)
    app = create_app(engine, name)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        # Should come too late: it tears connections off, without a word to the client.
        timeout_graceful_shutdown=DRAIN_S + STEP_S,
    )
    Server(config, app.state.stop).run(sockets=[listener])


class Server(uvicorn.Server):
    """Ends the answers that outlast the time to drain by an error that their clients can read."""

    def __init__(self, config: uvicorn.Config, stop: Callable[[], None]) -> None:
        super().__init__(config)
        self._stop = stop

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        timer = asyncio.get_running_loop().call_later(DRAIN_S, self._stop)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()


def _leave(_: int, __: FrameType | None) -> None:
    sys.exit(0)
