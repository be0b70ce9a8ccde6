"""What a server is told, checked before anything is loaded, and the address that it is told to take."""

from __future__ import annotations

import errno
import ipaddress
import re
import socket
from dataclasses import dataclass, field

from hetero.core import InputError, MachineError
from hetero.server.dialects import choose
from hetero.server.safety import Policy
from hetero.server.state import Limits

# A connection is a request, and connection.MOST of them are taken; each of a list of prompts waits too.
MOST_SLOTS = 512
MOST_QUEUE = 4096
_ORIGIN = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^/?#@\s]+")


@dataclass(frozen=True, slots=True)
class Options:
    """What ``hetero serve`` is told, beside the model and the address."""

    policy: Policy = field(default_factory=Policy)
    limits: Limits = field(default_factory=Limits)
    slots: int = 8
    max_queue: int = 64
    context: int | None = None
    kv_tokens: int | None = None
    prefix_cache: bool = True
    drain_s: float = 10.0
    log_file: str | None = None
    tool_format: str = "auto"
    reasoning_format: str = "auto"
    stats: bool = False  # whether the use of experts is kept

    def __post_init__(self) -> None:
        # Tells names that there are not.
        choose("", self.tool_format, self.reasoning_format)
        _between("--slots", self.slots, 1, MOST_SLOTS)
        _between("--max-queue", self.max_queue, 0, MOST_QUEUE)
        for name, value in (("--ctx", self.context), ("--kv-tokens", self.kv_tokens)):
            if value is not None:
                _at_least(name, value, 2)
        if self.limits.prompt_tokens is not None:
            _at_least("--max-prompt-tokens", self.limits.prompt_tokens, 1)
        _at_least("--max-body", self.policy.body_bytes, 1024)
        for origin in self.policy.origins:
            if origin != "*" and not _ORIGIN.fullmatch(origin):
                raise InputError(
                    f"--cors-origin {origin}: must be * or scheme and host as a browser sends them, "
                    "without a path and without a slash at the end: https://chat.example"
                )
        timeout = self.limits.request_timeout_s
        if timeout is not None and not timeout > 0:
            raise InputError(f"--request-timeout {timeout:g}: must be above 0")
        if not 0 <= self.drain_s <= 3600:
            raise InputError(f"--drain {self.drain_s:g}: must be from 0 to 3600")
        if self.context and self.kv_tokens and self.context > self.kv_tokens:
            raise InputError(
                f"--ctx {self.context}: the KV cache holds {self.kv_tokens} tokens (--kv-tokens), so no "
                "request could ever use that context"
            )


def _between(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise InputError(f"{name} {value}: must be from {least} to {most}")


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise InputError(f"{name} {value}: must be at least {least}")


def open_socket(host: str, port: int, allow_remote: bool = False) -> socket.socket:
    """A listening socket.

    Raises InputError for a host that others can reach unless ``allow_remote``, or one that is not this
    machine's, MachineError for a port that cannot be had.
    """
    if not 0 <= port <= 65535:
        raise InputError(f"--port {port}: must be from 0 to 65535")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (socket.gaierror, UnicodeError) as error:
        raise InputError(f"--host {host}: not an address of this machine: {error}") from None
    if not is_loopback(str(address[0])) and not allow_remote:
        raise InputError(
            f"--host {host}: anyone who reaches this address could use the server, which asks for no key; "
            "give it one (--api-key-file FILE or HETERO_API_KEY), or add --allow-remote if that is meant"
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


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback
