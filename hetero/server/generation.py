"""From a request to its events, on the event loop: the one way by which every route runs the engine.

A route makes generations by ``begin`` before it answers, so that what is refused has its status. It hands
them to ``finished`` (a whole answer) or to ``EventStream`` (a streamed one); both cancel them when the client
leaves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from hetero.core import HeteroError, InputError
from hetero.engine.request import Piece, Request, Result
from hetero.server.state import AppState, Event, NotReadyError

if TYPE_CHECKING:
    from hetero.engine.scheduler import Handle

T = TypeVar("T")


class ClientLeftError(HeteroError):
    """The client is gone; nobody reads what would be answered."""


class _Signal:
    """Wakes one coroutine of the event loop from the engine's thread, once for all that has come by then."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_its_way = self._rung = False
        self._waiter: asyncio.Future[None] | None = None

    def ring(self) -> None:
        """From any thread. Raises RuntimeError when the loop is closed."""
        if not self._on_its_way:
            self._on_its_way = True
            self._loop.call_soon_threadsafe(self._arrive)

    async def wait(self) -> None:
        """Until it has been rung since the last time; now and then for nothing."""
        if not self._rung:
            self._waiter = self._loop.create_future()
            await self._waiter
        self._rung = False

    def _arrive(self) -> None:
        # First of all: what comes from here on rings again.
        self._on_its_way = False
        self._rung = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class Generation:
    """One request under way. Whoever has begun it must ``cancel`` it; after the end that does nothing.

    Generations that share a ``signal`` are read by one coroutine.
    """

    def __init__(self, state: AppState, request: Request, signal: _Signal | None = None) -> None:
        self.request = request
        self._ended = False
        self._signal = signal or _Signal()
        self._events: deque[Event] = deque()
        self._handle: Handle = state.submit(request, self._put)

    def cancel(self) -> None:
        """End it within one step of the model and free what it holds; what it has made is its result."""
        self._ended = True
        self._handle.cancel()

    async def events(self) -> AsyncIterator[Piece | Result]:
        """Pieces as they are made, then the result. Once only.

        Raises HeteroError when the engine fails, NotReadyError when the server stops before the end.
        """
        while True:
            while self._events:
                event = self._next()
                yield event
                if isinstance(event, Result):
                    return
            await self._signal.wait()

    def _next(self) -> Piece | Result:
        """The oldest event that has come. Raises as ``events``."""
        event = self._events.popleft()
        if isinstance(event, HeteroError):
            raise event
        if isinstance(event, Result) and event.finish_reason == "cancelled" and not self._ended:
            raise NotReadyError("the server is shutting down")
        return event

    async def result(self) -> tuple[list[Piece], Result]:
        """All of it, at its end."""
        pieces: list[Piece] = []
        async for event in self.events():
            if isinstance(event, Result):
                return pieces, event
            pieces.append(event)
        raise AssertionError("a stream ends with its result")

    def _put(self, event: Event) -> None:
        """From the engine's thread."""
        self._events.append(event)
        try:
            self._signal.ring()
        except RuntimeError:
            # The loop is closed: the server has gone and nobody listens.
            self._handle.cancel()


def begin(state: AppState, requests: Sequence[Request]) -> list[Generation]:
    """All of them, or none when one is refused. Call it on the event loop.

    Raises what ``AppState.submit`` raises, and InputError for more than the engine ever holds.
    """
    most = state.engine.most
    if len(requests) > most:
        raise InputError(
            f"n: the call asks for {len(requests)} answers and this server holds at most {most} at once "
            "(--slots and --max-queue)"
        )
    begun: list[Generation] = []
    signal = _Signal()
    try:
        for request in requests:
            begun.append(Generation(state, request, signal))
    except BaseException:
        for generation in begun:
            generation.cancel()
        raise
    return begun


async def finished(http: HttpRequest, generations: Sequence[Generation], work: Coroutine[Any, Any, T]) -> T:
    """What ``work``, which reads the generations, returns.

    Raises ClientLeftError when the client leaves first.
    """
    reading = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_left(http.receive))
    try:
        await asyncio.wait({reading, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            raise ClientLeftError("the client has left")
        return await reading
    finally:
        for generation in generations:
            generation.cancel()
        reading.cancel()
        leaving.cancel()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


# Where the application leaves, for each request, the way past what watches only how answers begin.
SEND = "hetero.send"


class EventStream(StreamingResponse):
    """Server-sent events of a few generations; ``content`` reads them and makes the lines.

    The generations end with the response, even when its content is never asked for because the client left.
    """

    def __init__(self, generations: Sequence[Generation], content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._generations = tuple(generations)
        self._content = content

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The framework would notice only when it next sends, and a request that waits has nothing to send.
        sending = asyncio.ensure_future(self._stream(send, scope.get(SEND, send)))
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for generation in self._generations:
                generation.cancel()
            sending.cancel()
            leaving.cancel()
            # A connection that is gone (OSError) is no error of ours.
            for ended in await asyncio.gather(sending, leaving, return_exceptions=True):
                if isinstance(ended, Exception) and not isinstance(ended, OSError):
                    raise ended

    async def _stream(self, send: Send, direct: Send) -> None:
        """``direct``: for what comes token by token."""
        start = {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
        await send(start)
        async for lines in self._content:
            await direct({"type": "http.response.body", "body": lines.encode(), "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def merged(generations: Sequence[Generation]) -> AsyncIterator[list[tuple[int, Piece | Result]]]:
    """Events of all that one ``begin`` has made, as they come: what has come since the last time.

    Each has the place of its generation. Raises as ``Generation.events``, after what came before.
    """
    running = dict(enumerate(generations))
    while running:
        came: list[tuple[int, Piece | Result]] = []
        failed: HeteroError | None = None
        for place, generation in list(running.items()):
            try:
                while generation._events and place in running:
                    event = generation._next()
                    came.append((place, event))
                    if isinstance(event, Result):
                        del running[place]
            except HeteroError as error:
                failed = failed or error
        if came:
            yield came
        if failed is not None:
            raise failed
        if not came:
            await generations[0]._signal.wait()
