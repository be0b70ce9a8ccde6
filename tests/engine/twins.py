"""A thread in a GPU's place: graphs are functions that it calls in turn, when they are replayed."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from hetero.engine.handoff import Handoff
from hetero.engine.handoff_backends import ThreadBackend

LIMIT_S = 60.0


class Gate:
    """Of events; a step that nobody lets in fails."""

    def __init__(self, lanes: int) -> None:
        self.events = [threading.Event() for _ in range(lanes)]

    def record(self, lane: int) -> None:
        assert self.events[lane].wait(LIMIT_S), "nobody has opened the gate"
        self.events[lane].clear()

    def shut(self, lane: int) -> None:
        self.events[lane].clear()

    def open(self, lane: int) -> None:
        assert not self.events[lane].is_set()
        self.events[lane].set()

    def failed(self, lane: int) -> bool:
        return False


class PlayedGraph:
    def __init__(self, means: TwinMeans, record: Callable[[], Tensor]) -> None:
        self._means, self._record = means, record
        self.out = torch.empty(0)
        self.launches, self.nodes = 1, {"kernel": 1}

    def replay(self) -> None:
        self._means.play(self._run)

    def _run(self) -> None:
        with torch.inference_mode():
            self.out = self._record()


class TwinMeans:
    """``Means`` of a runner. ``delay``: seconds at most that the thread waits before a step, at random;
    ``replays``: how many there were, ``ahead``: how many while another one had not ended."""

    why_eager = ""

    def __init__(self, delay: float = 0.0) -> None:
        self.delay = delay
        self.replays = self.ahead = 0
        self._thread = ThreadPoolExecutor(1)
        self._last: Future[None] | None = None
        self._marks: dict[int, Future[None] | None] = {}
        self._running = 0

    def graph(self, record: Callable[[], Tensor], pool: Any) -> Any:
        return PlayedGraph(self, record)

    def play(self, run: Callable[[], None]) -> None:
        self.replays += 1
        self.ahead += self._running > 0
        self._running += 1
        seconds = random.random() * self.delay

        def later() -> None:
            time.sleep(seconds)
            run()

        self._last = self._thread.submit(later)

    def pool(self) -> None: ...

    def gate(self, handoff: Any, lanes: int) -> Gate:
        return Gate(lanes)

    def mark(self, lane: int) -> None:
        self._marks[lane] = self._last

    def wait(self, kind: int, lane: int) -> None:
        mark = self._marks.pop(lane)
        if mark is not None:
            if kind:
                self._running = max(0, self._running - 1)
            mark.result(LIMIT_S)

    def synchronize(self) -> None:
        self._running = 0
        if self._last is not None:
            self._last.exception(LIMIT_S)

    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()


class PlayedFlags:
    """A hand-off whose flags go through twins, one for each operation, which are replayed when a step comes
    to them."""

    def __init__(self, handoff: Handoff) -> None:
        backend = handoff.backend
        assert isinstance(backend, ThreadBackend)
        self._backend, self.lanes, self.layers = backend, handoff.lanes, handoff.layers
        self.payload = handoff.payload
        self.log: list[tuple[str, int, int]] = []
        for lane in range(handoff.lanes):
            for layer in range(handoff.layers):
                backend.stream(self._index(lane, layer))
                handoff.record_submit(lane, layer)
                backend.stream(self._index(lane, layer) + 1)
                handoff.record_collect(lane, layer)

    def _index(self, lane: int, layer: int) -> int:
        return 2 * (lane * self.layers + layer)

    def record_submit(self, lane: int, layer: int) -> None:
        self.log.append(("submit", lane, layer))
        self._play(self._index(lane, layer))

    def record_collect(self, lane: int, layer: int) -> None:
        self.log.append(("collect", lane, layer))
        self._play(self._index(lane, layer) + 1)

    def _play(self, index: int) -> None:
        twin = self._backend.twins[index]
        twin.launch()
        assert twin.synchronize(30.0)
