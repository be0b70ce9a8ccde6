"""Rows of tables in files: the bytes that are there, through any cache, and one message for each fault."""

from __future__ import annotations

import errno
import os
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hetero.core import MachineError
from hetero.store import rows as rows_module
from hetero.store.rows import CachedRows, RowFiles, Run, gather_time, state_of
from tests.store.test_rowcache import seeded


def table(
    folder: Path, rng: np.random.Generator, parts: tuple[int, ...], row: int, files: int = 2
) -> tuple[list[Run], np.ndarray]:
    """A table in parts that stand in turns in files, at odd places, other bytes between them."""
    want = rng.integers(0, 256, (sum(parts), row), dtype=np.uint8)
    texts = [bytearray() for _ in range(files)]
    runs, first = [], 0
    for number, count in enumerate(parts):
        text = texts[number % files]
        text += rng.bytes(int(rng.integers(1, 5000)))
        runs.append(Run(folder / f"{number % files}.bin", f"part {number}", len(text), count))
        text += want[first : first + count].tobytes()
        first += count
    for number, text in enumerate(texts):
        (folder / f"{number}.bin").write_bytes(text)
    return runs, want


@pytest.mark.parametrize("row", [2, 320, 4096, 9001])
def test_rows_from_anywhere(
    tmp_path: Path, generator: torch.Generator, row: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, beside each other, all of them, across blocks, parts and files; in windows and cut spans."""
    rng = seeded(generator)
    parts = (211, 1, 90, 333)
    runs, want = table(tmp_path, rng, parts, row)
    files = RowFiles(runs, row)
    assert (files.rows, files.nbytes) == (635, 635 * row)
    monkeypatch.setattr(rows_module, "_SPAN", 20_000)
    monkeypatch.setattr(rows_module, "_WINDOW", 7)
    everything = np.arange(635)
    some = [everything, everything[::2], everything[:0], np.array([634]), np.arange(205, 218)]
    some += [np.unique(rng.integers(0, 635, 40)) for _ in range(5)]
    for ids in some:
        into = np.full((len(ids), row), 0xEE, dtype=np.uint8)
        files.read(ids, into)
        assert np.array_equal(into, want[ids])
        files.forget(ids)
    assert gather_time(files, 16, rng) > 0
    files.close()
    files.close()


@pytest.mark.parametrize("ram", [0, 3000, 1 << 20])
def test_the_same_through_any_cache(tmp_path: Path, generator: torch.Generator, ram: int) -> None:
    rng = seeded(generator)
    runs, want = table(tmp_path, rng, (150, 250), 48)
    rows = CachedRows(RowFiles(runs, 48), ram)
    assert rows.ram <= ram
    wanted = missed = 0
    for size in (0, 1, 16, 16, 500, 16, 3):
        ids = rng.integers(0, 400, size)
        assert np.array_equal(rows.gather(ids), want[ids])
        wanted += len(np.unique(ids))
    reads = rows.reads
    missed = reads.cache.misses
    assert reads.cache.hits + missed == wanted
    assert reads.nbytes == missed * 48
    assert reads.seconds > 0
    assert (reads.cache.hits > 0) == (ram > 0)
    for beyond in (-1, 400):
        with pytest.raises(IndexError):
            rows.gather(np.array([3, beyond]))


def test_what_is_expected_is_there(tmp_path: Path, generator: torch.Generator) -> None:
    rng = seeded(generator)
    runs, want = table(tmp_path, rng, (400,), 48)
    ids = rng.integers(0, 400, 20)
    assert CachedRows(RowFiles(runs, 48), 0).expect(lambda: ids) is None
    rows = CachedRows(RowFiles(runs, 48), 1 << 20)
    for _ in range(2):
        done = rows.expect(lambda: ids)
        assert done is not None
        done.result()
        assert rows.reads.nbytes == len(np.unique(ids)) * 48
    assert np.array_equal(rows.gather(ids), want[ids])
    assert rows.reads.cache.misses == 0


def test_many_threads(tmp_path: Path, generator: torch.Generator) -> None:
    rng = seeded(generator)
    runs, want = table(tmp_path, rng, (500, 500), 40)
    rows = CachedRows(RowFiles(runs, 40), 8000)
    wrong: list[object] = []

    def work(seed: int) -> None:
        own = np.random.default_rng(seed)
        for _ in range(60):
            ids = own.integers(0, 1000, 30)
            found = rows.gather(ids)
            if not np.array_equal(found, want[ids]):
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(int(rng.integers(2**31)),)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_faults_name_file_and_tensor_and_pass(
    tmp_path: Path, generator: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that is cut, written to or unreadable fails the call that met it; the next one works again."""
    rng = seeded(generator)
    runs, want = table(tmp_path, rng, (100, 100), 64)
    rows = CachedRows(RowFiles(runs, 64), 0)
    second = np.array([150, 199])
    path, saved, stat = runs[1].file, runs[1].file.read_bytes(), os.stat(runs[1].file)

    def told() -> str:
        with pytest.raises(MachineError) as caught:
            rows.gather(second)
        assert np.array_equal(rows.gather(np.array([5])), want[[5]])  # of the other file
        return str(caught.value)

    os.truncate(path, len(saved) - 10)
    size = len(saved)
    assert told() == (
        f"{path}: rows of tensor part 1 cannot be read: it has changed since the model was loaded: "
        f"it had {size} bytes and has {size - 10}"
    )
    path.write_bytes(saved)
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    assert told().endswith("it has changed since the model was loaded: it was written to")
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert np.array_equal(rows.gather(second), want[second])
    path.unlink()  # it is open, so that its name does not matter
    assert np.array_equal(rows.gather(second), want[second])

    real = os.preadv

    def broken(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if broken_now:
            if broken_now[0] == "short":
                return 0
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(descriptor, [buffers[0][:7]], offset)  # a few bytes at a time are no fault

    broken_now: list[str] = []
    monkeypatch.setattr(rows_module.os, "preadv", broken)
    assert np.array_equal(rows.gather(second), want[second])
    for how, reason in (("EIO", "Input/output error"), ("short", "it ends at byte ")):
        broken_now[:] = [how]
        with pytest.raises(MachineError, match=f"^{path}: rows of tensor part 1 cannot be read: {reason}"):
            rows.gather(second)
    broken_now.clear()
    assert np.array_equal(rows.gather(second), want[second])


def test_files_that_do_not_serve_are_refused_at_once(tmp_path: Path, generator: torch.Generator) -> None:
    runs, _ = table(tmp_path, seeded(generator), (100, 100), 64)
    size = os.stat(runs[1].file).st_size
    with pytest.raises(MachineError, match="rows of tensor part 1 cannot be read: it ends at byte"):
        RowFiles([runs[0], Run(runs[1].file, "part 1", size - 5, 1)], 64)
    now = state_of(os.stat(runs[1].file))
    RowFiles([replace(runs[1], state=now)], 64)
    for state, what in ((now[0] + 3, now[1]), "it had"), ((now[0], now[1] + 1), "it was written to"):
        with pytest.raises(MachineError, match=f"it has changed since the model was loaded: {what}"):
            RowFiles([runs[0], replace(runs[1], state=state)], 64)
    runs[1].file.unlink()
    with pytest.raises(MachineError, match="rows of tensor part 1 cannot be read: No such file"):
        RowFiles(runs, 64)
