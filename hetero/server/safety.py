"""Who may talk to the server, and how much: keys, Host, Origin, sizes. In front of every route.

What a page on the internet can do to a server on this machine is bounded three ways. A browser sends the name
that the page was loaded from as Host, so a name that was rebound to 127.0.0.1 is refused: only addresses,
which nobody can rebind, and names that are ours pass. A page of another origin may not write (Origin), also
where its request needs no preflight. And without ``--cors-origin`` no answer lets a page read it.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hetero.core import HeteroError, InputError
from hetero.server.errors import Told

KEY_VARIABLE = "HETERO_API_KEY"
# A body arrives within this, seconds; one that trickles would hold its connection for ever.
BODY_S = 60.0
MIN_KEY = 8
# Of a request's head.
HEAD_BYTES = 32 << 10
# A body beyond the limit is read on up to this many times the limit and thrown away: a client that still
# writes when the connection closes never reads why.
DISCARDED = 4
# All bodies together, of requests that are not answered yet, hold as many times the limit of one.
BODIES = 16


class RefusedError(HeteroError):
    """A request that is refused before any route sees it, with the status that says why."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.headers = dict(headers or {})


@dataclass(frozen=True, slots=True)
class Policy:
    """What passes. ``hosts``: names that a Host header may have beside addresses, or None for any."""

    keys: tuple[str, ...] = ()
    hosts: frozenset[str] | None = frozenset({"localhost"})
    origins: tuple[str, ...] = ()
    body_bytes: int = 16 << 20


