"""Rows of a large table, read by their numbers from the files that hold them, and a cache of them in RAM.

A step wants a few rows of some hundred bytes, anywhere in a table of many gigabytes, and it wants them now.
The kernel is told of all of them (``POSIX_FADV_WILLNEED``) before the first is read, so that all are in
flight at once without a thread: 16 rows of a cold file take little more than one. Reading ahead is off, since
what follows a row is of no use.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hetero.core import MachineError
from hetero.store.policy import CacheStats
from hetero.store.reads import submit
from hetero.store.rowcache import RowCache
from hetero.trace import READ, clock, recorder

Rows: TypeAlias = NDArray[np.int64]
Bytes: TypeAlias = NDArray[np.uint8]

BLOCK = 4096
"""Bytes that the disk reads at least."""

_NEAR = BLOCK  # rows with no more than this between them are one read
_SPAN = 1 << 20  # bytes of one read, about
_WINDOW = 1024  # reads that the kernel is told of ahead


@dataclass(frozen=True, slots=True)
class Run:
    """Consecutive rows of a table, one after the other in a file. ``tensor``: its name there. ``state``: of
    the file when that was found out (``state_of``); None: as it is when it is opened."""

    file: Path
    tensor: str
    start: int
    rows: int
    state: tuple[int, int] | None = None


def state_of(stat: os.stat_result) -> tuple[int, int]:
    """What tells a file that has changed: its size, and when it was written to last."""
    return stat.st_size, stat.st_mtime_ns


@dataclass(frozen=True, slots=True)
class RowReads:
    """What a table has read since the start. ``cache``: a use is of one row in one step."""

    cache: CacheStats = field(default_factory=CacheStats)
    nbytes: int = 0  # of rows that came from files
    seconds: float = 0.0  # that steps have waited

    def __add__(self, other: RowReads) -> RowReads:
        return RowReads(self.cache + other.cache, self.nbytes + other.nbytes, self.seconds + other.seconds)


class RowFiles:
    """The files of a table, held open. Any thread may read.

    Raises MachineError, naming file and tensor, for a file that cannot be opened or is too short.
    """

    def __init__(self, runs: Sequence[Run], row_bytes: int) -> None:
        self.runs, self.row_bytes = tuple(runs), row_bytes
        self._ends = np.cumsum([run.rows for run in runs], dtype=np.int64)
        self._starts = np.array([run.start for run in runs], dtype=np.int64)
        files = list(dict.fromkeys(run.file for run in runs))
        self._file_of = np.array([files.index(run.file) for run in runs], dtype=np.int64)
        self._tensors = [next(run.tensor for run in runs if run.file == file) for file in files]
        self.files = tuple(files)
        self._fds: list[int] = []
        self._close = weakref.finalize(self, _close, self._fds)
        self._known: list[tuple[int, int]] = []
        for number, file in enumerate(files):
            try:
                self._fds.append(os.open(file, os.O_RDONLY | os.O_CLOEXEC))
                self._known.append(self._state(number))
                self._advise(number, 0, 0, "POSIX_FADV_RANDOM")
            except OSError as error:
                raise self._fault(number, error) from None
        for run, number in zip(self.runs, self._file_of.tolist(), strict=True):
            if run.state is not None:
                self._compare(number, self._known[number], run.state)
            if run.start + run.rows * row_bytes > self._known[number][0]:
                raise self._fault(number, EOFError(f"it ends at byte {self._known[number][0]}"), run.tensor)

    @property
    def rows(self) -> int:
        return int(self._ends[-1])

    @property
    def nbytes(self) -> int:
        """Of all rows."""
        return self.rows * self.row_bytes

    def close(self) -> None:
        """Once more is no harm."""
        self._close()

    def read(self, rows: Rows, into: Bytes) -> None:
        """``rows`` [n], ascending, none twice, into [n, row_bytes].

        Raises MachineError, naming file and tensor, where a file cannot be read, is shorter than it was, or
        has changed since it was opened.
        """
        if not len(rows):
            return
        run, at = self._places(rows)
        file = self._file_of[run]
        for number in np.unique(file).tolist():
            self._check(number)
        after = at[1:] - (at[:-1] + self.row_bytes)
        together = (file[1:] == file[:-1]) & (after >= 0) & (after <= _NEAR)
        together &= at[1:] // _SPAN == at[:-1] // _SPAN
        begins = np.concatenate([[0], np.flatnonzero(~together) + 1])
        ends = np.append(begins[1:], len(rows))
        starts, sizes = at[begins], at[ends - 1] + self.row_bytes - at[begins]
        parts = (file[begins], starts, sizes, begins, ends)
        spans = list(zip(*(part.tolist() for part in parts), strict=True))
        for window in range(0, len(spans), _WINDOW):
            some = spans[window : window + _WINDOW]
            if len(spans) > 1:
                for number, start, size, _, _ in some:
                    self._advise(number, start, size, "POSIX_FADV_WILLNEED")
            for number, start, size, begin, end in some:
                if size == (end - begin) * self.row_bytes:
                    self._fill(number, start, into[begin:end].reshape(-1).data, run[begin])
                else:
                    whole = np.empty(size, dtype=np.uint8)
                    self._fill(number, start, whole.data, run[begin])
                    places = (at[begin:end] - start)[:, None] + np.arange(self.row_bytes)
                    into[begin:end] = whole[places]

    def read_all(self, into: Bytes) -> None:
        """All rows [rows, row_bytes] in order. Raises MachineError as ``read`` does."""
        step = max(1, (64 << 20) // self.row_bytes)
        for first in range(0, self.rows, step):
            some = np.arange(first, min(first + step, self.rows))
            self.read(some, into[first : first + step])

    def forget(self, rows: Rows) -> None:
        """Let the page cache give up these rows' blocks, so that the next read is the disk's: to measure."""
        run, at = self._places(rows)
        for number, start in zip(self._file_of[run].tolist(), (at // BLOCK * BLOCK).tolist(), strict=True):
            # Whole pages only, and a row may lie in two.
            self._advise(number, start, self.row_bytes // BLOCK * BLOCK + 2 * BLOCK, "POSIX_FADV_DONTNEED")

    def _places(self, rows: Rows) -> tuple[Rows, Rows]:
        """(index of the run, offset in its file) of each row."""
        run = np.searchsorted(self._ends, rows, side="right")
        first = np.where(run > 0, self._ends[run - 1], 0)
        return run, self._starts[run] + (rows - first) * self.row_bytes

    def _fill(self, number: int, start: int, into: memoryview, run: int) -> None:
        done = 0
        while done < len(into):
            try:
                count = os.preadv(self._fds[number], [into[done:]], start + done)
            except OSError as error:
                raise self._fault(number, error, self.runs[run].tensor) from None
            if count == 0:
                ends = EOFError(f"it ends at byte {start + done}, though it was longer when it was opened")
                raise self._fault(number, ends, self.runs[run].tensor)
            done += count

    def _check(self, number: int) -> None:
        try:
            now = self._state(number)
        except OSError as error:
            raise self._fault(number, error) from None
        self._compare(number, now, self._known[number])

    def _compare(self, number: int, now: tuple[int, int], known: tuple[int, int]) -> None:
        if now != known:
            size, was = now[0], known[0]
            what = f"it had {was} bytes and has {size}" if size != was else "it was written to"
            raise self._fault(number, EOFError(f"it has changed since the model was loaded: {what}"))

    def _state(self, number: int) -> tuple[int, int]:
        return state_of(os.fstat(self._fds[number]))

    def _advise(self, number: int, start: int, size: int, advice: str) -> None:
        if hasattr(os, "posix_fadvise"):
            with contextlib.suppress(OSError):  # a file system may know no advice
                os.posix_fadvise(self._fds[number], start, size, getattr(os, advice))

    def _fault(self, number: int, error: Exception, tensor: str = "") -> MachineError:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        name = tensor or self._tensors[number]
        return MachineError(f"{self.files[number]}: rows of tensor {name} cannot be read: {reason}")


class CachedRows:
    """Rows from files behind a cache of at most ``ram`` bytes. Any thread may use it; ``layer``: for traces.

    A fault of a file raises MachineError from the call that met it; the next call tries again.
    """

    def __init__(self, files: RowFiles, ram: int, layer: int = -1) -> None:
        self.files, self.layer = files, layer
        self._cache = RowCache(files.rows, files.row_bytes, ram)
        self._lock = threading.Lock()
        self._nbytes = 0
        self._seconds = 0.0

    @property
    def ram(self) -> int:
        """Bytes of main memory that the cache may take."""
        return self._cache.nbytes

    @property
    def reads(self) -> RowReads:
        """Counters since the start; any thread may ask."""
        return RowReads(self._cache.stats, self._nbytes, self._seconds)

    def gather(self, ids: Rows) -> Bytes:
        """Rows [n, row_bytes] of ids [n], in any order and as often as they come. Raises IndexError for one
        that the table does not have."""
        distinct, places = np.unique(ids, return_inverse=True)
        if len(distinct) and (distinct[0] < 0 or distinct[-1] >= self.files.rows):
            raise IndexError(f"a row beyond the table's {self.files.rows}")
        rows = self._distinct(distinct)
        # Most steps want no row twice, and in some order.
        return rows[places]

    def expect(self, ids: Callable[[], Rows]) -> Future[None] | None:
        """Begin to read rows that a later ``gather`` will want, as many as half of the cache holds; another
        thread asks ``ids`` for them. What goes wrong with files is told by that ``gather``. The future is
        of the reading; None where nothing would be kept."""
        return submit(self._bring, ids) if self._cache.slots else None

    def _bring(self, ids: Callable[[], Rows]) -> None:
        wanted = np.unique(ids())[: self._cache.slots // 2]
        with self._lock:
            absent = wanted[self._cache.find(wanted) < 0]
        with contextlib.suppress(MachineError):
            self._read(absent)

    def _distinct(self, wanted: Rows) -> Bytes:
        out = np.empty((len(wanted), self.files.row_bytes), dtype=np.uint8)
        with self._lock:
            slots = self._cache.use(wanted)
            there = slots >= 0
            out[there] = self._cache.rows[slots[there]]
        if there.all():
            return out
        absent = ~there
        began = clock()
        out[absent] = self._read(wanted[absent])
        ended = clock()
        count = int(np.count_nonzero(absent))
        with self._lock:
            self._seconds += (ended - began) / 1e9
        if recorder.active:
            recorder.add(("disk", READ, self.layer, began, ended, count, count * self.files.row_bytes))
        return out

    def _read(self, absent: Rows) -> Bytes:
        """From files, into the cache too. Nothing is locked meanwhile: another thread may bring the same."""
        read = np.empty((len(absent), self.files.row_bytes), dtype=np.uint8)
        self.files.read(absent, read)
        with self._lock:
            self._nbytes += read.nbytes
            self._cache.admit(absent, read)
        return read


def _close(descriptors: list[int]) -> None:
    while descriptors:
        os.close(descriptors.pop())


def gather_time(files: RowFiles, rows: int, rng: Any, times: int = 9) -> float:
    """Seconds that reading so many rows from anywhere in the files takes where none is in the page cache:
    the median of some tries. Raises MachineError where they cannot be read."""
    spent = []
    into = np.empty((rows, files.row_bytes), dtype=np.uint8)
    for _ in range(times):
        some = np.unique(rng.integers(0, files.rows, rows))
        files.forget(some)
        began = clock()
        files.read(some, into[: len(some)])
        spent.append(clock() - began)
    return sorted(spent)[len(spent) // 2] / 1e9
