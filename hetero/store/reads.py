"""Files read and written past the page cache, several requests in flight.

Direct I/O wants offsets, lengths and addresses that are multiples of a disk's block: all here are of 4096. A
file system without it (tmpfs, some network ones) is used through the page cache, with the same results.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from hetero.core import MachineError

ALIGN = 4096
"""What offsets and lengths are multiples of."""

PIECE = 1 << 20
"""Bytes of one request. Twice as much was slower where a virtual machine's host copies what it reads."""

IN_FLIGHT = 8
"""Requests at once, all files together: what brings an NVMe disk near its speed with pieces of this size."""


def aligned(nbytes: int) -> int:
    """Rounded up to a multiple of ALIGN."""
    return -(-nbytes // ALIGN) * ALIGN


def buffer(nbytes: int) -> memoryview:
    """Memory that direct I/O can use, zeroed, of at least so many bytes."""
    return memoryview(anonymous(max(ALIGN, aligned(nbytes))))


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed memory of this process alone, at a page, of huge pages where it is large enough for one."""
    # Without the flags Python's is shared memory, which is a file system's and has small pages.
    memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if nbytes >= 2 << 20 and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # an advice
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


class DirectFile:
    """A file for positioned reads (``write`` False) or reads and writes. Any thread may use it."""

    def __init__(self, path: Path, *, write: bool = False, descriptor: int | None = None) -> None:
        """Takes over ``descriptor``, or opens ``path``. Raises OSError."""
        self.path = path
        flags = (os.O_RDWR if write else os.O_RDONLY) | os.O_CLOEXEC
        self._fd = descriptor if descriptor is not None else os.open(path, flags)
        self._direct: int | None = None
        self._use_direct = True
        with contextlib.suppress(OSError):  # a file system that has none says EINVAL
            self._direct = os.open(path, flags | os.O_DIRECT)

    @property
    def descriptors(self) -> tuple[int, int]:
        """One that reads through the page cache, and one past it, -1 where that cannot be."""
        return self._fd, self._direct if self._direct is not None and self._use_direct else -1

    @property
    def direct(self) -> bool:
        """Whether the page cache is left out."""
        return self._direct is not None and self._use_direct

    def read(self, offset: int, into: memoryview) -> None:
        """Fill ``into``. Raises OSError, and EOFError where the file ends before."""
        self._each(os.preadv, offset, into)

    def write(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``. Raises OSError."""
        self._each(os.pwritev, offset, data)

    def read_cached(self, offset: int, into: memoryview) -> None:
        """``read`` through the page cache, the kernel told of all of it first where it is much."""
        if len(into) > PIECE:
            with contextlib.suppress(OSError, AttributeError):  # an advice, and not on every system
                os.posix_fadvise(self._fd, offset, len(into), os.POSIX_FADV_WILLNEED)
        done = 0
        while done < len(into):
            count = os.preadv(self._fd, [into[done:]], offset + done)
            if count == 0:
                raise EOFError(f"{self.path}: ends at byte {offset + done}")
            done += count

    def is_cached(self, offset: int) -> bool:
        """Whether the page cache has a byte. Raises OSError where it has not, or the system does not say."""
        return os.preadv(self._fd, [bytearray(1)], offset, os.RWF_NOWAIT) == 1

    def read_small(self, offset: int, nbytes: int) -> bytes:
        """Bytes of a header, through the page cache; fewer where the file ends."""
        return os.pread(self._fd, nbytes, offset)

    def write_small(self, offset: int, data: bytes) -> None:
        done = 0
        while done < len(data):
            done += os.pwrite(self._fd, data[done:], offset + done)

    @property
    def size(self) -> int:
        return os.fstat(self._fd).st_size

    def same_file(self, other: DirectFile) -> bool:
        """Whether both have opened one and the same file."""
        return os.path.samestat(os.fstat(self._fd), os.fstat(other._fd))

    def resize(self, nbytes: int) -> None:
        os.ftruncate(self._fd, nbytes)

    def sync(self) -> None:
        os.fsync(self._fd)

    def close(self) -> None:
        """Once more is no harm."""
        for descriptor in (self._fd, self._direct):
            if descriptor is not None and descriptor >= 0:
                os.close(descriptor)
        self._fd, self._direct = -1, None

    def _each(self, call: Callable[[int, list[memoryview], int], int], offset: int, data: memoryview) -> None:
        done = 0
        while done < len(data):
            # What direct I/O has left in the middle of a block goes through the page cache.
            direct = self._direct if self._use_direct else None
            if (offset + done) % ALIGN or (len(data) - done) % ALIGN:
                direct = None
            try:
                count = call(self._fd if direct is None else direct, [data[done:]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL and direct is not None:
                    # This disk cannot, though its file system let it be opened. Other threads may be using
                    # the descriptor, so it stays open; each of them meets the same error.
                    self._use_direct = False
                    continue
                raise
            if count == 0:
                raise EOFError(f"{self.path}: ends at byte {offset + done}")
            done += count


class _Pool:
    """Threads of all reads and writes of the process."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: ThreadPoolExecutor | None = None

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:
        with self._lock:
            if self._threads is None:
                self._threads = ThreadPoolExecutor(IN_FLIGHT, thread_name_prefix="hetero-disk")
            return self._threads.submit(call, *args)


_pool = _Pool()
submit = _pool.submit
"""Run a call on the threads of the disk."""


def settle(futures: list[Future[Any]]) -> None:
    """Wait for all; then raise what the first of them has raised, if any. Buffers are free after it."""
    failed: BaseException | None = None
    for future in futures:
        error = future.exception()
        failed = failed if failed is not None else error
    if failed is not None:
        raise failed


def explain(path: Path, what: str, error: Exception) -> MachineError:
    """A fault of the disk in one sentence."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return MachineError(f"{path}: {what} cannot be read: {reason}")
