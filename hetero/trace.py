"""What the machine did when: one clock, one ring of events, spans on lanes, an export to Chrome's viewer.

Operators record, and the server or ``--trace`` reads. How recording is kept cheap:

- ``recorder.active`` is one attribute; while nobody watches, an operator reads it and does nothing else.
- Whatever a reader can find out is left to it: bytes, shares, and dense work, which is all that a step does
  between its other spans. So a layer costs two readings of the clock and one tuple. Steps stream weights
  through the caches, so every line of Python is cold and costs ten times what it costs in a loop: calls that
  took 5 us a layer in a loop made steps 4% longer.
- An event is a tuple stored into a list that is never resized, without a lock: numbers come from
  ``itertools.count``; that and the store are each atomic under the GIL, so any thread may write while another
  reads. A full ring overwrites its oldest events.

Measured by ``benchmarks/trace_overhead.py`` on the demo model (30 layers, 35 ms a step, two cores): a
recorded step takes 0.25 to 0.4 ms more, about 1%.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

clock = time.perf_counter_ns
"""The clock of every span, in nanoseconds; ``Timings`` are of the same one."""

Lane = Literal["step", "gpu", "pcie", "cpu", "disk", "choice"]
LANES: tuple[Lane, ...] = ("step", "gpu", "pcie", "cpu", "disk")

EXPERTS, DENSE, SHARED, COPY, READ = "experts", "dense", "shared expert", "copy", "read"
"""Names of spans: routed experts; all that a step does besides; what runs beside experts; between memories;
what experts wait for from the disk, part of their own span, or embeddings for rows of their table."""

MIXER, ROUTER, SUBMIT, HITS, WAIT, HEAD = (
    "mixer", "router", "submit", "GPU experts", "wait for the CPU", "head"
)  # fmt: skip
"""Of a GPU that stamps its work: attention or delta rule; router; looking up and handing over experts; its
own experts; waiting for the CPU's sum and nothing else; final norm, output layer and what follows it."""
AHEAD = "fetch ahead"
"""Of a GPU that has nothing left to do in a layer but to wait: the next layer's weights come nearer."""
PLAN = "host divides experts"
"""Of a GPU that waits until the host knows a chunk's routing and has divided its experts over the tiers."""
IN_PLACE, MOVE, STREAM = "read in place", "cache move", "streamed experts"
"""On the lane "pcie": experts that the GPU reads from host memory for a step, before its own experts' span
ends; one that comes into the cache; those of a prefill."""
DEFERRED = "deferred experts"
"""On the lane "cpu": experts of a layer whose sum is added one layer later."""
PREFILL = "prefill"
"""On the lane "choice": a chunk or a layer of it; ``details`` say which strategy, and what was expected."""
STAMPED = "stamped"
"""Given to ``end_step`` for the lane: stamps tell all that the GPU did, so what is left is the host's."""

CAPACITY = 1 << 14
"""Events of a ring that only the last steps are wanted of: some 500 steps of 30 layers, 8 MiB at most."""
LONG_CAPACITY = 1 << 18
"""Events of a ring that is written to a file: 130 MiB at most."""

# More than there are threads that record.
SLACK = 64


class Reading(NamedTuple):
    """What a step of one layer's experts reads: each distinct one that was chosen, once."""

    experts: int
    expert_bytes: int

    def count(self, ids: Any) -> int:
        """Distinct experts in ids [T, k], a tensor; those that are no expert's are left out."""
        chosen: set[int] = set(ids.flatten().tolist())
        return sum(0 <= expert < self.experts for expert in chosen)

    def nbytes(self, ids: Any) -> int:
        """Their bytes."""
        return self.count(ids) * self.expert_bytes


class Counted(NamedTuple):
    """What a step of one layer's experts reads, counted already."""

    experts: int
    expert_bytes: int


class Span(NamedTuple):
    """Something that took time. ``layer`` is -1 outside layers, ``start`` and ``end`` are of ``clock``.

    ``nbytes``: weights read by experts, or bytes moved on the lane "pcie". ``tokens``: rows worked on.
    ``experts``: distinct ones that were computed or read, 0 where it is not known. ``details``: more, for a
    reader.
    """

    number: int
    lane: Lane
    name: str
    layer: int
    step: int
    start: int
    end: int
    nbytes: int = 0
    tokens: int = 0
    experts: int = 0
    details: tuple[tuple[str, str | float], ...] = ()

    @property
    def duration(self) -> int:
        return self.end - self.start


