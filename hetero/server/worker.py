"""The engine's own thread. Requests run one at a time, in the order of their arrival."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor

from hetero.core import HeteroError
from hetero.engine.generate import Engine
from hetero.engine.request import Request, Result

log = logging.getLogger("hetero.server")

Event = str | Result


class Ticket:
    """One request in the queue: an asynchronous stream of text pieces that ends with the result.

    Whoever holds it must call ``cancel`` when it stops reading; after the end that does nothing.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._events: asyncio.Queue[Event | HeteroError] = asyncio.Queue()
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        self._cancelled.set()

    @property
    def cancelled(self) -> bool:
        return self._cancelled.is_set()

    def put(self, event: Event | HeteroError) -> None:
        """From the engine's thread."""
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
        except RuntimeError:
            # The loop is closed: the server has gone and nobody listens.
            self.cancel()

    async def events(self) -> AsyncIterator[Event]:
        while True:
            event = await self._events.get()
            if isinstance(event, HeteroError):
                raise event
            yield event
            if isinstance(event, Result):
                return


class Worker:
    """Owner of the thread and of the tickets that are not finished."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._lock = threading.Lock()
        self._open: set[Ticket] = set()
        self._running: Ticket | None = None

    def submit(self, request: Request) -> Ticket:
        """Queue a request; call it on the event loop."""
        ticket = Ticket(asyncio.get_running_loop())
        with self._lock:
            self._open.add(ticket)
        self._pool.submit(self._run, request, ticket)
        return ticket

    def load(self) -> tuple[int, int]:
        """(running, waiting) requests; one that was cancelled while it waited counts no more."""
        with self._lock:
            waiting = sum(t is not self._running and not t.cancelled for t in self._open)
            return int(self._running is not None), waiting

    def stop(self) -> None:
        """Let every request end within one step, as cancelled."""
        with self._lock:
            tickets = list(self._open)
        for ticket in tickets:
            ticket.cancel()

    def close(self) -> None:
        """Stop every request and end the thread."""
        self.stop()
        self._pool.shutdown(wait=True)

    def _run(self, request: Request, ticket: Ticket) -> None:
        with self._lock:
            self._running = ticket
        try:
            end = self._drain(request, ticket)
        finally:
            # Before the last event, so that who has read it finds the place free.
            with self._lock:
                self._running = None
                self._open.discard(ticket)
        ticket.put(end)

    def _drain(self, request: Request, ticket: Ticket) -> Result | HeteroError:
        """Run to the end; its text goes out on the way."""
        try:
            for event in self.engine.stream(request, lambda: ticket.cancelled):
                if isinstance(event, Result):
                    return event
                if event.text:
                    ticket.put(event.text)
        except HeteroError as error:
            return error
        except Exception:
            # A defect must end this request and not the thread that all others need. What it says of our
            # files goes to the log alone.
            log.exception("request failed")
            return HeteroError("internal error")
        return HeteroError("the engine ended without a result")
