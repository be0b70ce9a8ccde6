"""Steps of a runner in the trace: as the host sees them, and where stamps are asked for, as the GPU does.

A graph that stamps its work is another graph than the one that runs untraced. It is captured when the first
step of its size is traced, with memory of the same pool.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from hetero.core import MachineError
from hetero.engine.gpu.graphs import CaptureError, Graph
from hetero.ops.gpu.stamps import Stamps, Tape, at_layer, lap, start
from hetero.trace import HEAD, STAMPED, recorder

log = logging.getLogger("hetero.engine")

CHUNK = 0
"""In place of a number of rows: a chunk of a prompt, which no graph runs."""


class Tracing:
    """Of one runner on ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stamps: Stamps | None = None
        self._tapes: dict[int, Tape] = {}
        self._graphs: dict[int, Graph] = {}
        self._refused = False

    def tape(self, size: int) -> Tape | None:
        """Of steps of a number of rows, or of a ``CHUNK``; None where none is asked for."""
        if not recorder.stamping or self._refused:
            return None
        try:
            if self._stamps is None:
                self._stamps = Stamps(self._device)
            if size not in self._tapes:
                self._tapes[size] = self._stamps.tape()
        except (MachineError, torch.OutOfMemoryError) as error:
            self._give_up(error)
            return None
        return self._tapes[size]

    def graph(self, size: int, tape: Tape, capture: Callable[[], Graph]) -> Graph | None:
        """The graph that stamps into ``tape``; None where it cannot be captured, or has no memory: what is
        left beside the experts was measured without it."""
        if size not in self._graphs:
            try:
                with tape.recording():
                    self._graphs[size] = capture()
            except (CaptureError, MachineError) as error:
                self._give_up(error)
                return None
        return self._graphs[size]

    def _give_up(self, error: Exception) -> None:
        self._refused = True
        log.warning("the trace has no times of the GPU: %s", str(error).strip().partition("\n")[0])

    @contextmanager
    def step(self, tape: Tape | None, tokens: int) -> Iterator[None]:
        """A step of so many rows, or tokens of a prompt, at whose end the stream is through."""
        if not recorder.active:
            yield
            return
        if tape is not None:
            tape.begin()
        recorder.begin_step(tokens)
        yield
        if tape is not None:
            tape.tell(tokens)
        recorder.end_step(STAMPED if tape is not None else "cpu" if self._device.type == "cpu" else "gpu")

    def close(self) -> None:
        """The graphs go."""
        self._graphs.clear()


@contextmanager
def stamped(tape: Tape | None) -> Iterator[None]:
    """Around the work of a step on the stream: what no operator tells of at its end is the head's."""
    start()
    yield
    at_layer(-1)
    lap(HEAD)
    if tape is not None:
        tape.seal()
