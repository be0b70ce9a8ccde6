"""Reading ahead of whoever uses what is read: files of weights read past the page cache, and work done early.

Memory for reads is used again, since the system takes longer to give fresh pages than a disk to fill them.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from hetero.core import InputError
from hetero.store.reads import ALIGN, PIECE, DirectFile, aligned, anonymous, settle, submit

T = TypeVar("T")

AHEAD = 32 << 20
"""Bytes of a source that are on their way or wait for their user, at most."""

_SHARE = 20  # of a small source; what is on its way is no more of it than one part in so many

THREADS = 6
"""That read and unpack ahead; requests to the disk are on threads of their own."""

# Smaller reads go through the page cache, since they are not of whole pages; what is larger is no expert, and
# its memory would not be asked for again.
_LEAST, _MOST = 1 << 18, 1 << 28
_BATCH = 2 << 20  # bytes of small jobs that are done together
_STEP = 1 << 16  # sizes of lent memory, so that it fits more than one tensor
_PAGES = 8  # of a file that are looked for in the page cache


class _Lender:
    """Memory that returns by itself when the last tensor in it is gone, or ends there where another thread
    takes some at this moment. Any thread may take and drop it.

    What is kept takes no memory beside what is lent: all together is what was lent at one time, at most.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[mmap.mmap]] = {}  # sizes in the order of their first return
        self._held = 0  # bytes in _free

    def take(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Memory of at least so many bytes at a page, whatever is in it."""
        size = -(-nbytes // _STEP) * _STEP
        with self._lock:
            free = self._free.get(size)
            memory = free.pop() if free else None
            if memory is not None:
                self._held -= size
            else:
                self._drop(size)
        if memory is None:
            memory = anonymous(size)
        lent = np.frombuffer(memory, np.uint8)
        weakref.finalize(lent, self._give_back, size, memory).atexit = False
        return lent

    def _give_back(self, size: int, memory: mmap.mmap) -> None:
        # The collector of garbage may come here at any place, also where this very thread holds the lock.
        if not self._lock.acquire(blocking=False):
            return
        try:
            if self._held + size <= max(AHEAD, 2 * size):
                self._free.setdefault(size, []).append(memory)
                self._held += size
        finally:
            self._lock.release()

    def _drop(self, nbytes: int) -> None:
        """Give so much of what is kept to the system, or all. Under the lock."""
        least = self._held - nbytes
        for size, free in self._free.items():
            while free and self._held > max(0, least):
                free.pop()  # which ends it, where its last array has ended too
                self._held -= size

    def clear(self) -> None:
        """Give what is kept to the system."""
        with self._lock:
            self._drop(self._held)
            self._free.clear()


class Files:
    """Open files of weights. Any thread may read; ``close`` is for when none does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._files: dict[Path, tuple[DirectFile, bool]] = {}
        self._lender = _Lender()

    def read(self, file: Path, start: int, nbytes: int, align: int = 1) -> torch.Tensor:
        """Bytes of a file, uint8 [nbytes], in memory at a multiple of ``align``, a power of two up to 64.

        Raises InputError.
        """
        try:
            opened, cached = self._open(file)
            if not _LEAST <= nbytes <= _MOST:
                out = torch.empty(nbytes, dtype=torch.uint8)
                opened.read_cached(start, out.numpy().data)
                return out
            first = start // ALIGN * ALIGN
            lent = self._lender.take(aligned(start + nbytes - first))
            offset = 0
            if opened.direct and not cached and start % align == 0:
                _by_pages(opened, first, start + nbytes, lent.data)
                offset = start - first
            else:
                opened.read_cached(start, lent.data[:nbytes])
            return torch.frombuffer(lent, dtype=torch.uint8, count=nbytes, offset=offset)
        except OSError as error:
            raise InputError(f"{file}: cannot be read: {error.strerror}") from None
        except EOFError as error:
            raise InputError(f"{error}, though it was longer when it was opened") from None

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        with self._lock:
            while self._files:
                self._files.popitem()[1][0].close()
        self._lender.clear()

    def _open(self, file: Path) -> tuple[DirectFile, bool]:
        with self._lock:
            if file not in self._files:
                opened = DirectFile(file)
                self._files[file] = opened, _in_page_cache(opened)
            return self._files[file]


def _by_pages(file: DirectFile, first: int, last: int, into: memoryview) -> None:
    """Bytes from ``first`` on to ``last`` past the page cache, in pieces that are on their way together.

    Raises OSError, and EOFError where the file ends before.
    """
    # The last page may be cut by the file's end; what is before it is read by pages.
    end = min(aligned(last), file.size) - first
    if end < last - first:
        raise EOFError(f"{file.path}: ends at byte {first + end}")
    body = end // ALIGN * ALIGN
    pieces = [(at, min(at + PIECE, body)) for at in range(0, body, PIECE)]
    if len(pieces) == 1:
        file.read(first, into[:body])
    else:
        settle([submit(file.read, first + at, into[at:stop]) for at, stop in pieces])
    if body < end:
        file.read(first + body, into[body:end])


def _in_page_cache(file: DirectFile) -> bool:
    """Whether a file's pages are in memory already, by a few of them: then the disk has nothing to do."""
    if not hasattr(os, "RWF_NOWAIT"):
        return False
    step = max(ALIGN, file.size // _PAGES)
    with contextlib.suppress(OSError):  # a page that is not there, or a file system that does not say
        return all(file.is_cached(at) for at in range(0, file.size, step))
    return False


@dataclass(slots=True)
class Job(Generic[T]):
    """Work that can be done early, on any thread, and the bytes that its result takes, about."""

    nbytes: int
    call: Callable[[], T]


def in_batches(jobs: Iterable[Job[T]]) -> Iterator[Job[list[T]]]:
    """Small jobs together, since each costs as much as reading some 100 KB; their results as lists."""
    calls: list[Callable[[], T]] = []
    nbytes = 0
    for job in jobs:
        if calls and nbytes + job.nbytes > _BATCH:
            yield Job(nbytes, partial(_all, calls))
            calls, nbytes = [], 0
        calls.append(job.call)
        nbytes += job.nbytes
    if calls:
        yield Job(nbytes, partial(_all, calls))


def _all(calls: list[Callable[[], T]]) -> list[T]:
    return [call() for call in calls]


def share_of(nbytes: int) -> int:
    """How much of a source of so many bytes may be on its way: little beside what becomes of it, and enough
    for requests of several threads."""
    return min(AHEAD, max(4 * _BATCH, nbytes // _SHARE))


def run_ahead(jobs: Iterable[Job[T]], most: int) -> Generator[T]:
    """The results of ``jobs`` in their order, each begun some time before it is asked for, with the one that
    was given out last no more than ``most`` bytes, or two jobs.

    What a job raises is raised in its place, and no job runs any more when the iterator is closed.
    """
    pending = iter(jobs)
    flying: deque[tuple[int, Future[T]]] = deque()
    ahead, job = 0, next(pending, None)
    with ThreadPoolExecutor(THREADS, thread_name_prefix="hetero-ahead") as threads:
        try:
            while True:
                while job is not None and (ahead + job.nbytes <= most or len(flying) < 2):
                    flying.append((job.nbytes, threads.submit(job.call)))
                    ahead += job.nbytes
                    job = next(pending, None)
                if not flying:
                    return
                nbytes, future = flying.popleft()
                yield future.result()
                del future
                ahead -= nbytes
        finally:
            for _, future in flying:
                future.cancel()
