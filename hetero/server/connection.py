"""One connection, bounded: clients that trickle, stall, vanish or come in crowds do not hold it for ever."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from hetero.server.safety import HEAD_BYTES

# The head of a request arrives within this after the connection or its first byte, seconds.
HEAD_S = 10.0
# A client that takes nothing of a stream for this long is gone, seconds.
STALL_S = 30.0
# Idle connections cost a descriptor each, and a process has 1024 of them by default.
MOST = 512
# Requests that a client may send before the one that runs is answered. Few do, and each costs memory.
MOST_AHEAD = 16


class BoundedProtocol(HttpToolsProtocol):
    """HTTP/1.1 by llhttp, which by itself keeps a head, a trailer or a chunk's line of any length."""

    parser: _Parser

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.parser = _Parser(self)
        # Requests that are not answered, the one that runs first.
        self._asked: list[Any] = []
        # Whether what still comes is thrown away: the connection ends behind the last whole request's answer.
        self._deaf = False
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
        if self._deaf:
            return
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > HEAD_BYTES and not self.transport.is_closing():
            self._refuse()
        self._watch_head()

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value.strip(b" \t"))

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        if self.parser.upgrades:
            return  # the parser comes back with it as a plain request
        if len(self.pipeline) >= MOST_AHEAD:
            raise ValueError("too many requests ahead of their answers")
        super().on_headers_complete()
        # Trailers come to the list of headers too, when those have long been looked at.
        self.headers = []
        self._asked = [cycle for cycle in self._asked if not cycle.response_complete] + [self.cycle]

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        if not self.parser.upgrades:
            super().on_message_complete()

    def plain_head(self, read: _Parser) -> bytes:
        """The head that ``read`` has read last, without its offer of another protocol."""
        lines = [b"%s %s HTTP/%s" % (read.get_method(), self.url, read.get_http_version().encode())]
        for name, value in self.headers:
            if name == b"connection":
                tokens = (token.strip() for token in value.split(b","))
                value = b", ".join(token for token in tokens if token.lower() != b"upgrade")  # noqa: PLW2901
            if name != b"upgrade":
                lines.append(b"%s: %s" % (name, value))
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def send_400_response(self, msg: str) -> None:
        whole = [
            cycle
            for cycle in self._asked
            if not cycle.response_complete and (cycle.response_started or not cycle.more_body)
        ]
        if not whole:
            super().send_400_response(msg)
            return
        # What is wrong stands behind a whole request: an answer here would be taken for that one's.
        self._deaf = True
        whole[-1].keep_alive = False

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
        for cycle in self._asked:  # uvicorn tells the last one alone
            if not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

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


class _Parser(httptools.HttpRequestParser):
    """A request that offers another protocol, as Java's client does with each, is read as any other: llhttp
    by itself ends it behind the head and takes its body for the next one."""

    def __init__(self, protocol: BoundedProtocol) -> None:
        super().__init__(protocol)
        self._protocol = protocol

    @property
    def upgrades(self) -> bool:
        """Whether the request that is read offers one. CONNECT, which has no body, counts as none."""
        return self.should_upgrade() and self.get_method() != b"CONNECT"

    def feed_data(self, data: Any) -> None:
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            if not self.upgrades:
                raise
            # This one has ended where the connection is to be closed behind the request.
            plain = self._protocol.parser = _Parser(self._protocol)
            plain.feed_data(self._protocol.plain_head(self) + data[upgrade.args[0] :])


def _notice_vanished_peers(connection: socket.socket) -> None:
    """A peer whose machine died says nothing: the system finds out within about a minute."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 30)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 10)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 60_000)
