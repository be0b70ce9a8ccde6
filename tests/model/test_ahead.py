"""Bytes of files read past the page cache or through it, memory that is used again, and work done early."""

from __future__ import annotations

import errno
import gc
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from hetero.core import InputError
from hetero.model import ahead
from hetero.model.ahead import Files, Job, in_batches, run_ahead
from hetero.model.source import Checkpoint
from hetero.store.reads import DirectFile


@pytest.fixture
def cold(monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is in the page cache, and the smallest reads go past it."""
    monkeypatch.setattr(ahead, "_in_page_cache", lambda _: False)
    monkeypatch.setattr(ahead, "_LEAST", 1)


def file_of(tmp_path: Path, nbytes: int, generator: torch.Generator) -> tuple[Path, torch.Tensor]:
    data = torch.randint(0, 256, (nbytes,), generator=generator, dtype=torch.uint8)
    path = tmp_path / "x"
    path.write_bytes(data.numpy().tobytes())
    return path, data


SPANS = [
    (0, 1),
    (0, 4096),
    (1, 4095),
    (4095, 2),
    (5000, 300_000),
    (4096, (2 << 20) + 1),
    (2 << 20, 5 << 20),
    (7, 0),
]


@pytest.mark.parametrize("direct", [True, False], ids=["direct", "no direct I/O"])
def test_any_span_is_read(
    tmp_path: Path, generator: torch.Generator, cold: None, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    path, data = file_of(tmp_path, (7 << 20) + 123, generator)
    if not direct:
        monkeypatch.setattr(DirectFile, "direct", property(lambda _: False))
    files = Files()
    for start, nbytes in [*SPANS, (len(data) - 70_000, 70_000), (len(data) - 1, 1), (0, len(data))]:
        assert torch.equal(files.read(path, start, nbytes), data[start : start + nbytes])
    with pytest.raises(InputError, match=f"{path}: ends at byte {len(data)}, though it was longer"):
        files.read(path, len(data) - 10, 11)
    files.close()
    assert torch.equal(files.read(path, 3, 10), data[3:13])
    files.close()


def test_memory_is_used_again_and_not_before_its_tensors_are_gone(
    tmp_path: Path, generator: torch.Generator, cold: None
) -> None:
    path, data = file_of(tmp_path, 1 << 20, generator)
    files = Files()
    held = files.read(path, 10, 100_000)[50:]
    other = files.read(path, 20, 100_000)
    assert held.data_ptr() != other.data_ptr() + 40
    where = other.data_ptr()
    del other
    gc.collect()
    again = files.read(path, 20, 100_000)
    assert again.data_ptr() == where
    assert torch.equal(held, data[60:100_010])
    files.close()
    assert torch.equal(again, data[20:100_020])


def test_garbage_may_be_collected_where_memory_is_taken() -> None:
    lender = ahead._Lender()
    lent = lender.take(100)
    with lender._lock:  # what a collection within ``take`` finds
        del lent
    assert len(lender.take(100)) >= 100


def test_kept_memory_takes_none_beside_what_was_lent(generator: torch.Generator) -> None:
    """Whatever sizes follow each other: what is kept makes room for what is lent."""
    lender, lent, most = ahead._Lender(), [], 0
    for size in (torch.randint(1, 40, (400,), generator=generator) * ahead._STEP).tolist():
        lent.append(lender.take(size))
        most = max(most, sum(one.nbytes for one in lent))
        if len(lent) == 5:
            del lent[0], lent[1]
        assert lender._held == sum(size * len(free) for size, free in lender._free.items())
        assert lender._held + sum(one.nbytes for one in lent) <= most
    lender.clear()
    assert lender._held == 0


def test_a_small_source_has_a_small_part_on_its_way() -> None:
    assert ahead.share_of(300 << 20) == 15 << 20
    assert ahead.share_of(100 << 30) == ahead.AHEAD
    assert ahead.share_of(0) == 8 << 20  # requests of several threads


def test_a_fault_of_the_disk_names_the_file(
    tmp_path: Path, generator: torch.Generator, cold: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = file_of(tmp_path, 5 << 20, generator)

    def fail(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    files = Files()
    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(InputError, match=f"{path}: cannot be read: Input/output error"):
        files.read(path, 0, 5 << 20)
    files.close()


def test_tensors_of_any_place_in_a_file(tmp_path: Path, generator: torch.Generator, cold: None) -> None:
    """A header of odd length puts all tensors across their own boundaries."""
    tensors = {f"w{i}": torch.randn(100 + i, 3, generator=generator) for i in range(8)}
    save_file(tensors, tmp_path / "whole")
    raw = (tmp_path / "whole").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = raw[8 : 8 + length].rstrip() + b" "
    header += b" " * ((len(header) + 1) % 2)
    (tmp_path / "model.safetensors").write_bytes(
        len(header).to_bytes(8, "little") + header + raw[8 + length :]
    )
    with Checkpoint(tmp_path) as source:
        assert any(info.start % 4 for info in source.tensors.values())
        for name, value in tensors.items():
            assert torch.equal(source.read(name), value)
            assert torch.equal(source.read_slice(name, 2), value[2:3])


def test_results_come_in_order_and_early() -> None:
    begun: list[int] = []
    second = threading.Event()

    def job(number: int) -> int:
        begun.append(number)
        if number == 0:
            assert second.wait(60)  # the next one has begun before this one ends
        second.set()
        return number

    found = []
    for number in run_ahead((Job(10, lambda number=number: job(number)) for number in range(40)), 35):
        found.append(number)
        assert max(begun) <= number + 2  # no more than 35 bytes, this one among them
    assert found == list(range(40))
    assert list(run_ahead([], 35)) == []
    assert list(run_ahead([Job(100, lambda: 1), Job(100, lambda: 2)], 35)) == [1, 2]


def test_a_failure_comes_in_its_place_and_ends_all() -> None:
    done: list[int] = []

    def job(number: int) -> int:
        if number == 5:
            raise InputError("no")
        done.append(number)
        return number

    results = run_ahead((Job(10, lambda number=number: job(number)) for number in range(100)), 35)
    found: list[int] = []
    with pytest.raises(InputError, match="no"):
        found.extend(results)
    assert found == list(range(5))
    count = len(done)
    assert count < 20
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-ahead")]
    assert len(done) == count


def test_leaving_early_leaves_no_thread() -> None:
    results = run_ahead((Job(1, lambda: 1) for _ in range(100)), 35)
    assert next(results) == 1
    results.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("hetero-ahead")]


def test_small_jobs_are_done_together() -> None:
    sizes = [ahead._BATCH, 10, 10, ahead._BATCH // 2, ahead._BATCH // 2, 5, 3 * ahead._BATCH, 0]
    jobs = list(in_batches(Job(size, lambda i=i: i) for i, size in enumerate(sizes)))
    assert [job.call() for job in jobs] == [[0], [1, 2, 3], [4, 5], [6], [7]]
    assert sum(job.nbytes for job in jobs) == sum(sizes)
