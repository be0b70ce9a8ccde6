"""Bounds for chat templates, which come with a checkpoint and are not trusted.

transformers renders them in jinja's sandbox: no attribute leads out of it, no file can be included, a range
has at most 100,000 numbers. That leaves time and size. Loops within loops are ended by a clock; what one
instruction can make endless is bounded where the sandbox lets it be intercepted: products, powers, widths in
formats and in calls that fill up with spaces, and texts that double.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import re
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import jinja2.runtime
from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment, SandboxedFormatter

# The longest real ones take milliseconds.
RENDER_S = 5.0
MOST_ITEMS = 1_000_000
MOST_BITS = 4096
# Characters that something is filled up to; real templates use 2 or 4.
MOST_WIDTH = 1000
# Characters of a text that is put together: more than a server takes of a conversation.
MOST_TEXT = 64 << 20
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(\*|[0-9]+)?(?:\.(\*|[0-9]+))?")
_NUMBER = re.compile(r"[0-9]+")


class OverdueError(BaseException):
    """Rendering took too long. No Exception, so that no handler inside takes it for its own."""


@contextmanager
def time_limit(seconds: float = RENDER_S) -> Iterator[None]:
    """Raises OverdueError in this thread when its Python code goes on for longer."""
    thread = ctypes.c_ulong(threading.get_ident())
    lock = threading.Lock()
    over = asked = False

    def interrupt() -> None:
        nonlocal asked
        with lock:
            if not over:
                asked = True
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, ctypes.py_object(OverdueError))

    timer = threading.Timer(seconds, interrupt)
    timer.daemon = True
    timer.start()
    came = False
    try:
        yield
    except OverdueError:
        came = True
        raise
    finally:
        with lock:
            over = True
            # One that was asked for and has not come yet must not hit what runs next. Never without need: the
            # call leaves the interpreter looking for an exception before every step.
            if asked and not came:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, None)
        timer.cancel()


def times(left: Any, right: Any) -> Any:
    """``left * right`` of bounded size. Raises SecurityError."""
    for many, count in ((left, right), (right, left)):
        if (
            isinstance(many, str | bytes | list | tuple)
            and isinstance(count, int)
            and len(many) * count > MOST_ITEMS
        ):
            raise SecurityError(f"a product of more than {MOST_ITEMS} items")
    if (
        isinstance(left, int)
        and isinstance(right, int)
        and left.bit_length() + right.bit_length() > MOST_BITS
    ):
        raise SecurityError(f"a number of more than {MOST_BITS} bits")
    return operator.mul(left, right)


def power(left: Any, right: Any) -> Any:
    """``left ** right`` of bounded size. Raises SecurityError."""
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * abs(right) > MOST_BITS:
        raise SecurityError(f"a number of more than {MOST_BITS} bits")
    return operator.pow(left, right)


def modulo(left: Any, right: Any) -> Any:
    """``left % right``, which formats a text, with bounded widths. Raises SecurityError."""
    if isinstance(left, str | bytes):
        _check_printf(left, right)
    return operator.mod(left, right)


def plus(left: Any, right: Any) -> Any:
    """``left + right`` of bounded size. Raises SecurityError."""
    if isinstance(left, str | bytes) and isinstance(right, str | bytes):
        _check_size(len(left) + len(right))
    if (
        isinstance(left, list | tuple)
        and isinstance(right, list | tuple)
        and len(left) + len(right) > MOST_ITEMS
    ):
        raise SecurityError(f"a list of more than {MOST_ITEMS} items")
    return operator.add(left, right)


def joined(parts: Iterable[Any]) -> str:
    """The texts of ``parts`` as one, of bounded size. Raises SecurityError."""
    texts = [str(part) for part in parts]
    _check_size(sum(map(len, texts)))
    return "".join(texts)


def _check_size(size: int) -> None:
    if size > MOST_TEXT:
        raise SecurityError(f"a text of more than {MOST_TEXT} characters")


def _check_widths(widths: Iterable[Any]) -> None:
    """Raises SecurityError for a number, or one that is written, beyond MOST_WIDTH."""
    for width in widths:
        # The length first: int() of a long text takes its time.
        if isinstance(width, str) and (len(width) > 9 or int(width) > MOST_WIDTH):
            raise SecurityError(f"a width of more than {MOST_WIDTH}")
        if isinstance(width, int) and abs(width) > MOST_WIDTH:
            raise SecurityError(f"a width of more than {MOST_WIDTH}")


def _check_printf(text: str | bytes, values: Any) -> None:
    """Widths and precisions of a format as ``%`` takes it."""
    plain = text if isinstance(text, str) else text.decode("latin-1")
    for pair in _PRINTF.findall(plain):
        _check_widths(width for width in pair if width.isdecimal())
        if "*" in pair:
            _check_widths(
                value
                for value in (values if isinstance(values, tuple) else (values,))
                if isinstance(value, int)
            )


def _check_call(called: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
    """Raises SecurityError for a method of a text that would make a huge one."""
    method = getattr(called, "__wrapped__", called)
    owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
    values = (*args, *named.values())
    if name == "strftime_now":
        # The C library fills numbers of a date up to a width.
        _check_widths(width for value in values for width in _NUMBER.findall(str(value)))
    if not isinstance(owner, str | bytes):
        return
    if name in ("center", "ljust", "rjust", "zfill", "expandtabs"):
        _check_widths(value for value in values if isinstance(value, int))
    elif name == "replace" and len(values) >= 2:
        _check_replace(owner, values[0], values[1])
    elif name == "join" and values and isinstance(values[0], list | tuple | dict):
        _check_join(owner, values[0])
    elif name == "translate" and values and isinstance(values[0], dict):
        _check_size(len(owner) * max(map(_length, values[0].values()), default=0))
    elif name in ("format", "format_map") and isinstance(owner, str):
        _check_size(owner.count("{") * max(map(_length, values), default=0))


def _check_replace(text: Any, old: Any, new: Any) -> None:
    if type(text) is type(old) and isinstance(text, str | bytes):
        _check_size(text.count(old) * _length(new))


def _check_join(between: Any, parts: Iterable[Any]) -> None:
    sizes = list(map(_length, parts))
    _check_size(len(sizes) * _length(between) + sum(sizes))


def _length(value: Any) -> int:
    """Characters of a text; about those that other values print as."""
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, list | tuple | dict):
        return sum(map(_length, value.values() if isinstance(value, dict) else value)) + 2
    return 16


def _pads(args: list[Any], named: dict[str, Any]) -> None:
    _check_widths(value for value in (*args, *named.values()) if isinstance(value, int))


def _formats(args: list[Any], named: dict[str, Any]) -> None:
    _check_printf(str(args[0]), tuple(args[1:]))


def _replaces(args: list[Any], _: dict[str, Any]) -> None:
    if len(args) > 3:  # the first is jinja's own
        _check_replace(str(args[1]), str(args[2]), str(args[3]))


def _joins(args: list[Any], named: dict[str, Any]) -> None:
    args[1] = list(args[1])
    _check_join(args[2] if len(args) > 2 else named.get("d", ""), args[1])


# What checks the arguments of a filter before it gets them.
_FILTERS: dict[str, Callable[[list[Any], dict[str, Any]], None]] = {
    "center": _pads,
    "indent": _pads,
    "tojson": _pads,
    "wordwrap": _pads,
    "format": _formats,
    "replace": _replaces,
    "join": _joins,
}


def _bounded(plain: Callable[..., Any], check: Callable[[list[Any], dict[str, Any]], None]) -> Any:
    @functools.wraps(plain)
    def checked(*args: Any, **named: Any) -> Any:
        given = list(args)
        check(given, named)
        return plain(*given, **named)

    return checked


def tighten_sandbox() -> None:
    """Let every sandbox of this process intercept what can be endless; transformers makes its own in a place
    that takes no class of ours."""
    operators = {"*": times, "**": power, "%": modulo, "+": plus}
    SandboxedEnvironment.intercepted_binops = frozenset(operators)
    SandboxedEnvironment.default_binop_table = {**SandboxedEnvironment.default_binop_table, **operators}
    SandboxedEnvironment.concat = staticmethod(joined)
    # What ``~`` is compiled to.
    jinja2.runtime.str_join = joined  # type: ignore[assignment]
    plain_call, plain_from_string = SandboxedEnvironment.call, SandboxedEnvironment.from_string

    def call(self: Any, context: Any, called: Any, /, *args: Any, **named: Any) -> Any:
        _check_call(called, args, named)
        return plain_call(self, context, called, *args, **named)

    def format_field(self: Any, value: Any, format_spec: str) -> Any:
        _check_widths(_NUMBER.findall(format_spec))
        return super(SandboxedFormatter, self).format_field(value, format_spec)

    def from_string(self: Any, *args: Any, **named: Any) -> Any:
        # Only now are the filters there that whoever made the environment has put into it.
        self.filters |= {name: _bounded(self.filters[name], check) for name, check in _FILTERS.items()}
        return plain_from_string(self, *args, **named)

    SandboxedEnvironment.call = call  # type: ignore[method-assign]
    SandboxedEnvironment.from_string = from_string  # type: ignore[method-assign]
    SandboxedFormatter.format_field = format_field  # type: ignore[method-assign]
