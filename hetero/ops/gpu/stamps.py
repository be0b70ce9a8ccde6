"""When a GPU did what, by the GPU's own clock: also inside a captured graph, of which the host sees nothing.

Operators say ``lap(name)`` behind a piece of work. Without a tape that runs, as in every graph that
is captured untraced, this reads one variable and does nothing. With one it puts a kernel of one thread into
the current stream that writes the device's time, about a microsecond each, and the graph that is captured
holds these kernels from then on::

    stamps = Stamps(device)
    tape = stamps.tape()
    with tape.recording():              # each eager step, or once, around what is captured
        start()
        ...                             # laps
        tape.seal()
    tape.begin(); graph.replay(); ...   # each step
    tape.tell(rows)                     # once the stream is through with it: into the recorder

Times become the recorder's by an alignment of both clocks, read from time to time and at the recording's
end. On a CPU the same calls take the host's time at once.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_uint64
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from hetero.alignment import Alignment, Bracket, meet
from hetero.hw.cuda_driver import driver
from hetero.trace import HITS, IN_PLACE, MOVE, PREFILL, Lane, Span, clock, recorder

log = logging.getLogger("hetero.trace")

PTX = """
.version 6.3
.target sm_70
.address_size 64

.visible .entry hetero_stamp(.param .u64 to, .param .u64 counts)
{
  .reg .pred %p;
  .reg .u64 %to, %counts, %now, %a, %b, %c;
  ld.param.u64 %to, [to];
  ld.param.u64 %counts, [counts];
  mov.u64 %now, %globaltimer;
  st.global.u64 [%to], %now;
  setp.eq.u64 %p, %counts, 0;
  @%p bra END;
  ld.global.u64 %a, [%counts];
  ld.global.u64 %b, [%counts+8];
  ld.global.u64 %c, [%counts+16];
  st.global.u64 [%to+8], %a;
  st.global.u64 [%to+16], %b;
  st.global.u64 [%to+24], %c;
END:
  ret;
}
"""

CAPACITY = 1 << 14
"""Stamps of a tape: 32 bytes each, on the device and in pinned memory. A chunk of a prompt that streams the
experts of 100 layers has less than half as many."""

_WORDS = 4  # of a stamp: time, and three counters
_READINGS = 32  # of both clocks at once
_AGAIN_NS = 2_000_000_000  # the host's clock may be slewed; so the clocks are compared as often as that


class Lap(NamedTuple):
    """A piece of work between two stamps, as it was recorded."""

    lane: Lane
    name: str
    layer: int
    begin: int
    end: int
    nbytes: int = 0
    counts: Tensor | None = None
    expert_bytes: int = 0
    in_place: bool = False  # experts that were read from host memory are part of it
    tokens: int | None = None  # None: of the step
    details: tuple[tuple[str, str | float], ...] = ()


class Stamps:
    """The clock of one device, and the counters of its tapes. Not for two threads at once."""

    def __init__(self, device: torch.device | str) -> None:
        """Raises MachineError where the driver does not take the kernel."""
        self.device = torch.device(device)
        self.alignment = Alignment()
        self._counted: dict[int, list[int]] = {}  # address of counters -> their values after the last step
        self._read_at = 0
        recorder.at_end(self.end)
        if self.device.type != "cuda":
            return
        with torch.cuda.device(self.device):
            self._own = torch.zeros(_WORDS, dtype=torch.int64, device=self.device)
            self._index = torch.cuda.current_device()
            self._kernel = driver().function(driver().load_module(PTX), "hetero_stamp")
            self.stamp(self._own.data_ptr(), 0)  # loaded at its first launch, which no capture would survive
            torch.cuda.synchronize()
            self._side = torch.cuda.Stream(self._index)  # type: ignore[no-untyped-call]

    def end(self) -> None:
        """Nobody watches any more: a last comparison of the clocks; counters go on unseen."""
        self._counted.clear()
        try:
            self.read()
        except RuntimeError as error:  # of a device that has failed, which others tell
            log.warning("the clock of %s is not compared any more: %s", self.device, error)

    def tape(self, capacity: int = CAPACITY) -> Tape:
        return Tape(self, capacity)

    def stamp(self, to: int, counts: int) -> None:
        """Into the current stream: the time, and three counters where there are any, to device addresses."""
        stream = int(torch.cuda.current_stream(self._index).cuda_stream)
        driver().launch(self._kernel, 1, 1, stream, [c_uint64(to), c_uint64(counts)])

    def read(self) -> None:
        """Compare the clocks, on a stream of its own; waits for some dozen empty kernels."""
        if self.device.type != "cuda":
            return
        brackets: list[Bracket] = []
        with torch.cuda.device(self._index), torch.cuda.stream(self._side):
            for _ in range(_READINGS):
                before = clock()
                self.stamp(self._own.data_ptr(), 0)
                self._side.synchronize()
                after = clock()
                brackets.append(Bracket(before, int(self._own[0].item()), after))
        reading, last = meet(brackets), self.alignment.last
        if last is None or reading.at > last.at:
            self.alignment.add(reading)
        self._read_at = clock()

    def read_again(self) -> None:
        """Compare them if that was long ago."""
        if clock() - self._read_at > _AGAIN_NS:
            self.read()

    def host(self, at: int) -> int:
        """A stamp as a time of ``trace.clock``."""
        return self.alignment.near(at) if self.device.type == "cuda" else at

    def prime(self, counts: Tensor) -> None:
        """Know what counters int64 [3] say before the first step that counts them; waits for the device."""
        if counts.data_ptr() not in self._counted:
            self._counted[counts.data_ptr()] = counts.tolist()

    def since_last(self, counts: Tensor, now: list[int]) -> list[int]:
        """What was counted since the last step."""
        last = self._counted.get(counts.data_ptr(), now)
        self._counted[counts.data_ptr()] = now
        return [new - old for new, old in zip(now, last, strict=True)]


class Tape:
    """The stamps of one graph, or of one eager step after the other."""

    def __init__(self, stamps: Stamps, capacity: int) -> None:
        self.stamps = stamps
        cuda = stamps.device.type == "cuda"
        self._device = torch.zeros(capacity, _WORDS, dtype=torch.int64, device=stamps.device)
        self._host = torch.zeros(capacity, _WORDS, dtype=torch.int64, pin_memory=cuda)
        self.laps: list[Lap] = []
        self._last: dict[int, int] = {}  # stream -> its last stamp
        self.layer = -1  # that is at work
        self.is_full = False
        self._used = 0

    @contextmanager
    def recording(self) -> Iterator[Tape]:
        """Laps within it are of this tape, whose earlier ones are forgotten. Not within a capture."""
        global _running  # noqa: PLW0603 - operators deep in a model ask for it
        before, _running = _running, self
        self.laps, self._last, self._used, self.layer = [], {}, 0, -1
        self._device.zero_()
        try:
            yield self
        finally:
            _running = before

    def mark(self, counts: Tensor | None = None) -> int:
        """A stamp into the current stream. Returns its number; -1 when the tape is full."""
        at = self._used
        if at == len(self._device):
            if not self.is_full:
                log.warning("a step of more than %d stamps: the trace lacks what follows in it", at)
            self.is_full = True
            return -1
        self._used += 1
        if self.stamps.device.type == "cuda":
            self.stamps.stamp(self._device[at].data_ptr(), 0 if counts is None else counts.data_ptr())
        else:
            self._device[at, 0] = clock()
            if counts is not None:
                self._device[at, 1:] = counts
        self._last[self._stream()] = at
        return at

    def lap(
        self,
        lane: Lane,
        name: str,
        nbytes: int = 0,
        *,
        counts: Tensor | None = None,
        expert_bytes: int = 0,
        in_place: bool = False,
    ) -> None:
        """A stamp into the current stream, and what it has done since its last one."""
        begin = self._last.get(self._stream())
        end = self.mark(counts)
        if begin is not None and end >= 0:
            self.laps.append(Lap(lane, name, self.layer, begin, end, nbytes, counts, expert_bytes, in_place))

    def here(self) -> int:
        """The last stamp of the current stream, or one that is put there."""
        last = self._last.get(self._stream())
        return self.mark() if last is None else last

    def _stream(self) -> int:
        if self.stamps.device.type != "cuda":
            return 0
        return int(torch.cuda.current_stream(self.stamps.device).cuda_stream)

    def seal(self) -> None:
        """Into the current stream, behind the last lap of every stream: the stamps go to the host."""
        self._host[: self._used].copy_(self._device[: self._used], non_blocking=True)

    def begin(self) -> None:
        """A step that was recorded follows."""
        self.stamps.read_again()
        for lap in self.laps:
            if lap.counts is not None:
                self.stamps.prime(lap.counts)

    def tell(self, tokens: int) -> None:
        """The stream is through with a step: its laps go into the recorder, as parts of the step that is
        under way there."""
        if not recorder.active or not self.laps:
            return
        taken: list[list[int]] = self._host[: self._used].tolist()
        counts = {
            lap.end: self.stamps.since_last(lap.counts, taken[lap.end][1:])
            for lap in self.laps
            if lap.counts is not None
        }
        recorder.add(Told(self.stamps, self.laps, [one[0] for one in taken], counts, tokens))


@dataclass(frozen=True, slots=True)
class Told:
    """The laps of one step, made spans when somebody reads them: the clocks are compared until the end."""

    stamps: Stamps
    laps: list[Lap]
    times: list[int]
    counts: dict[int, list[int]]
    tokens: int

    def spans(self, number: int, step: int) -> Iterator[Span]:
        for lap in self.laps:
            if not self.times[lap.begin] or not self.times[lap.end]:
                continue  # of a stream that nobody has waited for
            start, end = self.stamps.host(self.times[lap.begin]), self.stamps.host(self.times[lap.end])
            nbytes, experts = lap.nbytes, 0
            if lap.end in self.counts:
                experts, in_place, moved = self.counts[lap.end]
                if lap.name == MOVE:
                    experts = moved
                nbytes += experts * lap.expert_bytes
                if in_place and lap.in_place:
                    size = in_place * lap.expert_bytes
                    yield Span(
                        number, "pcie", IN_PLACE, lap.layer, step, start, end, size, self.tokens, in_place
                    )
            tokens = self.tokens if lap.tokens is None else lap.tokens
            yield Span(
                number, lap.lane, lap.name, lap.layer, step, start, end, nbytes, tokens, experts, lap.details
            )


_running: Tape | None = None


def running() -> bool:
    """Whether laps are recorded now."""
    return _running is not None


def start() -> None:
    """What the current stream does from here on belongs to its next lap. A stream's first lap needs it."""
    if _running is not None:
        _running.mark()


