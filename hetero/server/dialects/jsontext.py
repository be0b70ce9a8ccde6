"""JSON that is still arriving: values passed on as they are written, calls read out of objects."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Literal

from hetero.server.dialects.source import Put, Source, Steps

_STRING = re.compile(r'[^"\\]+')
# Outside strings: everything that JSON has there, and the words that models write for its literals.
_PLAIN = re.compile(r"[\s:,\w.+\-]+")
_SCALAR = re.compile(r"[\w.+\-]+")
_CLOSES = {"{": "}", "[": "]"}

Found = Literal["whole", "broken", "none"]

ARGUMENTS = ("arguments", "parameters")


def value(src: Source, put: Put) -> Steps[bool]:
    """Consume one JSON value and pass its text on to ``put`` as it comes.

    False when it is none, or ends too early; the text before the fault has been passed on. Only brackets and
    strings are checked.
    """
    if not (yield from src.more()):
        return False
    if src.rest[0] not in '{["':
        return (yield from _scalar(src, put))
    stack: list[str] = []
    while True:
        if not (yield from src.more()):
            return False
        char = src.rest[0]
        if char == '"':
            if not (yield from _string(src, put)):
                return False
        elif char in _CLOSES:
            stack.append(_CLOSES[char])
            put(src.take(1))
        elif stack and char == stack[-1]:
            stack.pop()
            put(src.take(1))
        elif stack and (match := _PLAIN.match(src.rest)):
            put(src.take(match.end()))
        else:
            return False
        if not stack:
            return True


def _string(src: Source, put: Put) -> Steps[bool]:
    put(src.take(1))
    while (yield from src.more()):
        if match := _STRING.match(src.rest):
            put(src.take(match.end()))
        elif src.rest[0] == '"':
            put(src.take(1))
            return True
        elif (yield from src.more(2)):
            put(src.take(2))
        else:
            put(src.take(1))
    return False


def _scalar(src: Source, put: Put) -> Steps[bool]:
    some = False
    while (yield from src.more()):
        match = _SCALAR.match(src.rest)
        if match is None:
            break
        put(src.take(match.end()))
        some = True
    return some


def arguments(src: Source, index: int, closers: Sequence[str]) -> Steps[str | None]:
    """Read the arguments of a call that has begun, up to one of ``closers``, and end it.

    Returns the closer, or None when the text ends first. What follows a whole value is delivered as content,
    what follows a broken one as part of the arguments; none at all means that there are none.
    """
    parts: list[str] = []

    def put(text: str) -> None:
        parts.append(text)
        src.args(index, text)

    yield from src.blank()
    whole = yield from value(src, put)
    rest: list[str] = []
    tag = yield from src.until(closers, rest.append if whole else put)
    if tag is not None and not any(parts):
        src.args(index, "{}")
    src.end(index)
    src.stray(rest, closers)
    return tag


def parsed(text: str) -> Any:
    """The value of a JSON text. Raises ValueError when it is none, or nested beyond all measure."""
    try:
        return json.loads(text, parse_constant=_no_constant)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def call(src: Source, closers: Sequence[str], known: Callable[[str], bool] = lambda _: True) -> Steps[Found]:
    """Read ``{"name": ..., "arguments": {...}}`` at the present place as one call.

    "none" when it is no such object: then nothing has been said. "broken" when the fault comes after the call
    has begun: then everything up to the next of ``closers``, which is consumed, was delivered, as arguments
    when these are not complete and as content otherwise. ``known``: the names that are accepted.
    """
    reader = _Call(src, known)
    if (yield from _members(src, reader)) and reader.close():
        return "whole"
    return (yield from reader.fail(closers))


def _members(src: Source, reader: _Call) -> Steps[bool]:
    """Up to the closing bracket; False at the first fault."""
    if not (yield from src.accept("{")):
        return False
    first = True
    while True:
        yield from src.blank()
        if (yield from src.accept("}")):
            return True
        if not first and not (yield from src.accept(",")):
            return False
        first = False
        yield from src.blank()
        parts: list[str] = []
        if not src.rest.startswith('"') or not (yield from value(src, parts.append)):
            return False
        yield from src.blank()
        if not (yield from src.accept(":")):
            return False
        yield from src.blank()
        if not (yield from reader.member("".join(parts))):
            return False


class _Call:
    """One object that may be a call: its members in any order."""

    _OTHERS = ("id", "type", "index")

    def __init__(self, src: Source, known: Callable[[str], bool]) -> None:
        self._src = src
        self._known = known
        self._name: str | None = None
        self._id: str | None = None
        self._index: int | None = None
        self._held: str | None = None
        self._complete = False

    def member(self, key_text: str) -> Steps[bool]:
        """Read the value of a member; False when it has no place in a call."""
        try:
            key = json.loads(key_text)
        except ValueError:
            return False
        if key in ARGUMENTS and self._held is None and self._index is None:
            return (yield from self._arguments())
        parts: list[str] = []
        if not (yield from value(self._src, parts.append)):
            return False
        try:
            content = parsed("".join(parts))
        except ValueError:
            return False
        if key == "name" and isinstance(content, str) and self._name is None:
            self._name = content
            return bool(content) and self._known(content)
        if key == "id" and isinstance(content, str):
            self._id = content or None
        return key in self._OTHERS or self._index is not None

    def _arguments(self) -> Steps[bool]:
        if self._name is None or self._src.rest.startswith('"'):
            # Their place is after the name; a string is JSON in JSON, and known when it is whole.
            parts: list[str] = []
            whole = yield from value(self._src, parts.append)
            self._held = _unwrapped("".join(parts))
            return whole
        index = self._index = self._src.start(self._name, self._id)
        if self._src.rest.startswith(("{", "[")):
            self._complete = yield from value(self._src, lambda text: self._src.args(index, text))
        else:
            parts = []
            self._complete = yield from value(self._src, parts.append)
            text = "".join(parts)
            self._src.args(index, "{}" if text == "null" else text)
        return self._complete

    def close(self) -> bool:
        if self._index is None:
            if self._name is None:
                return False
            self._index = self._src.start(self._name, self._id)
            self._src.args(self._index, "{}" if self._held in (None, "null") else str(self._held))
        self._src.end(self._index)
        return True

    def fail(self, closers: Sequence[str]) -> Steps[Found]:
        if self._index is None:
            return "none"
        index = self._index
        rest: list[str] = []
        put = rest.append if self._complete else lambda text: self._src.args(index, text)
        yield from self._src.until(closers, put)
        self._src.end(index)
        self._src.stray(rest, closers)
        return "broken"


def _unwrapped(text: str) -> str:
    if not text.startswith('"'):
        return text
    try:
        inner = parsed(text)
        if isinstance(parsed(inner), dict):
            return str(inner)
    except ValueError:
        pass
    return text
