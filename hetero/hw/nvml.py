"""What the driver's management library says of a GPU before anybody has a context there. By dlopen."""

from __future__ import annotations

import ctypes
import os


class _Memory(ctypes.Structure):
    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def free_bytes(index: int) -> int | None:
    """Free memory of the device that CUDA counts as ``index``, in bytes; None where nothing tells."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if library.nvmlInit_v2():
        return None
    try:
        handle, memory = ctypes.c_void_p(), _Memory()
        visible = [word.strip() for word in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
        word = visible[index] if visible != [""] and index < len(visible) else str(index)
        if word.isdigit():
            failed = library.nvmlDeviceGetHandleByIndex_v2(int(word), ctypes.byref(handle))
        else:
            failed = library.nvmlDeviceGetHandleByUUID(word.encode(), ctypes.byref(handle))
        if failed or library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
            return None
        return int(memory.free)
    finally:
        library.nvmlShutdown()
