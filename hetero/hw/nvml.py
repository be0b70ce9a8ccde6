"""What the driver's management library says of GPUs, without a context there. By dlopen."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

_NAME_BYTES = 96
_MOST_PROCESSES = 4096
_TOO_FEW = 7  # NVML_ERROR_INSUFFICIENT_SIZE
_UNKNOWN = 2**64 - 1


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


class _Process(ctypes.Structure):
    _fields_ = (
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    )


class Device(NamedTuple):
    """A GPU before anybody has a context there; bytes."""

    name: str
    total: int
    free: int


def free_bytes(index: int) -> int | None:
    """Free memory of the device that CUDA counts as ``index``, in bytes; None where nothing tells."""
    found = device(index)
    return None if found is None else found.free


def device(index: int) -> Device | None:
    """The device that CUDA counts as ``index``; None where nothing tells."""
    with _opened(index) as (library, handle):
        memory, name = _Memory(), ctypes.create_string_buffer(_NAME_BYTES)
        if library is None or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        if library.nvmlDeviceGetName(handle, name, _NAME_BYTES):
            return None
        return Device(name.value.decode(errors="replace"), int(memory.total), int(memory.free))


def process_bytes(index: int, pid: int | None = None) -> int | None:
    """Memory of the device that a process (None: this one) has; None where nothing tells, as in most
    containers, which have numbers of their own for processes, and on some systems at all."""
    with _opened(index) as (library, handle):
        if library is None or not hasattr(library, "nvmlDeviceGetComputeRunningProcesses_v3"):
            return None
        count = ctypes.c_uint(16)
        while True:
            room = (_Process * count.value)()
            code = library.nvmlDeviceGetComputeRunningProcesses_v3(handle, ctypes.byref(count), room)
            if code != _TOO_FEW or count.value > _MOST_PROCESSES:
                break
            count.value = max(2 * len(room), count.value)
        if code:
            return None
        mine = os.getpid() if pid is None else pid
        used = [int(one.used) for one in room[: count.value] if one.pid == mine]
        return used[0] if used and used[0] not in (0, _UNKNOWN) else None


@contextmanager
def _opened(index: int) -> Iterator[tuple[Any, Any]]:
    """The library and the device's handle; (None, None) where one of them is not there."""
    library = _library()
    if library is None or library.nvmlInit_v2():
        yield None, None
        return
    try:
        handle = ctypes.c_void_p()
        visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        word = visible[index] if visible != [""] and index < len(visible) else str(index)
        if word.isdigit():
            failed = library.nvmlDeviceGetHandleByIndex_v2(int(word), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        yield (None, None) if failed else (library, handle)
    finally:
        library.nvmlShutdown()


def _library() -> Any:
    try:
        return ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
