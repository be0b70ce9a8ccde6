"""Requests played through a scheduler, and what came of them."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from hetero.core import HeteroError
from hetero.engine.generate import Engine, Runnable
from hetero.engine.request import Piece, Request, Result
from hetero.engine.scheduler import Scheduler
from tests.model.tiny import tiny

VOCABULARY = 96


_ends = itertools.count()


class Listener:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end: Result | HeteroError | None = None
        self.handle: Any = None  # set by submit
        self.order = 0  # of its end among all ends
        self._ended = threading.Event()

    def __call__(self, event: Piece | Result | HeteroError) -> None:
        assert self.end is None, "an event after the last"
        if isinstance(event, Piece):
            self.pieces.append(event)
            return
        self.end, self.order = event, next(_ends)
        self._ended.set()

    def wait(self) -> Result | HeteroError:
        assert self._ended.wait(60), "no end came"
        assert self.end is not None
        return self.end

    def result(self) -> Result:
        end = self.wait()
        assert isinstance(end, Result), end
        assert tuple(piece.token for piece in self.pieces) == end.token_ids
        return end


def runnable(family: str = "qwen3_moe", context: int | None = 256, **changes: Any) -> Runnable:
    return Runnable(tiny(family), VOCABULARY, context=context, **changes)


@contextmanager
def scheduler(run: Runnable, **options: Any) -> Iterator[Scheduler]:
    made = Scheduler(run, **options)
    made.start()
    try:
        yield made
    finally:
        made.close()


def submit(engine: Scheduler, request: Request) -> Listener:
    listener = Listener()
    listener.handle = engine.submit(request, listener)
    return listener


def solo(run: Runnable, request: Request) -> tuple[int, ...]:
    """The tokens of the request alone on the engine of ``hetero run``."""
    return Engine(run).complete(request).token_ids


def prompt(seed: int, size: int = 20) -> tuple[int, ...]:
    """Token ids that differ from seed to seed."""
    return tuple((seed * 31 + place * (7 + seed)) % 90 + 3 for place in range(size))


class Passes:
    """Shapes [rows, tokens] of the model's forward passes; ``before`` and ``after`` may interfere."""

    def __init__(self, model: Any) -> None:
        self.shapes: list[tuple[int, int]] = []
        self.before: Callable[[tuple[int, int]], None] = lambda shape: None
        self.after: Callable[[Any], None] = lambda output: None
        self._hooks = [
            model.register_forward_pre_hook(self._see, with_kwargs=True),
            model.register_forward_hook(lambda module, args, output: self.after(output)),
        ]

    def _see(self, module: Any, args: Any, kwargs: Any) -> None:
        shape = tuple(kwargs["input_ids"].shape)
        self.shapes.append(shape)
        self.before(shape)

    def remove(self) -> None:
        for hook in self._hooks:
            hook.remove()


def drive(engine: Scheduler, most: int = 2000) -> int:
    """Step by hand until nothing runs or waits; the number of steps."""
    for step in range(most):
        status = engine.status()
        if not status.running and not status.waiting:
            return step
        engine.step()
    raise AssertionError(f"not done after {most} steps")
