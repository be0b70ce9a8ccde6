"""Bounds for chat templates, which come with a checkpoint and are not trusted.

transformers renders them in jinja's sandbox: no attribute leads out of it, no file can be included, a range
has at most 100,000 numbers. That leaves time and size. Loops within loops are ended by a clock; products and
powers, which one instruction can make endless, are bounded where the sandbox lets them be intercepted.
"""

from __future__ import annotations

import ctypes
import operator
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.sandbox import SandboxedEnvironment

# The longest real ones take milliseconds.
RENDER_S = 5.0
MOST_ITEMS = 1_000_000
MOST_BITS = 4096


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


def tighten_sandbox() -> None:
    """Let every sandbox of this process intercept what can be endless; transformers makes its own in a place
    that takes no class of ours."""
    SandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
    SandboxedEnvironment.default_binop_table = {
        **SandboxedEnvironment.default_binop_table,
        "*": times,
        "**": power,
    }
