"""Steps of a decoder on their way: what they are launched with, by which graph, and how they end.

A step runs on one of two tracks, each with buffers, lanes of the hand-off and graphs of its own, so that one
may be launched while the other is still running. Where n-gram embeddings come from the host, a graph waits at
a gate for them: they are gathered while the device is at the layers before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from time import perf_counter as clock
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hetero.core import HeteroError, MachineError
from hetero.decode.inputs import half_of
from hetero.engine.gpu.gate import Gate
from hetero.engine.gpu.graphs import CaptureError, Flight, Graph, Means
from hetero.engine.gpu.parts import Decoder, Experts, Port, Shared
from hetero.engine.gpu.staging import Results, Staging
from hetero.engine.gpu.traced import Tracing, stamped
from hetero.engine.handoff import Handoff, HandoffError, Totals
from hetero.trace import recorder

if TYPE_CHECKING:
    from hetero.ops.gpu.stamps import Tape

log = logging.getLogger("hetero.engine")

TRACKS = 2

_WARM_UPS = 2
"""Steps before the capture: Triton compiles in the first, what the second still makes is made for good."""


class Steps:
    """``pages``: the table of pages on the device. ``port``: what experts are handed over by. ``tracks``: 1:
    no step is ever launched before the last one has ended. ``halves``: whether steps may consist of two that
    take turns, by a hand-off of two lanes a track.

    Attributes: ``turns``: the numbers of rows whose steps do, from their next capture on; traced ones never.
    ``host``: seconds of the host by what it last did for a step that is a graph: "fill" its buffers and begin
    on the CPU's side, "launch", bring n-gram "rows", "wait", and "read".
    """

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
        tracks: int,
        halves: bool = False,
    ) -> None:
        self.decoder, self.experts, self.handoff = decoder, experts, handoff
        self.rows, self.why_eager = rows, eager
        self.tracks = range(tracks)
        self._each = 2 if halves else 1  # lanes of a track
        self.turns: set[int] = set()
        self.host: dict[str, float] = {}
        self._means, self._shared, self._port = means, shared, port
        inputs = {n: decoder.inputs(n) for n in rows}
        device = inputs[rows[0]].tokens.device
        self._results = [Results(rows[-1], device) for _ in self.tracks]
        # What has to wait for the device itself may not be awaited by it.
        late = inputs[rows[0]].ple is not None and not eager and decoder.gathers_on_host
        self._gate: Gate | None = means.gate(handoff, tracks) if late else None
        self._gated = False  # whether what is recorded now waits at the gate
        self._closed: set[int] = set()  # gates before which a step is, or will be
        self._staging = {
            (n, track): Staging(
                one,
                n,
                pages,
                # With one track nothing comes from a step before.
                found=self._results[1 - track].found if tracks > 1 else None,
                arrive=partial(self._arrive, track),
            )
            for n, one in inputs.items()
            for track in self.tracks
        }
        self.graphs: dict[tuple[int, int], Graph] = {}
        self._pool: Any = None  # of the graphs' memory
        self.tracing = Tracing(device)
        self._last: tuple[int, ...] = (0,)  # lanes of the step that ended last

    @property
    def eager(self) -> bool:
        return bool(self.why_eager)

    def launches(self) -> dict[int, Graph]:
        """Rows -> one of their graphs."""
        return {size: graph for (size, track), graph in self.graphs.items() if track == 0}

    def fits_ahead(self, size: int) -> bool:
        """Whether steps of so many rows may be launched before the last one has ended."""
        return (
            not recorder.active
            and all((size, track) in self.graphs for track in range(TRACKS))
            and (self._gate is not None or self._staging[size, 0].ple is None)
        )

    # -- graphs

    def capture(self) -> None:
        """Run every size once, so that all kernels are there, and make the graphs, in place of those that
        were made before. Where an operator cannot be captured, one warning names it and steps run eagerly."""
        self.tracing.close()
        self.graphs.clear()  # before others are made beside them
        self._pool = None
        try:
            self._capture(self.rows)
        except CaptureError as error:
            self._give_up(error)

    def capture_turns(self, size: int, turns: bool) -> bool:
        """Make the graphs of a number of rows anew, with halves that take turns or without; whether they do.
        Where halves cannot be captured or have no memory, one warning says so, and they do not."""
        (self.turns.add if turns else self.turns.discard)(size)
        for track in self.tracks:
            self.graphs.pop((size, track), None)
        if not self.graphs:  # memory of which no graph is left belongs to none that follows
            self._pool = None
        try:
            self._capture([size])
        except (CaptureError, MachineError) as error:
            if turns:
                log.warning("halves of steps of %d rows do not take turns: %s", size, error)
                return self.capture_turns(size, False)
            if isinstance(error, MachineError):
                raise
            self._give_up(error)
        return turns

    def _capture(self, rows: Sequence[int]) -> None:
        for size in reversed(rows):
            self._staging[size, 0].idle()
            for _ in range(_WARM_UPS):
                self._whole(size, size, None, None)
        if self.eager:
            return
        self._means.synchronize()
        if self._pool is None:
            self._pool = self._means.pool()
        # The largest first, so that the others find memory that it has taken.
        for size in reversed(rows):
            for track in self.tracks:
                try:
                    self.graphs[size, track] = self._captured(size, track, None, self._gate is not None)
                except (CaptureError, MachineError):
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
            for lane in range(self._each * len(self.tracks)):
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

    def _captured(self, size: int, track: int, tape: Tape | None, gated: bool) -> Graph:
        return self._means.graph(partial(self._record, size, track, tape, gated), self._pool)

    def _record(self, size: int, track: int, tape: Tape | None, gated: bool) -> Tensor:
        staging = self._staging[size, track]
        self._gated = gated
        if self._port is not None:
            self._port.use(track)
        turns = self._takes_turns(size, tape)
        if self._shared is not None:
            self._shared.turns = turns
        with stamped(tape):
            staging.send()
            lanes = {"lanes": 2} if turns else {}
            out = self.decoder.step(staging.inputs, **lanes)
            if self._shared is not None:
                self._shared.join()
            self._results[track].take(out)
        return out

    def _takes_turns(self, size: int, tape: Tape | None) -> bool:
        return size in self.turns and tape is None

    def _lanes(self, size: int, track: int, count: int, tape: Tape | None = None) -> dict[int, int]:
        """Lanes of the hand-off that a step takes, and the rows that count on each."""
        first, half = track * self._each, half_of(size)
        if not self._takes_turns(size, tape) or half == size:
            return {first: count}
        return {first: min(count, half), first + 1: max(1, count - half)}

    @property
    def totals(self) -> Totals | None:
        """Of the hand-off in the last step, over its lanes."""
        if self.handoff is None:
            return None
        each = [self.handoff.totals(lane) for lane in self._last]
        return Totals(*(sum(column) for column in zip(*each, strict=True)))

    def _arrive(self, track: int) -> None:
        if self._gated:
            assert self._gate is not None
            self._gate.record(track)

    # -- steps

    def begin(
        self,
        rows: list[tuple[int, int, int]],
        size: int,
        track: int = 0,
        gather: Callable[[Tensor], None] | None = None,
        *,
        ahead: bool = False,
    ) -> Flight:
        """Launch a step of (token, slot, position), ``size`` of the graphs'. ``ahead``: beside one on the
        other track which may still be running, where ``fits_ahead``: a token of ``LATER - n`` is what row n
        of that will have said.

        ``gather`` fills n-gram embeddings [n, D] of these rows, after the launch where the graph waits for
        them; without it the caller does so by ``feed``. Raises HandoffError where nobody serves the experts,
        and what ``gather`` raises; nothing is on its way then."""
        began = clock()
        count = len(rows)
        self._staging[size, track].fill(rows)
        graph = self.graphs.get((size, track))
        if graph is None or (recorder.active and not ahead):
            return self._at_once(size, count, gather)
        flight = Flight(size, track, count, graph, self._begun(self._lanes(size, track, count)))
        try:
            if self._gate is None:
                self._fill(flight, gather)
            else:
                self._gate.shut(track)
                self._closed.add(track)
            began = self._lap("fill", began)
            graph.replay()
            self._means.mark(track)
            self._lap("launch", began)
            if gather is not None:
                self.feed(flight, gather)
        except BaseException:
            self._cut(flight)
            raise
        return flight

    def feed(self, flight: Flight, gather: Callable[[Tensor], None]) -> None:
        """Bring the n-gram embeddings for which a step waits, if it does."""
        if flight.track in self._closed:
            began = clock()
            self._fill(flight, gather)
            self._open(flight.track)
            self._lap("rows", began)

    def _lap(self, name: str, began: float) -> float:
        now = clock()
        self.host[name] = now - began
        return now

    def end(
        self, flight: Flight, then: Callable[[list[int]], None] | None = None
    ) -> tuple[list[int], list[float]]:
        """Wait for a step: of each row the most likely token and its logit. ``then`` is given the tokens at
        once, which are not worth anything if an error follows. Raises HandoffError where the CPU side
        failed, and what ``then`` raises."""
        began = clock()
        if flight.graph is not None:
            assert flight.track not in self._closed, "it waits for its n-gram embeddings"
            try:
                self._means.wait(flight.size, flight.track)
            except BaseException:
                self._cut(flight)
                raise
            began = self._lap("wait", began)
        late = flight.graph is not None and self._gate is not None and self._gate.failed(flight.track)
        found = self._results[flight.track].read(flight.count)
        self._lap("read", began)
        try:
            if then is not None:
                then(found[0])
        finally:
            if flight.graph is not None:
                self._ended(flight.lanes)
        if late:
            raise HandoffError("the step went on without its n-gram embeddings")
        if flight.graph is not None:
            flight.out = flight.graph.out
        self._last = flight.lanes
        return found

    def drop(self, flight: Flight) -> None:
        """Wait for a step whose outcome nobody wants any more."""
        if flight.track in self._closed:
            self._open(flight.track)
        with suppress(HandoffError):
            self.end(flight)

    def open_all(self) -> None:
        """No step is left waiting for the host."""
        for track in list(self._closed):
            self._open(track)

    def _open(self, track: int) -> None:
        assert self._gate is not None
        self._closed.discard(track)
        self._gate.open(track)

    def _fill(self, flight: Flight, gather: Callable[[Tensor], None] | None) -> None:
        ple = self._staging[flight.size, flight.track].ple
        if ple is not None and gather is not None:
            gather(ple[: flight.count])

    def _cut(self, flight: Flight) -> None:
        """Something kept the host from launching a step or from waiting for it."""
        self.open_all()
        self._ended(flight.lanes, abort=True)
        # What the device says is of the same error; buffers are free once it is idle.
        with suppress(RuntimeError, HeteroError):
            self._means.synchronize()

    def _begun(self, rows: Mapping[int, int]) -> tuple[int, ...]:
        """Lanes whose step begins: all of them, or none."""
        begun: list[int] = []
        try:
            for lane, count in rows.items():
                if self.handoff is not None:
                    self.handoff.begin(lane, count)
                begun.append(lane)
        except BaseException:
            self._ended(begun, abort=True)
            raise
        return tuple(begun)

    def _ended(self, lanes: Sequence[int], *, abort: bool = False) -> None:
        """Raises the first lane's error, once all of them have ended."""
        errors: list[HandoffError] = []
        for lane in lanes:
            try:
                if self.handoff is not None:
                    self.handoff.end(lane, abort=abort)
            except HandoffError as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _at_once(self, size: int, count: int, gather: Callable[[Tensor], None] | None) -> Flight:
        """Without a graph, or by one that is traced: a step that has ended when this returns."""
        graph, tape = self._traced(size)
        flight = Flight(size, 0, count, None, tuple(self._lanes(size, 0, count, tape)))
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
        lanes = self._lanes(size, 0, count, tape)
        with nullcontext() if self.handoff is None else self.handoff.step(lanes):
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
