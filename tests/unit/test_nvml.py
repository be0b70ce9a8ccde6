"""What the driver's management library is asked, with a library of the test's own in its place."""

from __future__ import annotations

import os
from typing import Any

import pytest

from hetero.hw import nvml

GIB = 2**30


class Library:
    """One device; processes as (number, bytes)."""

    def __init__(self, processes: list[tuple[int, int]], code: int = 0) -> None:
        self.processes, self.code = processes, code
        self.open, self.asked = 0, 0
        self.index: int | None = None
        self.uuid: bytes | None = None

    def nvmlInit_v2(self) -> int:
        self.open += 1
        return 0

    def nvmlShutdown(self) -> int:
        self.open -= 1
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, index: int, handle: Any) -> int:
        self.index = index
        return 0

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes, handle: Any) -> int:
        self.uuid = uuid
        return 0

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total, memory._obj.free = 24 * GIB, 20 * GIB
        return self.code

    def nvmlDeviceGetName(self, handle: Any, name: Any, size: int) -> int:
        name.value = b"A Card"
        return 0

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, room: Any) -> int:
        self.asked += 1
        if self.code:
            return self.code
        if count._obj.value < len(self.processes):
            count._obj.value = len(self.processes)
            return 7
        count._obj.value = len(self.processes)
        for place, (pid, used) in zip(room, self.processes, strict=False):
            place.pid, place.used = pid, used
        return 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(*processes: tuple[int, int], code: int = 0) -> Library:
        made = Library(list(processes), code)
        monkeypatch.setattr(nvml, "_library", lambda: made)
        return made

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return use


def test_a_device_is_told_without_a_context(library: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = library()
    assert nvml.device(0) == ("A Card", 24 * GIB, 20 * GIB)
    assert nvml.free_bytes(0) == 20 * GIB
    assert (made.open, made.index) == (0, 0)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, GPU-abc")
    assert nvml.free_bytes(0) == 20 * GIB
    assert made.index == 3
    assert nvml.free_bytes(1) == 20 * GIB
    assert made.uuid == b"GPU-abc"
    library(code=1)
    assert nvml.device(0) is None


def test_this_process_is_found_among_others(library: Any) -> None:
    others = [(number, GIB) for number in range(2, 60)]
    made = library((1, GIB), *others, (os.getpid() + 100_000, 3 * GIB))
    assert nvml.process_bytes(0, os.getpid() + 100_000) == 3 * GIB
    assert (made.asked, made.open) == (2, 0)
    assert nvml.process_bytes(0, 10**8) is None  # as in a container with numbers of its own
    library((os.getpid(), 2**64 - 1))
    assert nvml.process_bytes(0) is None
    library((os.getpid(), GIB), code=3)
    assert nvml.process_bytes(0) is None


def test_no_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvml, "_library", lambda: None)
    assert nvml.device(0) is None
    assert nvml.process_bytes(0) is None
