"""Experts of one MoE block of which some are in RAM and all in a file: the disk tier.

Results are those of the same experts all in RAM, to the bit. Steps of up to 16 tokens whose experts fit the
slots run as they would there, by the number of the slot; all others run by groups of experts into one result
an expert and token, which are summed in the order that a whole step sums them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hetero.core import ExpertSpec, HeteroError, InputError, MachineError
from hetero.cpu import CpuExperts, Part
from hetero.formats import Format
from hetero.store.guess import Guesses, GuessStats
from hetero.store.packfile import PackFile
from hetero.store.policy import CacheStats, SlotCache
from hetero.store.reads import IN_FLIGHT, aligned, buffer
from hetero.trace import READ, clock, recorder

# Steps of more tokens choose kernels by the rows of an expert, and sum in an order that all experts set.
EXACT_TOKENS = 16

# A layer is guessed for while more than so much of its last steps missed experts: the router costs time too.
MISSES_MUCH, LAST_STEPS = 0.1, 16


@dataclass(frozen=True, slots=True)
class DiskReads:
    """What a disk tier has read since the start."""

    cache: CacheStats = field(default_factory=CacheStats)
    nbytes: int = 0
    seconds: float = 0.0  # that steps have waited

    def __add__(self, other: DiskReads) -> DiskReads:
        return DiskReads(self.cache + other.cache, self.nbytes + other.nbytes, self.seconds + other.seconds)


@dataclass(frozen=True, slots=True)
class _Read:
    """One expert on its way into a slot."""

    expert: int
    slot: int
    into: memoryview
    futures: list[Future[Any]]
    guessed: bool = False  # ``into`` is of the guesses, and is copied


class DiskExperts:
    """The interface of ``hetero.cpu.CpuExperts`` with ``slots`` experts in RAM at most.

    It takes no weights by ``put``: they are in the file that ``attach`` gives. A fault of the disk raises
    MachineError from the call that met it; the next call tries again. ``layer``: for the trace.
    """

    def __init__(
        self,
        spec: ExpertSpec,
        fmt: Format,
        down_format: Format | None = None,
        *,
        slots: int,
        isa: str = "auto",
        threads: int | None = None,
        numa: str = "off",
        layer: int = -1,
    ) -> None:
        self.spec = spec
        self.layer = layer
        self._cache = SlotCache(spec.num_experts, slots)
        held = replace(spec, num_experts=self._cache.slots)
        self._held = CpuExperts(held, fmt, down_format, isa=isa, threads=threads, numa=numa)
        # Which of them are whole is the cache's to know.
        self._held.filled(range(self._cache.slots))
        self._file: PackFile | None = None
        self._block = 0
        self._lock = threading.Lock()
        self._nbytes = 0
        self._seconds = 0.0
        self._missing = 0.0  # share of the last steps that missed an expert
        self._guesses: Guesses | None = None
        self._taken: dict[int, tuple[memoryview, list[Future[Any]]]] = {}
        self.then: Callable[[], None] | None = None
        """Called once by the next small step, when it has read what it needs and before it computes."""

    def attach(self, file: PackFile, block: int) -> None:
        """Read experts from block ``block`` of ``file``, whose manifest is checked by the caller."""
        self._file, self._block = file, block

    def guess_with(self, guesses: Guesses) -> None:
        """Where experts lie that were read before it was known that they are needed."""
        self._guesses = guesses

    @property
    def guessed(self) -> GuessStats:
        """What was read early, of all layers that guess together."""
        return self._guesses.stats if self._guesses is not None else GuessStats()

    @property
    def misses_much(self) -> bool:
        """Whether so many of the last steps had to wait for the disk that guesses are worth their price."""
        return self._missing > MISSES_MUCH

    def expect(self, experts: Iterable[int]) -> None:
        """The next step will probably use these, the likeliest first: read what is not in RAM, beside it."""
        if self._guesses is not None and self._file is not None:
            slots = self._cache.slot_of()
            absent = [e for e in experts if 0 <= e < self.spec.num_experts and slots[e] < 0]
            self._guesses.begin(self._file, self._block, absent)

    @property
    def path(self) -> Path:
        """The file of the experts."""
        if self._file is None:
            raise HeteroError("experts of the disk tier have no file yet")
        return self._file.path

    @property
    def resident(self) -> CpuExperts:
        """The experts that are in RAM, by slot."""
        return self._held

    @property
    def slots(self) -> int:
        """Experts that RAM has room for."""
        return self._cache.slots

    @property
    def nbytes(self) -> int:
        """Bytes of RAM for packed experts."""
        return self._held.nbytes

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert, packed."""
        return self._held.whole_bytes

    @property
    def stride(self) -> int:
        """Bytes of one expert in a file."""
        return aligned(self.expert_bytes)

    @property
    def disk_nbytes(self) -> int:
        """Bytes of all experts, in the file."""
        return self.spec.num_experts * self.expert_bytes

    @property
    def reads(self) -> DiskReads:
        """Counters since the start; any thread may ask."""
        return DiskReads(self._cache.stats, self._nbytes, self._seconds)

    def put(self, expert: int, part: Part, tensor: Tensor) -> None:
        """Refused: raises InputError."""
        raise InputError(
            f"expert {expert} {part}: experts of the disk tier come from a file of packed experts"
        )

    def missing(self) -> list[tuple[int, Part]]:
        """All parts while there is no file; none after."""
        if self._file is not None:
            return []
        return [(expert, "up") for expert in range(self.spec.num_experts)]

    def forward(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """As ``CpuExperts.forward``."""
        with self._lock:
            wanted = self._wanted(ids)
            then, self.then = self.then, None
            if len(ids) <= EXACT_TOKENS and len(wanted) <= self._cache.slots:
                for _ in self._groups(wanted):
                    if then is not None:
                        then()
                    return self._held.forward(x, self._slots_of(ids, wanted), weights)
            results = torch.empty(*ids.shape, self.spec.hidden)
            for group in self._groups(wanted):
                self._held.pairs(x, self._slots_of(ids, group), results)
            return self._held.weighted_sum(results, ids, weights, self.spec.num_experts)

    def gate_up(self, x: Tensor, ids: Tensor) -> Tensor:
        """As ``CpuExperts.gate_up``."""
        return self._by_groups(x, ids, self._held.gate_up)

    def down(self, h: Tensor, ids: Tensor) -> Tensor:
        """As ``CpuExperts.down``."""
        return self._by_groups(h, ids, self._held.down)

    def _by_groups(self, x: Tensor, ids: Tensor, call: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        with self._lock:
            out: Tensor | None = None
            for group in self._groups(self._wanted(ids)):
                mine = self._slots_of(ids, group)
                part = call(x, mine)
                out = part if out is None else torch.where((mine >= 0).unsqueeze(-1), part, out)
            return out if out is not None else call(x, torch.full_like(ids, -1))

    def _wanted(self, ids: Tensor) -> list[int]:
        """The distinct experts of a step."""
        found: list[int] = torch.unique(ids).tolist()
        return [expert for expert in found if 0 <= expert < self.spec.num_experts]

    def _slots_of(self, ids: Tensor, group: Sequence[int]) -> Tensor:
        """ids with the slots of ``group`` in place of experts, -1 for all others."""
        slots = torch.full((self.spec.num_experts + 1,), -1, dtype=torch.int64)
        slots[list(group)] = torch.from_numpy(self._cache.slot_of())[list(group)]
        inside = (ids >= 0) & (ids < self.spec.num_experts)
        return slots[torch.where(inside, ids.long(), self.spec.num_experts)]

    def _groups(self, wanted: list[int]) -> Iterator[list[int]]:
        """``wanted`` in groups that are in RAM while the caller works on them. The next group is read
        meanwhile, where there are slots for both."""
        self._cache.touch(wanted)
        here, absent = self._cache.lookup(wanted)
        self._missing += ((1.0 if absent else 0.0) - self._missing) / LAST_STEPS
        if self._guesses is not None:
            for into, futures in self._taken.values():  # of a step that failed before it came to them
                self._guesses.drop(into, futures)
            self._taken = self._guesses.take(self._block, absent)
        if len(wanted) <= self._cache.slots:
            self._finish(self._start(absent, pinned=here))
            if wanted:
                yield wanted
            return
        size = max(1, self._cache.slots // 2)
        groups = [here, *(absent[at : at + size] for at in range(0, len(absent), size))]
        reads: list[_Read] = []
        try:
            for place, group in enumerate(groups):
                self._finish(reads)
                following = groups[place + 1] if place + 1 < len(groups) else []
                early = self._cache.room(pinned=group) >= len(following)
                reads = self._start(following, pinned=group) if early else []
                if group:
                    yield group
                if not early:
                    reads = self._start(following)
            reads = []
        finally:
            self._abandon(reads)

    def _start(self, experts: Sequence[int], pinned: Sequence[int] = ()) -> list[_Read]:
        """Begin to read experts into slots of their own."""
        if not experts:
            return []
        if self._file is None:
            raise HeteroError("experts of the disk tier have no file yet")
        reads: list[_Read] = []
        admitted = self._cache.admit(experts, pinned)
        try:
            for one in admitted:
                if one.item in self._taken:
                    reads.append(_Read(one.item, one.slot, *self._taken.pop(one.item), guessed=True))
                    continue
                view = self._held.view(one.slot)
                into = view if view is not None else buffer(self._held.whole_bytes)
                reads.append(_Read(one.item, one.slot, into, self._file.start(self._block, one.item, into)))
        except BaseException:
            self._abandon(reads)
            self._cache.drop(one.item for one in admitted)
            raise
        return reads

    def _finish(self, reads: list[_Read]) -> None:
        """Wait for experts. What cannot be read loses its slot; then raises MachineError of the first."""
        if not reads:
            return
        assert self._file is not None
        began = clock()
        failed: MachineError | None = None
        size = 0
        for read in reads:
            try:
                self._file.finish(self._block, read.expert, read.into, read.futures)
            except MachineError as error:
                self._cache.drop([read.expert])
                self._returned(read)
                failed = failed or error
                continue
            except BaseException:  # an interrupt: nobody knows what has come
                self._abandon(reads)
                raise
            size += self._file.manifest.blocks[self._block].stride
            if read.guessed or self._held.view(read.slot) is None:
                self._held.restore(read.slot, read.into)
            self._returned(read)
        self._nbytes += size
        self._seconds += (clock() - began) / 1e9
        if recorder.active:
            recorder.add(("disk", READ, self.layer, began, clock(), len(reads), size))
        if failed is not None:
            raise failed

    def _abandon(self, reads: list[_Read]) -> None:
        """Something else has failed: slots may be used again only when no read writes to them any more."""
        for read in reads:
            for future in read.futures:
                future.exception()
            self._cache.drop([read.expert])
            self._returned(read)

    def _returned(self, read: _Read) -> None:
        """A buffer of the guesses is free again."""
        if read.guessed and self._guesses is not None:
            self._guesses.give_back(read.into)


def disk_speed(file: PackFile, seconds: float = 0.25) -> float:
    """Bytes a second that reading experts from ``file`` gives, measured now for about ``seconds``.

    Raises MachineError where they cannot be read.
    """
    blocks = file.manifest.blocks
    buffers = [buffer(max(block.stride for block in blocks)) for _ in range(IN_FLIGHT)]
    began, done, place = time.perf_counter(), 0, 0
    while True:
        block = place % len(blocks)
        experts, stride = blocks[block].experts, blocks[block].stride
        # Far from each other, as experts of a step are.
        chosen = {(place * IN_FLIGHT + i * 13) % experts for i in range(IN_FLIGHT)}
        views = [(expert, into[:stride]) for expert, into in zip(chosen, buffers, strict=False)]
        reads = [(expert, into, file.start(block, expert, into)) for expert, into in views]
        for expert, into, futures in reads:
            file.finish(block, expert, into, futures)
        done += stride * len(reads)
        place += 1
        spent = time.perf_counter() - began
        if spent >= seconds or place == 4096:
            return done / spent