def at_layer(number: int) -> None:
    """Laps from here on are of this layer of the model; -1: of none."""
    if _running is not None:
        _running.layer = number


def layer_now(otherwise: int) -> int:
    """The layer that laps are of, or ``otherwise`` without a tape."""
    return otherwise if _running is None else _running.layer


def lap(name: str, *, lane: Lane = "gpu", nbytes: int = 0) -> None:
    """What the current stream has done since its last lap was ``name``; ``nbytes``: that it moved or read."""
    if _running is not None:
        _running.lap(lane, name, nbytes)


def lap_experts(counts: Tensor, expert_bytes: int, *, in_place: bool = True) -> None:
    """What the current stream has done since its last lap were the GPU's own experts of a layer. ``counts``
    int64 [3], as of ``ExpertCache``: experts found in GPU memory, read from host memory, left to the CPU,
    since the start and up to this step's look-up. ``in_place``: those read were read by it, in this time."""
    if _running is not None:
        _running.lap("gpu", HITS, counts=counts, expert_bytes=expert_bytes, in_place=in_place)


def lap_reads(counts: Tensor, expert_bytes: int) -> None:
    """What the current stream has done since its last lap was to read experts from host memory that a step
    computes. ``counts`` int64 [3]: the first counts them, since the start."""
    if _running is not None:
        _running.lap("pcie", IN_PLACE, counts=counts, expert_bytes=expert_bytes)


def lap_moves(counts: Tensor, expert_bytes: int) -> None:
    """What the current stream has done since its last lap was to bring experts into GPU memory. ``counts``
    int64 [3]: the last counts them, since the start."""
    if _running is not None:
        _running.lap("pcie", MOVE, counts=counts, expert_bytes=expert_bytes)


def here() -> int:
    """The last lap's end on the current stream, or now, for ``chosen``; -1 without a tape."""
    return -1 if _running is None else _running.here()


def chosen(since: int, strategy: str, tokens: int, expected_s: float) -> None:
    """The experts of a layer were computed for so many tokens of a prompt between ``here()`` and now, in this
    way; ``expected_s``: what a model of costs had said, in seconds."""
    if _running is not None and since >= 0:
        details = (("strategy", strategy), ("expected_us", round(expected_s * 1e6, 1)))
        now, layer = _running.mark(), _running.layer
        if now >= 0:
            _running.laps.append(Lap("choice", PREFILL, layer, since, now, tokens=tokens, details=details))
