"""Pages that are there before they are written: contents, limits, several threads at once."""

from __future__ import annotations

import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from hetero.core import ExpertSpec
from hetero.cpu import CpuExperts
from hetero.formats import parse_format
from hetero.hw import pages
from hetero.hw.pages import Pages

UNIT = pages._UNIT


@pytest.fixture
def memory() -> mmap.mmap:
    made = mmap.mmap(-1, 9 * UNIT + 4096, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A huge page lies where its address says, which need not be where a unit begins.
    made.madvise(mmap.MADV_NOHUGEPAGE)
    return made


def address_of(memory: mmap.mmap) -> int:
    return int(np.frombuffer(memory, np.uint8).ctypes.data)


def resident(memory: mmap.mmap) -> list[bool]:
    """Of each page, whether the kernel has given it, as /proc/self/pagemap tells."""
    first, count = address_of(memory) // mmap.PAGESIZE, len(memory) // mmap.PAGESIZE
    with open("/proc/self/pagemap", "rb") as file:
        file.seek(8 * first)
        entries = np.frombuffer(file.read(8 * count), np.uint64)
    return [bool(entry >> np.uint64(63)) for entry in entries]


def test_pages_come_where_they_are_wanted_and_keep_what_they_hold(memory: mmap.mmap) -> None:
    brought = Pages(address_of(memory), len(memory))
    memory[3 * UNIT + 5] = 7
    brought.bring(3 * UNIT + 10, UNIT)  # which ends within the fifth unit
    there, each = resident(memory), UNIT // mmap.PAGESIZE
    assert not any(there[: 3 * each])
    assert all(there[3 * each : 5 * each])
    assert not any(there[5 * each :])
    brought.bring(0, len(memory))
    assert all(resident(memory))
    assert memory[3 * UNIT + 5] == 7
    assert sum(memory[:]) == 7


def test_each_unit_is_asked_for_once_and_waited_for(
    memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []
    begun, go = threading.Event(), threading.Event()

    def advise(address: object, nbytes: object, advice: int) -> int:
        start, size = getattr(address, "value", 0) - address_of(memory), getattr(nbytes, "value", 0)
        asked.extend(range(start // UNIT, -(-(start + size) // UNIT)))
        begun.set()
        assert go.wait(60)
        return 0

    monkeypatch.setattr(pages, "_madvise", advise)
    brought = Pages(address_of(memory), len(memory))
    with ThreadPoolExecutor(4) as threads:
        first = threads.submit(brought.bring, 0, UNIT)
        assert begun.wait(60)
        others = [threads.submit(brought.bring, 0, len(memory)) for _ in range(3)]
        assert not any(one.done() for one in others)
        go.set()
        for one in [first, *others]:
            one.result(60)
    assert sorted(asked) == list(range(10))


def test_a_kernel_that_cannot_is_no_fault(memory: mmap.mmap, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages, "_madvise", lambda *_: -1)
    Pages(address_of(memory), len(memory)).bring(0, len(memory))
    monkeypatch.setattr(pages, "_madvise", None)
    Pages(address_of(memory), len(memory)).bring(0, len(memory))
    assert not any(resident(memory))


def test_experts_whose_pages_are_there_are_packed_alike(generator: torch.Generator) -> None:
    spec = ExpertSpec(3, 64, 96, 2)
    weights = {
        "gate": torch.randn(96, 64, generator=generator),
        "up": torch.randn(96, 64, generator=generator),
        "down": torch.randn(64, 96, generator=generator),
    }
    made = [CpuExperts(spec, parse_format("int8")) for _ in range(2)]
    made[0].bring(0, 3)
    for experts in made:
        for part, weight in weights.items():
            experts.put(2, part, weight)  # type: ignore[arg-type]
    views = [experts.view(2) for experts in made]
    assert views[0] == views[1]
    with pytest.raises(ValueError, match="experts 2 to 4 of 3"):
        made[0].bring(2, 2)
