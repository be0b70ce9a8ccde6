"""How the experts that are not in GPU memory are best split in a step: by what both sides take, measured.

Each side reads while the other does, as in a step. What is measured for some numbers of rows: the CPU's
kernels on all experts that such a step chooses at random and on half of them, which tells what each further
expert takes and what all take besides; the GPU's copies out of host memory; and its own kernels on experts
that are there already.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hetero.cpu import CpuExperts
from hetero.ops.gpu.cache import ExpertCache
from hetero.ops.gpu.hybrid_shared import SIZES, Sides
from hetero.ops.gpu.launch import ExpertLaunch
from hetero.ops.gpu.pinned import PinnedArena

_LAYERS = 12  # whose experts are read, so that caches hold none of them
_ROUNDS = 8  # of each number of rows
_COPIED = 24  # experts of one copy beside the CPU
_CALLS = 16  # of the GPU's kernels in a graph

FLAGS_S = 5e-6
"""Of a layer, until the other side sees a flag (docs/perf.md, "Hand-off")."""

LONGEST_LEAD_S = 10e-6
"""Up to which a lead is believed: threads that a call wakes are awake in a step, where the lead is 7 to 10 us
(fitted to the CPU's times of steps with few and many experts on two hosts of 14 threads, docs/perf.md)."""


class Rates(NamedTuple):
    """Bytes of experts a second in a step of one row: by the CPU's own kernels, and over the bus by the
    GPU's, both at once."""

    cpu: float
    bus: float

    @property
    def share(self) -> float:
        """Of the experts, that the GPU takes if both begin and end together."""
        return self.bus / (self.bus + self.cpu)


@dataclass(frozen=True, slots=True)
class Measured:
    """``sides``: of steps of each of ``hybrid_shared.SIZES`` rows; ``rates``: of one row."""

    sides: list[Sides]
    rates: Rates


class Draw(NamedTuple):
    """A step's choices: x; all ids, ids of half as many experts, none; weights; distinct experts of the first
    two."""

    x: Tensor
    ids: tuple[Tensor, Tensor, Tensor]
    weights: Tensor
    counts: tuple[int, int]


def draw(experts: CpuExperts, rows: int, generator: torch.Generator) -> Draw:
    """Any experts are as likely; the half are others than all, as far as there are so many: what was just
    read lies in the processor's caches."""
    spec = experts.spec
    scores = torch.rand(rows, spec.num_experts, generator=generator)
    every = scores.topk(spec.top_k).indices
    named = torch.bincount(every.flatten()).nonzero().flatten()
    scores[:, named] -= 1.0
    others = scores.topk(spec.top_k).indices
    rest = torch.bincount(others.flatten()).nonzero().flatten()
    some = rest[torch.randperm(len(rest), generator=generator)[: -(-len(named) // 2)]]
    half = torch.where(torch.isin(others, some), others, -1)
    weights = torch.full(every.shape, 1.0 / spec.top_k)
    x = torch.randn(rows, spec.hidden, generator=generator).bfloat16()
    return Draw(x, (every, half, torch.full_like(every, -1)), weights, (len(named), len(some)))


class Bus:
    """Copies of experts from host memory as a step makes them, on a stream of its own."""

    def __init__(self, arenas: Sequence[PinnedArena], device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        host = [arena.view for arena in arenas[:: max(1, len(arenas) // _LAYERS)]]
        self._cache = ExpertCache(host[0], 0, device)
        count, stride = min(_COPIED, len(host[0])), host[0].shape[1]
        self.room = torch.empty(count, stride, dtype=torch.uint8, device=device)
        at = self.room.data_ptr()
        # The last word keeps all of them at multiples of 16 bytes: others would be read by a kernel of their
        # own, which would be compiled while copies are timed.
        lists = [
            [count, *(n for e in range(count) for n in (one[e].data_ptr(), at + e * stride)), 0]
            for one in host
        ]
        self._lists = torch.tensor(lists, device=device)
        self._events: list[Any] = []
        self._copy(0)
        torch.cuda.synchronize(device)  # compiled

    def _copy(self, number: int) -> None:
        coming = self._lists[number % len(self._lists)]
        self._cache.bring(coming)

    def begin(self, copies: int) -> None:
        with torch.cuda.stream(self._stream):
            self._events = [self._stream.record_event(_timer())]
            for number in range(copies):
                self._copy(number)
            self._events.append(self._stream.record_event(_timer()))
        self._copies = copies

    def busy(self) -> bool:
        return not self._events[1].query()

    def seconds(self) -> float:
        """Of an expert, once all copies are through."""
        self._events[1].synchronize()
        return float(self._events[0].elapsed_time(self._events[1])) * 1e-3 / (self._copies * len(self.room))


def measure(
    experts: Sequence[CpuExperts], arenas: Sequence[PinnedArena], device: torch.device, rows: int = SIZES[-1]
) -> Measured:
    """Up to a third of a second, on weights of many layers. ``rows``: most of a step; steps of more get what
    the largest measured ones have."""
    bus = Bus(arenas, device)
    own = _own_seconds(experts[0], bus.room, device)
    sides: list[Sides] = []
    for size in SIZES:
        if sides and size >= 2 * rows:
            sides.append(sides[-1])
            continue
        seconds: list[float] = []

        def run(timed: Callable[[], bool], seconds: list[float] = seconds) -> None:
            bus.begin(20)
            while timed() and bus.busy():
                pass  # what is timed after the copies have ended waits for more of them
            seconds.append(bus.seconds())

        cpu, lead = cpu_seconds(experts, size, run)
        sides.append(Sides(cpu, statistics.median(seconds), lead + FLAGS_S, own))
    nbytes = experts[0].whole_bytes
    return Measured(sides, Rates(nbytes / sides[0].cpu, nbytes / sides[0].pcie))


def cpu_seconds(
    experts: Sequence[CpuExperts], rows: int, run: Callable[[Callable[[], bool]], None]
) -> tuple[float, float]:
    """(of each further expert, of all besides) in a step of so many rows on the CPU. ``run`` is given what
    times one step and tells whether there is one more, and calls it while the other side reads as well."""
    generator = torch.Generator().manual_seed(rows)
    chosen = list(experts)[:: max(1, len(experts) // _LAYERS)]
    some = (chosen * _ROUNDS)[:_ROUNDS]
    drawn = [(one, draw(one, rows, generator)) for one in some]
    out = torch.empty(rows, chosen[0].spec.hidden)
    times: list[tuple[float, float, float]] = []

    def timed() -> bool:
        one, step = drawn[len(times)]
        took = []
        for ids in step.ids:
            began = time.perf_counter()
            one.forward(step.x, ids, step.weights, out)
            took.append(time.perf_counter() - began)
        times.append((took[0], took[1], took[2]))
        return len(times) < len(drawn)

    while len(times) < len(drawn):
        run(timed)
    counts = [step.counts for _, step in drawn]
    pairs = list(zip(times, counts, strict=True))
    more = [(t[0] - t[1]) / (n[0] - n[1]) for t, n in pairs if n[0] > n[1]]
    each = statistics.median(more) if more else 0.0
    if each <= 0.0:  # one expert a step, or a machine with other work
        each = statistics.median((t[0] - t[2]) / n[0] for t, n in pairs)
    lead = statistics.median(t[1] - t[2] - n[1] * each for t, n in pairs)
    return max(each, 1e-9), min(max(lead, 0.0), LONGEST_LEAD_S)


def _own_seconds(experts: CpuExperts, room: Tensor, device: torch.device) -> float:
    """Of the GPU's kernels on a token's experts that lie in its memory, in a graph."""
    spec = experts.spec
    launch = ExpertLaunch(spec, experts.format, device, experts.down_format)
    x = launch.rows(torch.zeros(1, spec.hidden, dtype=torch.bfloat16, device=device))
    at = torch.arange(spec.top_k, device=device) % len(room) * room.shape[1] + room.data_ptr()
    weights = torch.zeros(1, spec.top_k, device=device)
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        launch.few(room, x, at.view(1, -1), weights)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            for _ in range(_CALLS):
                launch.few(room, x, at.view(1, -1), weights)
        graph.replay()
        begin = stream.record_event(_timer())
        graph.replay()
        end = stream.record_event(_timer())
        end.synchronize()
    return float(begin.elapsed_time(end)) * 1e-3 / _CALLS


def _timer() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
