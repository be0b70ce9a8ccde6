"""A step as a captured graph: recording it, what it consists of, and waiting for a replay."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hetero.core import HeteroError, InputError, MachineError
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
            raise CaptureError(_told(cause or error)) from cause
        self.nodes = driver().graph_nodes(self._graph.raw_cuda_graph())
        self._graph.instantiate()

    @property
    def launches(self) -> int:
        """Nodes of a replay; those that only order others do not count."""
        return sum(count for kind, count in self.nodes.items() if kind not in ("empty", "event"))

    def replay(self) -> None:
        self._graph.replay()


def _told(error: BaseException) -> str:
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
    """Waits until the current stream is through. ``how``: of WAITS. Raises InputError for another word."""

    def __init__(self, how: str = "block") -> None:
        if how not in WAITS:
            raise InputError(f"no way to wait is called '{how}'; valid: {', '.join(WAITS)}")
        self.how = how
        self._event: Any = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        self._shortest: dict[int, float] = {}  # kind of step -> seconds

    def wait(self, kind: int = 0) -> None:
        """``kind``: of the step, whose like take about as long; 0: of something that is not like others,
        asleep in any case."""
        event = self._event
        event.record()
        if self.how == "block" or kind == 0:
            event.synchronize()
            return
        began = time.perf_counter()
        if self.how == "nap":
            time.sleep(_NAP * self._shortest.get(kind, 0.0))
        while not event.query():
            time.sleep(0)  # lets other threads of Python run
        took = time.perf_counter() - began
        self._shortest[kind] = min(took, self._shortest.get(kind, took) * (1 + _FORGET))
