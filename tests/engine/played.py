"""Requests played through a scheduler, and what came of them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from hetero.core import HeteroError
from hetero.engine.generate import Engine, Runnable
from hetero.engine.request import Piece, Request, Result
from hetero.engine.scheduler import Handle, Scheduler
from tests.model.tiny import tiny

VOCABULARY = 96


class Listener:
    """A sink that keeps what it gets."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.end: Result | HeteroError | None = None
        self.handle: Handle | None = None
        self._ended = threading.Event()

    def __call__(self, event: Piece | Result | HeteroError) -> None:
        assert self.end is None, "an event after the last"
        if isinstance(event, Piece):
            self.pieces.append(event)
            return
        self.end = event
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
