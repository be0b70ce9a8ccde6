"""The few calls of the CUDA driver that torch does not offer, by dlopen: no toolkit is needed."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import byref, c_char_p, c_int, c_size_t, c_uint, c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from hetero.core import MachineError

# Numbers of cuda.h.
STREAM_MEM_OPS_V1 = 92
POINTER_ON_DEVICE = 3
WAIT_EQ = 0x1
WRITE_DEFAULT = 0x0  # with a fence of system scope before the write

_PROTOTYPES: dict[str, list[Any]] = {
    "cuInit": [c_uint],
    "cuDriverGetVersion": [c_void_p],
    "cuDeviceGet": [c_void_p, c_int],
    "cuDeviceGetAttribute": [c_void_p, c_int, c_int],
    "cuPointerGetAttribute": [c_void_p, c_int, c_uint64],
    "cuModuleLoadData": [c_void_p, c_char_p],
    "cuModuleGetFunction": [c_void_p, c_void_p, c_char_p],
    "cuLaunchKernel": [c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p],
    "cuLaunchHostFunc": [c_void_p, c_void_p, c_void_p],
    "cuMemcpyHtoDAsync_v2": [c_uint64, c_void_p, c_size_t, c_void_p],
    "cuGraphGetNodes": [c_void_p, c_void_p, c_void_p],
    "cuGraphNodeGetType": [c_void_p, c_void_p],
    "cuGetErrorString": [c_int, c_void_p],
}
# Kinds of a graph's nodes, by number.
_NODES = (
    "kernel", "copy", "set", "host", "graph", "empty", "event", "event", "semaphore", "semaphore", "alloc",
    "free", "memop", "conditional",
)  # fmt: skip
# Missing in older drivers.
_MEMORY_OPERATIONS = [c_void_p, c_uint64, c_uint32, c_uint]


class Driver:
    """libcuda, initialised. Calls act in the context that is current on the calling thread, which torch makes
    current when it uses a device. Every call raises MachineError with the driver's words where it fails."""

    def __init__(self) -> None:
        try:
            self._lib = ctypes.CDLL("libcuda.so.1")
        except OSError as error:
            raise MachineError(f"no CUDA driver: {error}") from None
        for name, arguments in _PROTOTYPES.items():
            function = getattr(self._lib, name, None)
            if function is None:
                raise MachineError(f"the CUDA driver is too old: it has no {name}")
            function.argtypes = arguments
            function.restype = c_int
        self._wait = self._either("cuStreamWaitValue32")
        self._write = self._either("cuStreamWriteValue32")
        self._call("cuInit", 0)

    def _either(self, name: str) -> Any | None:
        """The second version of a memory operation, else the first, else None."""
        function = getattr(self._lib, f"{name}_v2", None) or getattr(self._lib, name, None)
        if function is not None:
            function.argtypes = _MEMORY_OPERATIONS
            function.restype = c_int
        return function

    def _check(self, what: str, code: int) -> None:
        if code == 0:
            return
        text = c_char_p()
        self._lib.cuGetErrorString(code, byref(text))
        words = text.value.decode() if text.value else "unknown error"
        raise MachineError(f"{what}: {words} (CUDA error {code})")

    def _call(self, name: str, *arguments: Any) -> None:
        self._check(name, getattr(self._lib, name)(*arguments))

    def version(self) -> int:
        """The CUDA version that the driver serves, 13000 for 13.0."""
        value = c_int()
        self._call("cuDriverGetVersion", byref(value))
        return value.value

    def attribute(self, attribute: int, device: int) -> int:
        """An attribute of a device, by its number in cuda.h; 0 where the driver does not know it."""
        handle, value = c_int(), c_int()
        self._call("cuDeviceGet", byref(handle), device)
        code = self._lib.cuDeviceGetAttribute(byref(value), attribute, handle.value)
        return value.value if code == 0 else 0

    def no_memory_operations(self, device: int) -> str | None:
        """Why a device's streams cannot wait for values in memory and write them; None where they can."""
        if self._wait is None or self._write is None:
            return "the driver has no cuStreamWaitValue32"
        if hasattr(self._lib, "cuStreamWaitValue32_v2") or self.attribute(STREAM_MEM_OPS_V1, device):
            return None
        return "the driver has stream memory operations switched off"

    def wait_value(self, stream: int, address: int, value: int) -> None:
        """The stream waits until the uint32 at a device address equals ``value``."""
        assert self._wait is not None
        self._check("cuStreamWaitValue32", self._wait(stream, address, value, WAIT_EQ))

    def write_value(self, stream: int, address: int, value: int) -> None:
        """The stream writes a uint32, after a fence over all that came before it."""
        assert self._write is not None
        self._check("cuStreamWriteValue32", self._write(stream, address, value, WRITE_DEFAULT))

    def copy_up(self, to: int, from_: int, nbytes: int, stream: int) -> None:
        """Copy pinned host memory, within one registration, to a device address: in the stream, a few
        microseconds of the caller."""
        code = self._lib.cuMemcpyHtoDAsync_v2(to, from_, nbytes, stream)
        if code:
            self._check("cuMemcpyHtoDAsync", code)

    def launch_host(self, stream: int, function: int, argument: int) -> None:
        """The stream calls ``void function(void* argument)``, which may not call CUDA."""
        self._call("cuLaunchHostFunc", stream, function, argument)

    def graph_nodes(self, graph: int) -> dict[str, int]:
        """How many nodes of each kind a captured graph has: kernel, copy, set, host, memop and others."""
        count = c_size_t()
        self._call("cuGraphGetNodes", graph, None, byref(count))
        nodes = (c_void_p * count.value)()
        self._call("cuGraphGetNodes", graph, nodes, byref(count))
        found: dict[str, int] = {}
        for node in nodes:
            kind = c_int()
            self._call("cuGraphNodeGetType", node, byref(kind))
            name = _NODES[kind.value] if 0 <= kind.value < len(_NODES) else "other"
            found[name] = found.get(name, 0) + 1
        return found

    def device_address(self, host: int) -> int:
        """Where the device sees pinned host memory."""
        found = c_uint64()
        self._call("cuPointerGetAttribute", byref(found), POINTER_ON_DEVICE, host)
        return found.value

    def load_module(self, ptx: str) -> int:
        """Compile and load PTX text into the current context."""
        module = c_void_p()
        self._call("cuModuleLoadData", byref(module), ptx.encode())
        return module.value or 0

    def function(self, module: int, name: str) -> int:
        found = c_void_p()
        self._call("cuModuleGetFunction", byref(found), module, name.encode())
        return found.value or 0

    def launch(self, function: int, grid: int, block: int, stream: int, arguments: Sequence[Any]) -> None:
        """A kernel of one dimension; ``arguments`` are ctypes values in the order of its parameters."""
        pointers = (c_void_p * len(arguments))(*(ctypes.addressof(one) for one in arguments))
        self._call("cuLaunchKernel", function, grid, 1, 1, block, 1, 1, 0, stream, pointers, None)


@cache
def driver() -> Driver:
    """The one of this process. Raises MachineError where there is none."""
    return Driver()
