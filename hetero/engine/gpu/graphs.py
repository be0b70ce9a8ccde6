"""A step as a captured graph: recording it, what it consists of, and waiting for a replay."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero.core import HeteroError, InputError, MachineError
from hetero.engine.gpu.gate import FlagGate, Gate
from hetero.engine.handoff import Handoff
from hetero.engine.handoff_backends import GpuBackend
from hetero.hw.cuda_driver import driver

WAITS = ("block", "spin", "nap")
"""How a host waits for a step: asleep; looking all the time, which takes a core from the experts; or asleep
for most of what the last steps took and looking for the rest."""

_NAP = 0.85  # of the shortest recent step
_FORGET = 0.05  # by which the shortest is let grow at every step


class CaptureError(HeteroError):
    """An operator that cannot be part of a graph, by name."""


class StepGraph:
    """What ``record`` does in the current stream, as one graph. ``out``: what it returned, which every replay
    fills anew. ``nodes``: how many of each kind it has.

    Raises CaptureError, after which the stream is as before, and MachineError where memory is lacking.
    """

    def __init__(self, record: Callable[[], Tensor], stream: Any, pool: Any) -> None:
        self._graph = torch.cuda.CUDAGraph(keep_graph=True)
        cause: Exception | None = None
        try:
            # Other threads, a server's for one, may use the device meanwhile.
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                try:
                    self.out = record()
                except Exception as error:
                    cause = error
                    raise
        except RuntimeError as error:
            if isinstance(cause, torch.OutOfMemoryError):
                raise MachineError(f"a graph of a step needs more GPU memory than is left: {cause}") from None
            raise CaptureError(told(cause or error)) from cause
        self.nodes = driver().graph_nodes(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    @property
    def launches(self) -> int:
        """Nodes of a replay; those that only order others do not count."""
        return sum(count for kind, count in self.nodes.items() if kind not in ("empty", "event"))

    def replay(self) -> None:
        self._graph.replay()


def told(error: BaseException) -> str:
    """What was being done, and what the device said of it."""
    ours = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if "/hetero/" in frame.filename or "/transformers/" in frame.filename
    ]
    where = ""
    if ours:
        last = ours[-1]
        where = f"{last.name} in {last.filename.rpartition('/')[2]}:{last.lineno}: "
    return where + (str(error).strip().splitlines() or [type(error).__name__])[0]


class Waiter:
    """Waits until the current stream has come to a mark. ``how``: of WAITS; ``lanes``: marks at a time.
    Raises InputError for another word."""

    def __init__(self, how: str = "block", lanes: int = 1) -> None:
        if how not in WAITS:
            raise InputError(f"no way to wait is called '{how}'; valid: {', '.join(WAITS)}")
        self.how = how
        self._events: list[Any] = [torch.cuda.Event(blocking=True) for _ in range(lanes)]  # type: ignore[no-untyped-call]
        self._since = [0.0] * lanes
        self._last = 0.0  # when the last mark was come to
        self._shortest: dict[int, float] = {}  # kind of step -> seconds

    def mark(self, lane: int = 0) -> None:
        """Behind all that the current stream has been given."""
        self._events[lane].record()
        self._since[lane] = time.perf_counter()

    def wait(self, kind: int = 0, lane: int = 0) -> None:
        """For the lane's mark. ``kind``: of the step before it, whose like take about as long; 0: of
        something that is not like others, asleep in any case."""
        event = self._events[lane]
        if self.how == "block" or kind == 0:
            event.synchronize()
            self._last = time.perf_counter()
            return
        # A step that was launched ahead begins when the one before it ends.
        began = max(self._since[lane], self._last)
        if self.how == "nap":
            left = began + _NAP * self._shortest.get(kind, 0.0) - time.perf_counter()
            if left > 0:
                time.sleep(left)
        while not event.query():
            time.sleep(0)  # lets other threads of Python run
        self._last = time.perf_counter()
        took = self._last - began
        self._shortest[kind] = min(took, self._shortest.get(kind, took) * (1 + _FORGET))


class Graph(Protocol):
    """A recorded step; ``StepGraph``. ``out``: its logits, which every replay fills anew."""

    @property
    def out(self) -> Tensor: ...
    @property
    def launches(self) -> int: ...
    @property
    def nodes(self) -> Mapping[str, int]: ...
    def replay(self) -> None: ...


@dataclass(slots=True)
class Flight:
    """A step on its way. ``out``: its logits [size, V] once it has ended, until another one runs."""

    size: int
    track: int
    count: int  # rows that count
    graph: Graph | None
    lanes: tuple[int, ...] = ()  # of the hand-off
    out: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        assert self.out is not None, "the step has not ended"
        return self.out


class Means(Protocol):
    """What steps are recorded, replayed and waited for by: a GPU, or what stands in its place."""

    why_eager: str  # why nothing can be recorded; "": it can

    def graph(self, record: Callable[[], Tensor], pool: Any) -> Graph: ...
    def pool(self) -> Any: ...
    def gate(self, handoff: Handoff | None, lanes: int) -> Gate | None: ...
    def mark(self, lane: int) -> None: ...
    def wait(self, kind: int, lane: int) -> None: ...
    def synchronize(self) -> None: ...
    def stream(self) -> AbstractContextManager[None]: ...


class CudaMeans:
    """One stream of a device. ``wait``: of WAITS."""

    why_eager = ""

    def __init__(self, device: torch.device, wait: str, lanes: int) -> None:
        self._device = device
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._waiter = Waiter(wait, lanes)
        self.mark, self.wait = self._waiter.mark, self._waiter.wait

    def graph(self, record: Callable[[], Tensor], pool: Any) -> StepGraph:
        return StepGraph(record, self._stream, pool)

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def gate(self, handoff: Handoff | None, lanes: int) -> Gate | None:
        if handoff is None:
            return None
        assert isinstance(handoff.backend, GpuBackend)
        return FlagGate(handoff.backend, lanes)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        # Whoever calls may have changed something, such as the experts that GPU memory holds.
        current = torch.cuda.current_stream(self._device)
        if not current.query():
            self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            yield


class HostMeans:
    """Nothing to wait for: operators are through when they return."""

    why_eager = "there is no GPU"

    def graph(self, record: Callable[[], Tensor], pool: Any) -> Graph:
        raise CaptureError(self.why_eager)

    def pool(self) -> None: ...
    def gate(self, handoff: Handoff | None, lanes: int) -> None: ...
    def mark(self, lane: int) -> None: ...
    def wait(self, kind: int, lane: int) -> None: ...
    def synchronize(self) -> None: ...
    def stream(self) -> AbstractContextManager[None]:
        return nullcontext()