# Lane, name, layer, start, end, ids of experts or number of rows, what these experts read (a Reading or a
# Counted) or number of bytes.
Event = tuple[Lane, str, int, int, int, Any, Any]


class Spans(Protocol):
    """An event that is several spans, made when somebody reads them."""

    def spans(self, number: int, step: int) -> Iterable[Span]:
        """With the number and the step that they are recorded under."""


class Recorder:
    """A ring of events, and the step that is under way.

    ``begin_step`` and ``end_step`` are for the thread that runs the model, the rest for any.
    """

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.active = False
        self.stamping = False  # as well: GPUs stamp their work, which makes steps a little slower
        self._slots: list[tuple[int, int, Event | Spans] | None] = [None] * capacity
        self._numbers = itertools.count()
        self._next = 0  # about where the numbers are: of two writers at once the slower may set it back
        self._watchers = 0
        self._stamped = 0  # of these
        self._lock = threading.Lock()
        self._step = -1
        self._began = 0  # 0 where no step is under way, or one that began before the recording
        self._tokens = 0
        self._at_end: list[weakref.WeakMethod[Callable[[], None]]] = []

    def at_end(self, call: Callable[[], None]) -> None:
        """Let a bound method be called whenever the last watcher has gone, as long as its object lives."""
        self._at_end.append(weakref.WeakMethod(call))

    @contextmanager
    def recording(self, capacity: int = CAPACITY, *, stamps: bool = False) -> Iterator[Recorder]:
        """Record within it, with ``stamps`` what GPUs do inside of graphs as well. Several may watch at once;
        the largest ``capacity`` that was asked for stays."""
        with self._lock:
            if capacity > len(self._slots):
                # A writer that still holds the old list loses one event; its numbers go on.
                self._slots = [None] * capacity
            if not self._watchers:
                self._began = 0
            self._watchers += 1
            self._stamped += stamps
            self.active, self.stamping = True, self._stamped > 0
        try:
            yield self
        finally:
            with self._lock:
                self._watchers -= 1
                self._stamped -= stamps
                self.active, self.stamping = self._watchers > 0, self._stamped > 0
                calls = [] if self.active else [call() for call in self._at_end]
            for call in calls:
                if call is not None:
                    call()

    def add(self, event: Event | Spans) -> None:
        number = next(self._numbers)
        slots = self._slots
        slots[number % len(slots)] = (number, self._step, event)
        self._next = number + 1

    def begin_step(self, tokens: int) -> None:
        """A forward pass over ``tokens`` rows begins."""
        self._step += 1
        self._tokens = tokens
        self._began = clock()

    def end_step(self, lane: str) -> None:
        """It has ended; what no other event tells of was dense work on ``lane``, or with ``STAMPED`` the
        host's."""
        if self._began:
            self.add(("step", lane, -1, self._began, clock(), self._tokens, 0))
            self._began = 0

    def next_number(self) -> int:
        """A number from which on all events are still to come."""
        return next(self._numbers)

    def spans(self, since: int = 0) -> list[Span]:
        """Spans that the ring still holds whose number is ``since`` or more, in order of number.

        The lane "step" holds forward passes; the name of such a span is the lane of its dense work, or
        ``STAMPED``.
        """
        slots = self._slots
        last = self._next + SLACK
        found = (slots[number % len(slots)] for number in range(max(since, last - len(slots)), last))
        held = [entry for entry in found if entry is not None and since <= entry[0] < last]
        held.sort(key=lambda entry: entry[0])
        return [span for entry in held for span in _spans(*entry)]


def _spans(number: int, step: int, event: Event | Spans) -> Iterable[Span]:
    if not isinstance(event, tuple):
        return event.spans(number, step)
    lane, name, layer, start, end, rows, read = event
    experts = 0
    if isinstance(read, Reading):
        experts, rows = read.count(rows), len(rows)
        read = experts * read.expert_bytes
    elif isinstance(read, Counted):
        experts = read.experts
        read = experts * read.expert_bytes
    return [Span(number, lane, name, layer, step, start, end, read, rows, experts)]


