"""One connection, bounded: clients that trickle, stall, vanish or come in crowds do not hold it for ever."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hetero.server.safety import HEAD_BYTES

# The head of a request arrives within this after the connection or its first byte, seconds.
HEAD_S = 10.0
# A client that takes nothing of a stream for this long is gone, seconds.
STALL_S = 30.0
# Idle connections cost a descriptor each, and a process has 1024 of them by default.
MOST = 512


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 by llhttp, which by itself keeps a head, a trailer or a chunk's line of any length."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        # Bytes since a head was complete or something of a body came.
        self._unfinished = 0
        self._head: asyncio.TimerHandle | None = None
        self._stall: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.abort()
            return
        _notice_vanished_peers(transport.get_extra_info("socket"))
        self._watch_head()

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > HEAD_BYTES and not self.transport.is_closing():
            self._refuse()
        self._watch_head()

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def _refuse(self) -> None:
        """End a connection whose head, or what follows a body, does not end."""
        if self._between():
            # Before any answer has begun there is room for one.
            said = b"the request's head is longer than this server takes"
            self.transport.write(
                b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: text/plain; charset=utf-8\r\n"
                b"content-length: %d\r\nconnection: close\r\n\r\n%s" % (len(said), said)
            )
            self.transport.close()
        else:
            self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head, self._stall):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._stall = self.loop.call_later(STALL_S, self.transport.abort)

    def resume_writing(self) -> None:
        if self._stall is not None:
            self._stall.cancel()
        super().resume_writing()

    def _between(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    def _watch_head(self) -> None:
        between = self._between()
        if between and self._head is None:
            self._head = self.loop.call_later(HEAD_S, self.transport.abort)
        elif not between and self._head is not None:
            self._head.cancel()
            self._head = None


def _notice_vanished_peers(connection: socket.socket) -> None:
    """A peer whose machine died says nothing: the system finds out within about a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
