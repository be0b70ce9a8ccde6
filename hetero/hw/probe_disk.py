"""How fast a folder's disk is read, past the page cache: direct reads, several in flight."""

from __future__ import annotations

import contextlib
import mmap
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BLOCK = 4 * 2**20
SAMPLE = 256 * 2**20  # of a file that is written for the purpose
IN_FLIGHT = 4
_PAGE = 4096
_SMALL_READS = 64


@dataclass(frozen=True, slots=True)
class DiskRates:
    """GB/s of large reads in a row, and microseconds of a single 4 KiB read somewhere."""

    gb_s: float
    latency_us: float
    bytes: int


def probe_disk(folder: Path, *, seconds: float = 2.0, sample: int = SAMPLE) -> DiskRates:
    """Read a file of ``folder``: its largest, or one of ``sample`` bytes that is written and removed.

    Raises OSError where the folder cannot be written or its file system has no direct reads.
    """
    file = largest_file(folder, sample)
    if file is not None:
        return _read(file, seconds)
    folder.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix="probe-", suffix=".part", dir=folder)
    try:
        with os.fdopen(handle, "wb") as out:
            block = os.urandom(BLOCK)  # a file system that compresses must not have it easy
            for _ in range(-(-sample // BLOCK)):
                out.write(block)
            out.flush()
            os.fsync(out.fileno())
        return _read(Path(name), seconds)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name)


def largest_file(folder: Path, least: int) -> Path | None:
    """The largest file directly in ``folder`` or one level below, of ``least`` bytes or more."""
    found: list[tuple[int, str]] = []
    for pattern in ("*", "*/*"):
        for path in folder.glob(pattern):
            with contextlib.suppress(OSError):
                if path.is_file() and os.access(path, os.R_OK):
                    found.append((path.stat().st_size, str(path)))
    size, name = max(found, default=(0, ""))
    return Path(name) if size >= least else None


def _read(file: Path, seconds: float) -> DiskRates:
    size = file.stat().st_size // BLOCK * BLOCK
    handle = os.open(file, os.O_RDONLY | os.O_DIRECT)
    try:
        began = time.perf_counter()
        end = began + seconds

        def run(first: int) -> int:
            done = 0
            with mmap.mmap(-1, BLOCK) as buffer:  # aligned to a page, as direct reads must be
                for offset in range(first * BLOCK, size, IN_FLIGHT * BLOCK):
                    if time.perf_counter() > end:
                        break
                    done += os.preadv(handle, [buffer], offset)
            return done

        with ThreadPoolExecutor(IN_FLIGHT) as pool:
            total = sum(pool.map(run, range(IN_FLIGHT)))
        took = time.perf_counter() - began
        with mmap.mmap(-1, _PAGE) as buffer:
            began = time.perf_counter()
            for number in range(_SMALL_READS):
                offset = number * 2654435761 % max(1, size // _PAGE) * _PAGE
                os.preadv(handle, [buffer], offset)
            latency = (time.perf_counter() - began) / _SMALL_READS
        return DiskRates(total / took / 1e9, latency * 1e6, total)
    finally:
        os.close(handle)
