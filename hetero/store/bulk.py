"""Whole blocks of a file of packed experts on their way into memory, by threads of the extension.

Those do not wait for the interpreter, so that a model can be built meanwhile. Experts whose placement cuts or
copies them are read expert by expert, and handed over.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hetero.core import MachineError
from hetero.cpu import Arena, BulkRead, CpuExperts, checksum
from hetero.store.manifest import Block
from hetero.store.reads import IN_FLIGHT, PIECE, DirectFile, buffer, explain, settle, submit

_ERRNO, _ENDS, _DAMAGED = 1, 2, 3  # kinds of cpu_ext/bulk.h
_WAIT_S = 0.1  # at most without the interpreter, which sees Ctrl-C


class DamagedError(MachineError):
    """Experts whose bytes are not those that were written."""


def damaged(path: Path, expert: int, block: Block) -> DamagedError:
    """What is said of an expert whose checksum differs."""
    return DamagedError(
        f"{path}: expert {expert} of {block.name} is damaged (its checksum differs); "
        "'hetero pack --force' writes the file anew"
    )


def compare(path: Path, expert: int, block: Block, wanted: int, data: memoryview) -> None:
    """Raises DamagedError where the checksum of an expert's bytes, at the beginning of ``data``, is not
    ``wanted``."""
    if checksum(data[: block.expert_bytes]) != wanted:
        raise damaged(path, expert, block)


@dataclass(frozen=True, slots=True)
class BlockPlace:
    """Where a block stands in its file, and the checksums of its experts."""

    block: Block
    offset: int
    sums: list[int]


class BlockReads:
    """Blocks that are being read, from the moment of its making on; ``finish`` each, or ``stop``."""

    def __init__(
        self, file: DirectFile, places: Mapping[int, BlockPlace], into: Mapping[int, CpuExperts | Arena]
    ) -> None:
        """Begin to read the blocks of ``into``, by number, in its order. ``file`` must stay open until all
        are finished, or ``stop``. Raises MachineError where the system gives no threads."""
        self._file = file
        self._places = places
        self._pieces: dict[int, list[Future[None]]] = {}
        self._order: dict[int, int] = {}
        self._done = 0
        self._counting = threading.Lock()
        blocks: list[tuple[int, int, int, list[int], Arena]] = []
        for number, target in into.items():
            place, arena = places[number], target if isinstance(target, Arena) else target.arena
            if arena is not None:
                self._order[number] = len(blocks)
                blocks.append((place.offset, place.block.stride, place.block.expert_bytes, place.sums, arena))
        try:
            self._native = BulkRead(*file.descriptors, blocks, IN_FLIGHT)
        except RuntimeError as error:  # of std::thread
            raise MachineError(f"{file.path}: no thread to read it: {error}") from None
        for number, target in into.items():
            if number not in self._order and not isinstance(target, Arena):
                self._pieces[number] = [
                    submit(self._piece, places[number], target, expert)
                    for expert in range(places[number].block.experts)
                ]

    @property
    def nbytes(self) -> int:
        """Bytes that have been read."""
        return self._native.read_bytes + self._done

    @property
    def taken(self) -> int:
        """Bytes of memory that have been taken from the system for it, or soon will be."""
        return self._native.taken_bytes

    def finish(self, number: int, experts: CpuExperts) -> None:
        """Wait for a block; its experts then count as put. Raises MachineError for what is wrong; no expert
        counts then."""
        path, block = self._file.path, self._places[number].block
        try:
            if number in self._order:
                while (found := self._native.wait(self._order[number], _WAIT_S)) is None:
                    pass
                kind, value = found
                if kind == _ERRNO:
                    raise OSError(value, os.strerror(value))
                if kind == _ENDS:
                    raise EOFError(f"{path}: ends at byte {value}")
                if kind == _DAMAGED:
                    raise damaged(path, value, block)
            else:
                settle(self._pieces[number])  # which stay known: whoever is interrupted here calls ``stop``
        except (OSError, EOFError) as error:
            raise explain(path, block.name, error) from None
        experts.filled(range(block.experts))

    def stop(self) -> None:
        """What has not been read does not come any more, and nothing is written after it. Once more is no
        harm."""
        self._native.stop()
        left = [piece for pieces in self._pieces.values() for piece in pieces]
        self._pieces.clear()
        wait([piece for piece in left if not piece.cancel()])

    def _piece(self, place: BlockPlace, experts: CpuExperts, expert: int) -> None:
        stride, into = place.block.stride, buffer(place.block.stride)
        for at in range(0, stride, PIECE):
            self._file.read(place.offset + expert * stride + at, into[at : min(at + PIECE, stride)])
        compare(self._file.path, expert, place.block, place.sums[expert], into)
        experts.restore(expert, into)
        with self._counting:
            self._done += stride


class EarlyReads:
    """All of a file on its way into memory that experts may take over, before it is known that they do."""

    def __init__(self, file: Any) -> None:
        """``file``: a PackFile, which is closed by ``drop``, and where this fails. Raises MemoryError where
        the system refuses memory, MachineError where it gives no threads."""
        self.file = file
        try:
            self.arenas = [Arena(block.nbytes) for block in file.manifest.blocks]
            self._reads: BlockReads | None = file.read_blocks(dict(enumerate(self.arenas)))
        except BaseException:
            file.close()
            raise

    @property
    def taken(self) -> int:
        """Bytes of memory that it holds."""
        return 0 if self._reads is None else self._reads.taken

    def take(self, experts: Mapping[int, CpuExperts]) -> BlockReads | None:
        """The reads, where they go into the memory of exactly these experts, by block; else None."""
        where = {number: arena.address for number, arena in enumerate(self.arenas)}
        found = {number: None if one.arena is None else one.arena.address for number, one in experts.items()}
        return self._reads if found == where else None

    def drop(self) -> None:
        """End what is still being read, and let the memory go that nobody has taken. Once more is no harm."""
        if self._reads is not None:
            self._reads.stop()
            self._reads = None
            self.arenas.clear()
            with contextlib.suppress(OSError):
                self.file.close()
