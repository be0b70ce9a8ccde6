"""A few times a second, to everyone who looks: what the machine is doing, as server-sent events.

One task makes the figures for all listeners, and only while there is one: without listeners nothing is
recorded and nothing runs. A listener that is slow misses figures instead of holding them up.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Any

from hetero.core import HeteroError
from hetero.server.answers import sse
from hetero.server.figures import Figures
from hetero.server.state import AppState
from hetero.trace import recorder

log = logging.getLogger("hetero.server")

TICK_S = 0.4
# The use of experts changes slowly and is the largest part.
HEAT_TICKS = 3
MOST_LISTENERS = 16


class TooManyListenersError(HeteroError):
    """As many pages are open as may be."""


class Live:
    """The figures' source. All methods are for the event loop."""

    def __init__(self, state: AppState) -> None:
        self._state = state
        self._listeners = 0
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        # Lines by kind, each with a number that grows when it changes.
        self._latest: dict[str, tuple[int, str]] = {}
        self._number = 0

    @property
    def running(self) -> bool:
        """Whether figures are being made."""
        return self._task is not None

    def check(self) -> None:
        """Raises TooManyListenersError when no more may come."""
        if self._listeners >= MOST_LISTENERS:
            raise TooManyListenersError(f"{MOST_LISTENERS} pages show the machine already; close one")

    async def lines(self) -> AsyncIterator[str]:
        """Events for one listener, until it leaves or the server stops."""
        self._listeners += 1
        if self._task is None:
            self._latest = {}
            self._task = asyncio.ensure_future(self._run())
        sent = 0
        try:
            while True:
                changed = self._changed
                for number, line in sorted(self._latest.values()):
                    if number > sent:
                        yield line
                        sent = number
                # It ends when the server drains; nothing runs between its last words and its end.
                if self._task.done():
                    return
                await changed.wait()
        finally:
            self._listeners -= 1
            if not self._listeners:
                self._task.cancel()
                self._task = None

    def _tell(self, kind: str, body: dict[str, Any]) -> None:
        self._number += 1
        self._latest[kind] = (self._number, f"event: {kind}\n{sse(body)}")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _run(self) -> None:
        try:
            with ExitStack() as while_watched:
                await self._make(while_watched)
        except Exception:
            log.exception("the live view failed")
        finally:
            self._wake()

    async def _make(self, while_watched: ExitStack) -> None:
        figures: Figures | None = None
        tick = 0
        while not self._state.draining:
            if figures is None and self._state.phase == "ready":
                while_watched.enter_context(recorder.recording())
                figures = Figures(self._state)
                self._tell("fixed", figures.fixed())
            if figures is None:
                self._tell("now", {"phase": self._state.phase})
            else:
                self._tell("now", figures.now())
                if (steps := figures.steps()) is not None:
                    self._tell("steps", steps)
                if tick % HEAT_TICKS == 0 and (heat := figures.heat()) is not None:
                    self._tell("heat", heat)
            self._wake()
            tick += 1
            await asyncio.sleep(TICK_S)
        self._tell("now", {"phase": self._state.phase})
