"""From a request to its events, on the event loop: the one way by which every route runs the engine.

A route makes generations by ``begin`` before it answers, so that what is refused has its status. It hands
them to ``finished`` (a whole answer) or to ``EventStream`` (a streamed one); both cancel them when the client
leaves.
"""

from __future__ import annotations

import asyncio
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


class Generation:
    """One request under way. Whoever has begun it must ``cancel`` it; after the end that does nothing."""

    def __init__(self, state: AppState, request: Request) -> None:
        self.request = request
        self._ended = False
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Event] = asyncio.Queue()
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
            event = await self._events.get()
            if isinstance(event, HeteroError):
                raise event
            if isinstance(event, Result) and event.finish_reason == "cancelled" and not self._ended:
                raise NotReadyError("the server is shutting down")
            yield event
            if isinstance(event, Result):
                return

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
        try:
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)
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
    try:
        for request in requests:
            begun.append(Generation(state, request))
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


class EventStream(StreamingResponse):
    """Server-sent events of a few generations; ``content`` reads them and makes the lines.

    The generations end with the response, even when its content is never asked for because the client left.
    """

    def __init__(self, generations: Sequence[Generation], content: AsyncIterator[str]) -> None:
        super().__init__(content, media_type="text/event-stream", headers={"cache-control": "no-cache"})
        self._generations = tuple(generations)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The framework would notice only when it next sends, and a request that waits has nothing to send.
        sending = asyncio.ensure_future(self.stream_response(send))
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


async def merged(generations: Sequence[Generation]) -> AsyncIterator[tuple[int, Piece | Result]]:
    """Events of all, each with the place of its generation, in the order in which they come."""
    if len(generations) == 1:
        async for only in generations[0].events():
            yield 0, only
        return
    queue: asyncio.Queue[tuple[int, Piece | Result | Exception]] = asyncio.Queue()

    async def read(place: int) -> None:
        try:
            async for event in generations[place].events():
                queue.put_nowait((place, event))
        except Exception as error:
            queue.put_nowait((place, error))

    readers = [asyncio.ensure_future(read(place)) for place in range(len(generations))]
    try:
        running = len(readers)
        while running:
            place, event = await queue.get()
            if isinstance(event, Exception):
                raise event
            running -= isinstance(event, Result)
            yield place, event
    finally:
        for reader in readers:
            reader.cancel()