recorder = Recorder()
"""The one of this process."""


class Step(NamedTuple):
    """One forward pass; ``parts`` in order of time, dense work among them, leave none of it out, but in a
    stamped one what the host did alone."""

    span: Span
    parts: tuple[Span, ...]


def whole_steps(spans: Iterable[Span], since: int = 0) -> list[Step]:
    """The steps of which no part is missing; ``since``: the number that ``spans`` were asked from.

    A step that is under way is not among them, nor one whose beginning the ring has overwritten.
    """
    parts: dict[int, list[Span]] = {}
    steps: list[Step] = []
    cut: int | None = None
    for place, span in enumerate(spans):
        if place == 0 and span.number > since:
            cut = span.step
        if span.lane != "step":
            parts.setdefault(span.step, []).append(span)
            continue
        own = parts.pop(span.step, [])
        if span.step != cut:
            steps.append(Step(span, tuple(_with_dense(span, own))))
    return steps


def _with_dense(step: Span, parts: list[Span]) -> Iterator[Span]:
    lane: Lane = "gpu" if step.name == "gpu" else "cpu"
    done = step.start
    gaps = step.name != STAMPED
    for part in sorted(parts, key=lambda part: part.start):
        if part.lane == "choice":
            yield part
            continue
        if gaps and part.start > done:
            yield Span(part.number, lane, DENSE, part.layer, step.step, done, part.start, 0, step.tokens)
        yield part
        done = max(done, part.end)
    if gaps and step.end > done:
        yield Span(step.number, lane, DENSE, -1, step.step, done, step.end, 0, step.tokens)


@dataclass(frozen=True, slots=True)
class Summary:
    """Where the time of whole steps went, in seconds. Parts on different lanes may overlap."""

    steps: int
    tokens: int
    seconds: float
    experts_s: float
    dense_s: float
    pcie_s: float
    expert_bytes: int  # of weights that experts read from RAM
    pcie_bytes: int
    disk_s: float = 0.0  # of experts_s, and what embeddings have waited
    disk_bytes: int = 0

    def share(self, seconds: float) -> float:
        return seconds / self.seconds if self.seconds else 0.0

    def line(self) -> str:
        """For a person."""
        if not self.steps:
            return "no whole step was recorded"
        rate = self.expert_bytes / self.experts_s / 1e9 if self.experts_s else 0.0
        moved = f", PCIe {self.share(self.pcie_s):.0%}" if self.pcie_s else ""
        if self.disk_bytes:
            moved += f", {self.disk_bytes / 1e9:.2f} GB from disk"
        return (
            f"{self.steps} steps, {self.seconds / self.steps * 1e3:.1f} ms each: CPU experts "
            f"{self.share(self.experts_s):.0%}, dense {self.share(self.dense_s):.0%}{moved}; experts read "
            f"{self.expert_bytes / 1e9:.2f} GB of RAM at {rate:.1f} GB/s"
        )

    def as_dict(self) -> dict[str, float | int]:
        return {name: getattr(self, name) for name in self.__slots__}


def summarise(steps: Sequence[Step]) -> Summary:
    times = dict.fromkeys((EXPERTS, DENSE, WAIT, "choice", "pcie", "disk"), 0)
    sizes = dict.fromkeys(times, 0)
    for step in steps:
        for part in step.parts:
            kind = _kind(part)
            times[kind] += part.duration
            sizes[kind] += part.nbytes
    return Summary(
        steps=len(steps),
        tokens=sum(step.span.tokens for step in steps),
        seconds=sum(step.span.duration for step in steps) / 1e9,
        experts_s=times[EXPERTS] / 1e9,
        dense_s=times[DENSE] / 1e9,
        pcie_s=times["pcie"] / 1e9,
        expert_bytes=sizes[EXPERTS],
        pcie_bytes=sizes["pcie"],
        disk_s=times["disk"] / 1e9,
        disk_bytes=sizes["disk"],
    )


def _kind(part: Span) -> str:
    if part.lane in ("pcie", "disk", "choice"):
        return part.lane
    if part.lane == "cpu" and part.name in (EXPERTS, DEFERRED):
        return EXPERTS
    return WAIT if part.name in (WAIT, PLAN) else DENSE
