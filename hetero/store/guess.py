"""Experts read before they are known to be needed, while the disk has nothing else to do.

A guess is of the next layer's experts, by its own router from this layer's input. It takes no slot: what is
read lies in buffers of its own until the next layer's step takes it or says that it was wrong.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from hetero.store.packfile import PackFile
from hetero.store.reads import buffer

BUFFERS = 4
"""Guesses at once, all layers together; fewer where they would take more than BYTES, but one."""

BYTES = 32 << 20

FLYING = 2
"""Of these being read: what is known to be needed waits behind them."""


@dataclass(frozen=True, slots=True)
class GuessStats:
    """Since the start, in experts."""

    read: int = 0  # begun to be read
    used: int = 0  # of these, needed by the step that they were read for


class Guesses:
    """The guesses of all layers of a model, which run one after the other. Any thread may call."""

    def __init__(self, stride: int) -> None:
        """``stride``: bytes of the largest expert of any layer."""
        self._lock = threading.Lock()
        self._stride = stride
        self._most = max(1, min(BUFFERS, BYTES // stride))
        self._free: list[memoryview] = []
        self._made = 0
        self._waiting: deque[tuple[int, int, Callable[[memoryview], list[Future[Any]]]]] = deque()
        self._flying: dict[tuple[int, int], tuple[memoryview, list[Future[Any]]]] = {}
        self._read = self._used = 0

    @property
    def stats(self) -> GuessStats:
        return GuessStats(self._read, self._used)

    def begin(self, file: PackFile, block: int, experts: Sequence[int]) -> None:
        """Read experts of a block, the likeliest first, as far as there are buffers."""
        with self._lock:
            for expert in experts[: self._most]:
                if (block, expert) not in self._flying:
                    self._waiting.append((block, expert, _read(file, block, expert)))
        self._go_on()

    def take(self, block: int, experts: Sequence[int]) -> dict[int, tuple[memoryview, list[Future[Any]]]]:
        """Those of ``experts`` that have been read or are on their way, by expert; ``give_back`` each buffer
        when it has been copied. All other guesses end here."""
        with self._lock:
            self._waiting.clear()
            taken = {e: self._flying.pop((block, e)) for e in experts if (block, e) in self._flying}
            wrong = list(self._flying.values())
            self._flying.clear()
            self._used += len(taken)
        for into, reads in wrong:
            self.drop(into, reads)
        return taken

    def give_back(self, into: memoryview) -> None:
        with self._lock:
            self._free.append(into)

    def _go_on(self, _: Future[Any] | None = None) -> None:
        """Start what waits, as far as FLYING and the buffers allow."""
        while True:
            with self._lock:
                running = sum(1 for _, reads in self._flying.values() if not all(r.done() for r in reads))
                if not self._waiting or running >= FLYING:
                    return
                into = self._buffer()
                if into is None:
                    return
                block, expert, start = self._waiting.popleft()
                try:
                    reads = start(into)
                except RuntimeError:  # the process is ending
                    self._free.append(into)
                    return
                self._flying[block, expert] = into, reads
                self._read += 1
            reads[-1].add_done_callback(self._go_on)

    def _buffer(self) -> memoryview | None:
        if self._free:
            return self._free.pop()
        if self._made == self._most:
            return None
        self._made += 1
        return buffer(self._stride)

    def drop(self, into: memoryview, reads: list[Future[Any]]) -> None:
        """Give a buffer that was taken back when nothing is written to it any more."""
        left = [len(reads)]

        def ended(_: Future[Any]) -> None:
            with self._lock:
                left[0] -= 1
                if left[0] == 0:
                    self._free.append(into)

        for read in reads:
            read.cancel()
            read.add_done_callback(ended)


def _read(file: PackFile, block: int, expert: int) -> Callable[[memoryview], list[Future[Any]]]:
    size = file.manifest.blocks[block].stride
    return lambda into: file.start(block, expert, into[:size])
