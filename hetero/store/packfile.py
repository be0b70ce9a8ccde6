"""One file of packed experts: written once under another name, renamed when whole, checked as it is read.

Layout: 40 bytes (magic, version, offset of the experts, length and checksum of the JSON), the manifest as
JSON, for each block a row of 64-bit numbers (a checksum an expert, then one of the row), then the experts at
multiples of 4096 bytes, block after block, each whole, in the layout of cpu_ext/kernels.h. A row is written
when its block is: what a killed process leaves is known block by block, and the next one goes on from there.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import struct
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from hetero.core import MachineError
from hetero.cpu import Arena, CpuExperts, checksum
from hetero.hw.memory import gib
from hetero.store.bulk import BlockPlace, BlockReads, DamagedError, compare
from hetero.store.manifest import Manifest
from hetero.store.reads import PIECE, DirectFile, aligned, buffer, explain, settle, submit

MAGIC = b"HETPACK\0"
VERSION = 1
_HEAD = struct.Struct("<8sIIQQQ")  # magic, version, 0, offset of the experts, length and sum of the JSON
# More than any model needs: 100 blocks of names and numbers are 30 KB.
_MAX_JSON = 1 << 26

__all__ = ["DamagedError", "PackFile", "PackUnusable", "PackWriter"]

Sums = npt.NDArray[np.uint64]


class PackUnusable(Exception):  # noqa: N818  no error: the experts are packed anew
    """Why a file cannot serve, as the end of a sentence that begins with its path."""


class _Layout:
    """Where everything stands in the file of a manifest."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.json = manifest.to_json()
        at = -(-(_HEAD.size + len(self.json)) // 64) * 64
        self.rows: list[int] = []
        for block in manifest.blocks:
            self.rows.append(at)
            at += 8 * (block.experts + 1)
        self.data = at = aligned(at)
        self.blocks: list[int] = []
        for block in manifest.blocks:
            self.blocks.append(at)
            at += block.nbytes
        self.end = at

    def head(self) -> bytes:
        return (
            _HEAD.pack(MAGIC, VERSION, 0, self.data, len(self.json), checksum(memoryview(self.json)))
            + self.json
        )

    def expert(self, block: int, expert: int) -> int:
        return self.blocks[block] + expert * self.manifest.blocks[block].stride


def _row_sum(block: int, sums: Sums) -> int:
    return checksum(memoryview(np.append(sums, np.uint64(block)).astype("<u8").tobytes()))


def _read_layout(file: DirectFile) -> _Layout:
    """Raises PackUnusable where the beginning is not that of a whole header."""
    head = file.read_small(0, _HEAD.size)
    if len(head) < _HEAD.size or head[:8] != MAGIC:
        raise PackUnusable("is no file of packed experts")
    _, version, _, data, length, json_sum = _HEAD.unpack(head)
    if version != VERSION:
        raise PackUnusable(f"has version {version} of the file format, this program reads {VERSION}")
    text = file.read_small(_HEAD.size, length) if length <= _MAX_JSON else b""
    if len(text) != length or checksum(memoryview(text)) != json_sum:
        raise PackUnusable("has a damaged header")
    try:
        layout = _Layout(Manifest.from_json(text))
    except ValueError:
        raise PackUnusable("has a header that this program does not understand") from None
    if layout.data != data:
        raise PackUnusable("has a header that this program does not understand")
    return layout


def _read_row(file: DirectFile, layout: _Layout, block: int) -> Sums | None:
    """The checksums of a block, None where it was not written to its end."""
    count = layout.manifest.blocks[block].experts
    raw = file.read_small(layout.rows[block], 8 * (count + 1))
    if len(raw) != 8 * (count + 1):
        return None
    row = np.frombuffer(raw, dtype="<u8")
    return row[:-1] if int(row[-1]) == _row_sum(block, row[:-1]) else None


class PackFile:
    """A whole file, open for reading. Any thread may read."""

    def __init__(self, path: Path) -> None:
        """Raises PackUnusable, with the reason, and OSError where it cannot be opened."""
        self.path = path
        self._file = DirectFile(path)
        try:
            self._layout = _read_layout(self._file)
            if self._file.size != self._layout.end:
                raise PackUnusable(
                    f"is torn: its header makes it {self._layout.end} bytes, it has {self._file.size}"
                )
            rows = [_read_row(self._file, self._layout, i) for i in range(len(self.manifest.blocks))]
            if any(row is None for row in rows):
                raise PackUnusable("is torn: some of its blocks were not written to their end")
            self._sums = [row for row in rows if row is not None]
        except BaseException:
            self._file.close()
            raise

    @property
    def manifest(self) -> Manifest:
        return self._layout.manifest

    @property
    def direct(self) -> bool:
        return self._file.direct

    def start(self, block: int, expert: int, into: memoryview) -> list[Future[Any]]:
        """Begin to read one expert into ``into``, its stride long and aligned; ``finish`` ends it."""
        offset, size = self._layout.expert(block, expert), self.manifest.blocks[block].stride
        return [
            submit(self._file.read, offset + at, into[at : min(at + PIECE, size)])
            for at in range(0, size, PIECE)
        ]

    def finish(self, block: int, expert: int, into: memoryview, reads: list[Future[Any]]) -> None:
        """Wait for what ``start`` began, and compare. Raises MachineError for whatever is wrong."""
        where = self.manifest.blocks[block]
        what = f"expert {expert} of {where.name}"
        try:
            settle(reads)
        except (OSError, EOFError) as error:
            raise explain(self.path, what, error) from None
        compare(self.path, expert, where, int(self._sums[block][expert]), into)

    def read_blocks(self, into: Mapping[int, CpuExperts | Arena]) -> BlockReads:
        """Begin to read whole blocks, by number, in the order of ``into``; the file must stay open until all
        are finished or stopped."""
        places = {
            block: BlockPlace(
                self.manifest.blocks[block], self._layout.blocks[block], self._sums[block].tolist()
            )
            for block in into
        }
        return BlockReads(self._file, places, into)

    def same_file(self, other: PackFile) -> bool:
        """Whether both have opened one and the same."""
        return self._file.same_file(other._file)

    def close(self) -> None:
        self._file.close()


class PackWriter:
    """The one writer of a file, which is called ``*.part`` until it is whole."""

    def __init__(self, path: Path, manifest: Manifest, wait: Callable[[str], None]) -> None:
        """Wait until no other process writes this file (``wait`` is told so once), take up what was left.

        ``ready`` is true where another process has written the whole file meanwhile: then there is nothing to
        do. Raises OSError where the folder cannot be written, MachineError where its disk is too full.
        """
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.manifest = manifest
        self.ready = False
        self._stopped = False
        self._layout = _Layout(manifest)
        self._done: list[bool] = [False] * len(manifest.blocks)
        self._sums: list[dict[int, int]] = [{} for _ in manifest.blocks]
        self._flying: list[Future[Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = self._lock(wait)
        try:
            self._file = DirectFile(self.part, write=True, descriptor=descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        try:
            self._begin()
        except BaseException:
            self._file.close()
            raise

    def _lock(self, wait: Callable[[str], None]) -> int:
        """The part file, open and locked. The lock is of the file itself and ends with the process."""
        told = False
        while True:
            descriptor = os.open(self.part, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if not told:
                    wait(f"another process is packing {self.path.name}; waiting for it")
                    told = True
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            with contextlib.suppress(OSError):
                if os.path.samestat(os.fstat(descriptor), os.stat(self.part)):
                    return descriptor
            os.close(descriptor)  # whoever held it has renamed or removed it

    def _begin(self) -> None:
        with contextlib.suppress(OSError, PackUnusable):
            finished = PackFile(self.path)
            finished.close()
            if finished.manifest == self.manifest:
                self.part.unlink()
                self.ready = self._stopped = True
                self._file.close()
                return
        try:
            known = _read_layout(self._file).json == self._layout.json
        except PackUnusable:
            known = False
        if known:
            self._done = [_read_row(self._file, self._layout, i) is not None for i in range(len(self._done))]
        with self._disk_full():
            if not any(self._done):
                self._file.resize(0)
            free, needed = shutil.disk_usage(self.path.parent).free, self.remaining
            if free < needed:
                raise OSError(errno.ENOSPC, "")
            if not any(self._done):
                self._file.write_small(0, self._layout.head())
            self._file.resize(self._layout.end)

    @property
    def remaining(self) -> int:
        """Bytes that are still to be written."""
        left = zip(self.manifest.blocks, self._done, strict=True)
        return sum(block.nbytes for block, done in left if not done)

    def done(self, block: int) -> bool:
        """Whether a block is in the file already."""
        return self._done[block]

    def put(self, block: int, expert: int, data: memoryview) -> Future[Any]:
        """Begin to write one expert; ``data``, its stride long and aligned, must stay until the result."""
        future = submit(self._write, block, expert, data)
        self._flying = [one for one in self._flying if not one.done()]
        self._flying.append(future)
        return future

    def _write(self, block: int, expert: int, data: memoryview) -> None:
        where = self.manifest.blocks[block]
        total = checksum(data[: where.expert_bytes])
        offset = self._layout.expert(block, expert)
        for at in range(0, where.stride, PIECE):
            self._file.write(offset + at, data[at : min(at + PIECE, where.stride)])
        self._sums[block][expert] = total

    def close_block(self, block: int) -> None:
        """All experts of a block have been written: say so in the file."""
        sums = np.array([self._sums[block][e] for e in range(self.manifest.blocks[block].experts)], "<u8")
        row = np.append(sums, np.uint64(_row_sum(block, sums))).astype("<u8")
        with self._disk_full():
            self._file.write_small(self._layout.rows[block], row.tobytes())
        self._done[block] = True
        self._sums[block].clear()

    def put_block(self, block: int, experts: CpuExperts) -> None:
        """A whole block from its arenas. Raises MachineError for a full disk, OSError for another fault."""
        where = self.manifest.blocks[block]
        with self._disk_full():
            flying: list[Future[Any]] = []
            for expert in range(where.experts):
                data = experts.view(expert)
                if data is None:
                    data = buffer(where.stride)
                    experts.save(expert, data)
                if len(flying) >= 16:
                    settle([flying.pop(0)])
                flying.append(self.put(block, expert, data))
            settle(flying)
        self.close_block(block)

    def settle(self, futures: list[Future[Any]]) -> None:
        """Wait for results of ``put``. Raises MachineError for a full disk, OSError for another fault."""
        with self._disk_full():
            settle(futures)

    def finish(self) -> Path:
        """Everything is on the disk: give the file its name."""
        with self._disk_full():
            self._file.sync()
            os.replace(self.part, self.path)
        with contextlib.suppress(OSError):  # not every file system can
            folder = os.open(self.path.parent, os.O_RDONLY | os.O_DIRECTORY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        self._stopped = True
        self._file.close()
        return self.path

    def stop(self, *, keep: bool) -> None:
        """End before the end; ``keep``: leave whole blocks for the next one, where there are any. Once more,
        and after ``finish``, it does nothing."""
        if self._stopped:
            return
        self._stopped = True
        with contextlib.suppress(Exception):
            settle(self._flying)
        if not (keep and any(self._done)):
            with contextlib.suppress(OSError):
                self.part.unlink()
        self._file.close()

    @contextlib.contextmanager
    def _disk_full(self) -> Iterator[None]:
        """Turns a full disk into its message, and leaves nothing behind then."""
        try:
            yield
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
                raise
            needed = self._layout.end
            self.stop(keep=False)
            free = shutil.disk_usage(self.path.parent).free
            raise MachineError(
                f"the packed experts need {gib(needed)} in {self.path.parent}, {gib(free)} is free there"
            ) from None