def read_keys(file: str | None, environ: Mapping[str, str] | None = None) -> tuple[str, ...]:
    """Keys of a file (one a line, ``#`` begins a comment), else the one of HETERO_API_KEY; or none.

    Raises InputError for a file that cannot be read or holds none, and for a key that is no key.
    """
    if file is None:
        key = (os.environ if environ is None else environ).get(KEY_VARIABLE, "").strip()
        return (_checked(key, KEY_VARIABLE),) if key else ()
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise InputError(f"--api-key-file {file}: cannot be read: {reason}") from None
    keys = [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys:
        raise InputError(f"--api-key-file {file}: holds no key; write one a line")
    return tuple(_checked(key, f"--api-key-file {file}") for key in keys)


def _checked(key: str, where: str) -> str:
    """A key as a header can carry it; its value is never repeated in a message."""
    if len(key) < MIN_KEY or not key.isascii() or not key.isprintable() or " " in key:
        raise InputError(
            f"{where}: a key must have at least {MIN_KEY} printable ASCII characters and no space"
        )
    return key


def own_names(host: str, more: Iterable[str] = ()) -> frozenset[str]:
    """Names by which this machine may be called. Raises InputError for one of ``more`` that is no name."""
    more = tuple(more)
    for name in more:
        if not name or re.search(r"[/:@\s]", name):
            raise InputError(f"--allow-host {name}: must be a name alone, without scheme, port and path")
    names = {"localhost", host.lower(), socket.gethostname().lower(), *(name.lower() for name in more)}
    return frozenset(names | {f"{socket.gethostname().lower()}.local"})


class Guard:
    """The ASGI application in front of all others."""

    def __init__(self, app: ASGIApp, policy: Policy) -> None:
        self._app = app
        self._policy = policy
        self._digests = tuple(_digest(key) for key in policy.keys)
        self._origins = frozenset(policy.origins)
        self._held = 0  # bytes of all bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        held: list[int] = []
        try:
            try:
                whole = await self._admit(scope, receive, held)
            except RefusedError as error:
                await _refusal(scope["path"], error)(scope, receive, send)
                return
            await self._app(scope, whole, send)
        finally:
            self._held -= sum(held)

    async def _admit(self, scope: Scope, receive: Receive, held: list[int]) -> Receive:
        """Raises RefusedError, else the receive that gives the body. What it takes is put into ``held``."""
        if sum(len(name) + len(value) for name, value in scope["headers"]) > HEAD_BYTES:
            raise RefusedError(431, f"the headers are larger than {HEAD_BYTES} bytes")
        headers = Headers(scope=scope)
        self._check_host(headers.getlist("host"), scope["http_version"])
        self._check_origin(scope["method"], headers)
        try:
            self._check_key(headers)
        except RefusedError:
            if not is_open(scope["path"]):
                raise
            scope.setdefault("state", {})["stranger"] = True
        return await self._with_body(headers, receive, held)

    def _check_host(self, hosts: list[str], version: str) -> None:
        if len(hosts) != 1 and (hosts or version != "1.0"):
            raise RefusedError(400, "a request of HTTP/1.1 has exactly one Host header")
        names = self._policy.hosts
        # A browser always names a host; a client of HTTP/1.0 need not.
        if names is None or not hosts:
            return
        name = _host_name(hosts[0])
        if name in names or name.endswith(".localhost") or _is_address(name):
            return
        raise RefusedError(
            421, "this server does not answer to the name in the Host header (--allow-host NAME lets it)"
        )

    def _check_origin(self, method: str, headers: Headers) -> None:
        origin = headers.get("origin")
        if method in ("GET", "HEAD", "OPTIONS") or origin is None:
            return
        if origin in self._origins or "*" in self._origins:
            return
        # Programs with a browser inside send the schemes of their own.
        if not origin.startswith(("http://", "https://")) and origin != "null":
            return
        if urlsplit(origin).netloc.lower() != headers.get("host", "").lower():
            raise RefusedError(403, "pages of this origin may not use the server (--cors-origin lets them)")

    def _check_key(self, headers: Headers) -> None:
        if not self._digests:
            return
        scheme, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        digest = _digest(given)
        # All are compared, so that the time does not tell which one was near.
        if not sum(hmac.compare_digest(digest, known) for known in self._digests):
            raise RefusedError(
                401,
                "a valid API key is needed, as 'Authorization: Bearer KEY' or 'x-api-key: KEY'",
                {"www-authenticate": "Bearer"},
            )

    async def _with_body(self, headers: Headers, receive: Receive, held: list[int]) -> Receive:
        """A receive that gives the whole body, which has been read within the limits, and then what comes."""
        most = self._policy.body_bytes
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > DISCARDED * most:
            raise _too_large(most)
        parts: list[bytes] = []
        size = 0
        last: Message | None = None
        try:
            async with asyncio.timeout(BODY_S):
                while True:
                    message = await receive()
                    if message["type"] != "http.request":
                        last = message
                        break
                    part = message.get("body", b"")
                    size += len(part)
                    if size <= most:
                        if self._held + len(part) > BODIES * most:
                            raise _crowded()
                        self._held += len(part)
                        held.append(len(part))
                        parts.append(part)
                    elif size > DISCARDED * most:
                        raise _too_large(most)
                    if not message.get("more_body"):
                        break
        except TimeoutError:
            close = {"connection": "close"}
            raise RefusedError(408, f"the body did not arrive within {BODY_S:.0f} seconds", close) from None
        if size > most:
            raise _too_large(most)
        body: Message | None = {"type": "http.request", "body": b"".join(parts), "more_body": False}

        async def replay() -> Message:
            nonlocal body
            first = last or body
            if first is None:
                return await receive()
            body = None
            return first

        return replay


def _refusal(path: str, error: RefusedError) -> Response:
    """In the form of the API that the path belongs to."""
    kind = {
        401: "authentication_error",
        403: "permission_error",
        413: "request_too_large",
        503: "overloaded_error",
    }.get(error.status, "invalid_request_error")
    if path.startswith("/v1/messages"):
        body: dict[str, Any] = {"type": "error", "error": {"type": kind, "message": str(error)}}
    else:
        code = "invalid_api_key" if error.status == 401 else None
        body = Told(error.status, str(error), kind, code=code).body()
    return JSONResponse(body, error.status, error.headers)


def is_open(path: str) -> bool:
    """Whether a path answers without a key: the page's own files, which hold no secret, and the health."""
    return path in ("/", "/favicon.ico") or path == "/health" or path.startswith(("/health/", "/page/"))


def caller(headers: Mapping[str, str], address: str) -> str:
    """Whose turn in the queue a request takes: its key's, else its address's; never the key itself."""
    key = headers.get("authorization") or headers.get("x-api-key")
    return address if not key else f"{address} {_digest(key).hex()[:16]}"


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _host_name(host: str) -> str:
    """Without the port, lower case, without the brackets of an IPv6 address."""
    if host.startswith("["):
        return host[1:].partition("]")[0].lower()
    return host.partition(":")[0].lower().rstrip(".")


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def _crowded() -> RefusedError:
    headers = {"connection": "close", "retry-after": "1"}
    return RefusedError(503, "too many large bodies at once; try again soon", headers)


def _too_large(most: int) -> RefusedError:
    # The rest of the body stays unread, so the connection cannot be used again.
    return RefusedError(413, f"the body is larger than {most} bytes", {"connection": "close"})
