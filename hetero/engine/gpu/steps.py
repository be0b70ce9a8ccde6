"""Steps of a decoder on their way: what they are launched with, by which graph, and how they end.

A step runs on one of two lanes, each with buffers, a place in the hand-off and graphs of its own, so that one
may be launched while the other is still running. Where n-gram embeddings come from the host, a graph waits at
a gate for them: they are gathered while the device is at the layers before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hetero.core import HeteroError, MachineError
from hetero.engine.gpu.gate import Gate
from hetero.engine.gpu.graphs import CaptureError, Graph, Means
from hetero.engine.gpu.parts import Decoder, Experts, Port, Shared
from hetero.engine.gpu.staging import Results, Staging
from hetero.engine.gpu.traced import Tracing, stamped
from hetero.engine.handoff import Handoff, HandoffError
from hetero.trace import recorder

if TYPE_CHECKING:
    from hetero.ops.gpu.stamps import Tape

log = logging.getLogger("hetero.engine")

LANES = 2

_WARM_UPS = 2
"""Steps before the capture: Triton compiles in the first, what the second still makes is made for good."""


@dataclass(slots=True)
class Flight:
    """A step on its way. ``out``: its logits [size, V] once it has ended, until another one runs."""

    size: int
    lane: int
    count: int  # rows that count
    graph: Graph | None
    out: Tensor | None = None

    @property
    def logits(self) -> Tensor:
        assert self.out is not None, "the step has not ended"
        return self.out


class Steps:
    """``pages``: the table of pages on the device. ``port``: what experts are handed over by. ``lanes``: 1:
    no step is ever launched before the last one has ended."""

    def __init__(
        self,
        decoder: Decoder,
        experts: Sequence[Experts],
        means: Means,
        *,
        handoff: Handoff | None,
        rows: Sequence[int],
        pages: Tensor,
        shared: Shared | None,
        port: Port | None,
        eager: str,
        lanes: int,
    ) -> None:
        self.decoder, self.experts, self.handoff = decoder, experts, handoff
        self.rows, self.why_eager = rows, eager
        self.lanes = range(lanes)
        self._means, self._shared, self._port = means, shared, port
        inputs = {n: decoder.inputs(n) for n in rows}
        device = inputs[rows[0]].tokens.device
        self._results = [Results(rows[-1], device) for _ in self.lanes]
        late = inputs[rows[0]].ple is not None and not eager
        self._gate: Gate | None = means.gate(handoff, lanes) if late else None
        self._gated = False  # whether what is recorded now waits at the gate
        self._closed: set[int] = set()  # gates before which a step is, or will be
        self._staging = {
            (n, lane): Staging(
                one,
                n,
                pages,
                # With one lane nothing comes from a step before.
                found=self._results[1 - lane].found if lanes > 1 else None,
                arrive=partial(self._arrive, lane),
            )
            for n, one in inputs.items()
            for lane in self.lanes
        }
        self.graphs: dict[tuple[int, int], Graph] = {}
        self._pool: Any = None  # of the graphs' memory
        self.tracing = Tracing(device)
        self.last = 0  # lane of the step that ended last

    @property
    def eager(self) -> bool:
        return bool(self.why_eager)

    def launches(self) -> dict[int, Graph]:
        """Rows -> one of their graphs."""
        return {size: graph for (size, lane), graph in self.graphs.items() if lane == 0}

    def fits_ahead(self, size: int) -> bool:
        """Whether steps of so many rows may be launched before the last one has ended."""
        return (
            not recorder.active
            and all((size, lane) in self.graphs for lane in range(LANES))
            and (self._gate is not None or self._staging[size, 0].ple is None)
        )

    # -- graphs

    def capture(self) -> None:
        """Run every size once, so that all kernels are there, and make the graphs, in place of those that
        were made before. Where an operator cannot be captured, one warning names it and steps run eagerly."""
        self.tracing.close()
        self.graphs.clear()  # before others are made beside them
        for size in reversed(self.rows):
            self._staging[size, 0].idle()
            for _ in range(_WARM_UPS):
                self._whole(size, size, None, None)
        if self.eager:
            return
        self._means.synchronize()
        self._pool = self._means.pool()
        # The largest first, so that the others find memory that it has taken.
        for size in reversed(self.rows):
            for lane in self.lanes:
                try:
                    self.graphs[size, lane] = self._captured(size, lane, None, self._gate is not None)
                except CaptureError as error:
                    self._give_up(error)
                    return
                except MachineError:
                    self._forget()  # whoever makes room may capture again
                    raise

    def _give_up(self, error: CaptureError) -> None:
        self.graphs.clear()
        self.why_eager = str(error)
        self._forget()
        log.warning("the step cannot be captured as a graph and runs eagerly: %s", error)

    def _forget(self) -> None:
        """What a capture that failed has left half recorded."""
        if self.handoff is not None:
            for lane in self.lanes:
                self.handoff.forget(lane)
        if self._port is not None:
            self._port.forget()
        for one in self.experts:
            one.forget()

    def close(self) -> None:
        """The graphs go."""
        self.open_all()
        self._means.synchronize()
        self.graphs.clear()
        self.tracing.close()

    def _captured(self, size: int, lane: int, tape: Tape | None, gated: bool) -> Graph:
        return self._means.graph(partial(self._record, size, lane, tape, gated), self._pool)

    def _record(self, size: int, lane: int, tape: Tape | None, gated: bool) -> Tensor:
        staging = self._staging[size, lane]
        self._gated = gated
        if self._port is not None:
            self._port.use(lane)
        with stamped(tape):
            staging.send()
            out = self.decoder.step(staging.inputs)
            if self._shared is not None:
                self._shared.join()
            self._results[lane].take(out)
        return out

    def _arrive(self, lane: int) -> None:
        if self._gated:
            assert self._gate is not None
            self._gate.record(lane)

    # -- steps

    def begin(
        self,
        rows: list[tuple[int, int, int]],
        size: int,
        lane: int = 0,
        gather: Callable[[Tensor], None] | None = None,
        *,
        ahead: bool = False,
    ) -> Flight:
        """Launch a step of (token, slot, position), ``size`` of the graphs'. ``ahead``: beside one on the
        other lane which may still be running, where ``fits_ahead``: a token of ``LATER - n`` is what row n of
        that will have said.

        ``gather`` fills n-gram embeddings [n, D] of these rows, after the launch where the graph waits for
        them; without it the caller does so by ``feed``. Raises HandoffError where nobody serves the experts,
        and what ``gather`` raises; nothing is on its way then."""
        count = len(rows)
        self._staging[size, lane].fill(rows)
        graph = self.graphs.get((size, lane))
        if graph is None or (recorder.active and not ahead):
            return self._at_once(size, count, gather)
        if self.handoff is not None:
            self.handoff.begin(lane, count)
        flight = Flight(size, lane, count, graph)
        try:
            if self._gate is None:
                self._fill(flight, gather)
            else:
                self._closed.add(lane)
            graph.replay()
            self._means.mark(lane)
            if gather is not None:
                self.feed(flight, gather)
        except BaseException:
            self._cut(flight)
            raise
        return flight

    def feed(self, flight: Flight, gather: Callable[[Tensor], None]) -> None:
        """Bring the n-gram embeddings for which a step waits, if it does."""
        if flight.lane in self._closed:
            self._fill(flight, gather)
            self._open(flight.lane)

    def end(self, flight: Flight) -> tuple[list[int], list[float]]:
        """Wait for a step: of each row the most likely token and its logit. Raises HandoffError where the CPU
        side failed."""
        if flight.graph is not None:
            assert flight.lane not in self._closed, "it waits for its n-gram embeddings"
            try:
                self._means.wait(flight.size, flight.lane)
            except BaseException:
                self._cut(flight)
                raise
            late = self._gate is not None and self._gate.failed(flight.lane)
            if self.handoff is not None:
                self.handoff.end(flight.lane)
            if late:
                raise HandoffError("the step went on without its n-gram embeddings")
            flight.out = flight.graph.out
        self.last = flight.lane
        return self._results[flight.lane].read(flight.count)

    def drop(self, flight: Flight) -> None:
        """Wait for a step whose outcome nobody wants any more."""
        if flight.lane in self._closed:
            self._open(flight.lane)
        with suppress(HandoffError):
            self.end(flight)

    def open_all(self) -> None:
        """No step is left waiting for the host."""
        for lane in list(self._closed):
            self._open(lane)

    def _open(self, lane: int) -> None:
        assert self._gate is not None
        self._closed.discard(lane)
        self._gate.open(lane)

    def _fill(self, flight: Flight, gather: Callable[[Tensor], None] | None) -> None:
        ple = self._staging[flight.size, flight.lane].ple
        if ple is not None and gather is not None:
            gather(ple[: flight.count])

    def _cut(self, flight: Flight) -> None:
        """Something kept the host from launching a step or from waiting for it."""
        self.open_all()
        if self.handoff is not None:
            self.handoff.end(flight.lane, abort=True)
        # What the device says is of the same error; buffers are free once it is idle.
        with suppress(RuntimeError, HeteroError):
            self._means.synchronize()

    def _at_once(self, size: int, count: int, gather: Callable[[Tensor], None] | None) -> Flight:
        """Without a graph, or by one that is traced: a step that has ended when this returns."""
        flight = Flight(size, 0, count, None)
        graph, tape = self._traced(size)
        with self.tracing.step(tape, count):
            self._fill(flight, gather)
            flight.out = self._whole(size, count, graph, tape)
        return flight

    def _traced(self, size: int) -> tuple[Graph | None, Tape | None]:
        """What runs a step at once, None being the operators themselves, and the tape that it stamps into."""
        plain, tape = self.graphs.get((size, 0)), self.tracing.tape(size)
        if plain is None or tape is None:
            return plain, tape
        # A graph that waited at the gate would need to be told when that was.
        graph = self.tracing.graph(size, tape, partial(self._captured, size, 0, tape, False))
        if graph is None:
            self._forget()
            return plain, None
        return graph, tape

    def _whole(self, size: int, count: int, graph: Graph | None, tape: Tape | None) -> Tensor:
        """Logits [size, V] of a step whose first ``count`` rows count, once it is through."""
        with nullcontext() if self.handoff is None else self.handoff.step({0: count}):
            if graph is None:
                try:
                    with nullcontext() if tape is None else tape.recording():
                        out = self._record(size, 0, tape, False)
                except BaseException:
                    self._forget()  # the next step begins anew
                    raise
                self._means.mark(0)
            else:
                if tape is None and self._gate is not None:
                    self._gate.open(0)  # its embeddings are there
                graph.replay()
                self._means.mark(0)
                out = graph.out
            self._means.wait(size, 0)
        return out
