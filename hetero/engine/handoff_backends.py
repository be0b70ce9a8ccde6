"""How the operations of the hand-off get into a stream: four ways behind one interface.

What each must guarantee is in docs/handoff.md; ``handoff_choice`` tries them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero import cpu
from hetero.core import MachineError
from hetero.engine.handoff_ptx import ARRAYS, PTX
from hetero.hw.cuda_driver import driver

LINE = 128
"""Bytes at whose multiples channel memory begins."""

GPU_LIMIT_S = 10.0
"""After so long a waiting kernel gives up; for layers the watchdog is much earlier."""

_BLOCK = 256
_MOST_BLOCKS = 512


class Backend(Protocol):
    """Records operations into the stream that is current, or is being captured. Addresses are the host's."""

    name: str
    why: str  # it was chosen

    def memory(self, nbytes: int) -> Tensor:
        """Zeroed uint8 [nbytes] on the CPU that the stream's operations reach, beginning at a line."""

    def device_view(self, memory: Tensor) -> Tensor:
        """The same bytes as a tensor of the device that the stream belongs to."""

    def send(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        """Copy tensors of the device into channel memory."""

    def receive(self, out: Tensor, address: int) -> None:
        """Copy channel memory into a tensor of the device."""

    def submit(self, flag: int) -> None:
        """Set a flag behind everything before."""

    def collect(self, flag: int, fault: int, layer: int) -> None:
        """Wait until a flag is 1, then clear it; what comes after sees what was written before the flag."""

    def synchronize(self) -> None:
        """Wait until nothing that was recorded or replayed runs any more."""


def _aligned(nbytes: int, make: Callable[[int], Tensor]) -> Tensor:
    raw = make(nbytes + LINE)
    return raw[-raw.data_ptr() % LINE :][:nbytes]


class ThreadBackend:
    """Twins of streams, for tests and machines without a GPU. ``stream(i)`` chooses where to record; a twin
    replays with the constants baked, like a captured graph."""

    name = "thread"

    def __init__(self, why: str = "asked for") -> None:
        self.why = why
        self.twins: list[Any] = [cpu.Twin()]
        self._at = 0
        self._kept: list[Tensor] = []  # what the recorded copies read and write

    def stream(self, index: int) -> None:
        while len(self.twins) <= index:
            self.twins.append(cpu.Twin())
        self._at = index

    @property
    def twin(self) -> Any:
        return self.twins[self._at]

    def memory(self, nbytes: int) -> Tensor:
        return _aligned(nbytes, lambda n: torch.zeros(n, dtype=torch.uint8))

    def device_view(self, memory: Tensor) -> Tensor:
        return memory

    def send(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        for address, tensor in pairs:
            self._kept.append(tensor)
            self.twin.copy(address, tensor.data_ptr(), tensor.nbytes)

    def receive(self, out: Tensor, address: int) -> None:
        self._kept.append(out)
        self.twin.copy(out.data_ptr(), address, out.nbytes)

    def submit(self, flag: int) -> None:
        self.twin.write(flag, 1)

    def collect(self, flag: int, fault: int, layer: int) -> None:
        self.twin.wait(flag, 1)
        self.twin.write(flag, 0)

    def launch(self) -> None:
        """Replay what was recorded, on every stream."""
        for twin in self.twins:
            twin.launch()

    def synchronize(self) -> None:
        for twin in self.twins:
            if not twin.synchronize(60.0):
                raise MachineError("the twin of a stream has not come through within a minute")


class _Mapped:
    """Pinned host memory as an array of the device, in the protocol that torch reads."""

    def __init__(self, memory: Tensor, address: int) -> None:
        self.memory = memory  # alive as long as tensors made from this
        self.__cuda_array_interface__ = {
            "shape": (memory.numel(),),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


class GpuBackend(ABC):
    """What the three have in common: memory, copies by one kernel, the current stream of a device."""

    name = ""
    limit_s = GPU_LIMIT_S

    def __init__(self, device: torch.device, why: str) -> None:
        self.why = why
        self.device = device
        self.index = torch.cuda.current_device() if device.index is None else device.index
        self._driver = driver()
        with torch.cuda.device(self.index):
            torch.zeros(1, device="cuda")  # the context is current from here on
            module = self._driver.load_module(PTX)
            self._send = self._driver.function(module, "hetero_send")
            self._collect = self._driver.function(module, "hetero_collect")
            self._bases: list[tuple[int, int, int]] = []  # host address, bytes, device address
            # Kernels are loaded at their first launch, which a capture would not survive.
            self._launch_send([], 0)
            words = self.memory(2 * LINE)
            words[0] = 1  # a flag that is set
            self.collect_in_time(words.data_ptr(), words.data_ptr() + LINE, 0)
            torch.cuda.synchronize()
            self._bases.clear()

    def _stream(self) -> int:
        return int(torch.cuda.current_stream(self.index).cuda_stream)

    def _on_device(self, host: int) -> int:
        for start, nbytes, device in self._bases:
            if start <= host < start + nbytes:
                return device + host - start
        raise ValueError("an address outside the memory that this backend gave")

    def memory(self, nbytes: int) -> Tensor:
        with torch.cuda.device(self.index):
            found = _aligned(nbytes, lambda n: torch.empty(n, dtype=torch.uint8, pin_memory=True).zero_())
            self._bases.append((found.data_ptr(), nbytes, self._driver.device_address(found.data_ptr())))
        return found

    def device_view(self, memory: Tensor) -> Tensor:
        mapped = _Mapped(memory, self._on_device(memory.data_ptr()))
        return torch.as_tensor(mapped, device=torch.device("cuda", self.index))

    def _launch_send(self, arrays: Sequence[tuple[int, int, int]], flag: int) -> None:
        """(to, from, bytes) of each array, device addresses."""
        if any(nbytes % 4 or (to | source) % 4 for to, source, nbytes in arrays):
            raise ValueError("copies are of whole 32-bit words")
        padded = [*arrays, *[(0, 0, 0)] * (ARRAYS - len(arrays))]
        words = sum(nbytes for _, _, nbytes in arrays) // 4
        blocks = 1 if flag else max(1, min(_MOST_BLOCKS, -(-words // _BLOCK)))
        arguments: list[Any] = []
        for to, source, nbytes in padded:
            arguments += [c_uint64(to), c_uint64(source), c_uint32(nbytes // 4)]
        self._driver.launch(self._send, blocks, _BLOCK, self._stream(), [*arguments, c_uint64(flag)])

    def send(self, pairs: Sequence[tuple[int, Tensor]]) -> None:
        arrays = [(self._on_device(to), tensor.data_ptr(), tensor.nbytes) for to, tensor in pairs]
        for first in range(0, len(arrays), ARRAYS):
            self._launch_send(arrays[first : first + ARRAYS], 0)

    def receive(self, out: Tensor, address: int) -> None:
        self._launch_send([(out.data_ptr(), self._on_device(address), out.nbytes)], 0)

    @abstractmethod
    def submit(self, flag: int) -> None: ...

    @abstractmethod
    def collect(self, flag: int, fault: int, layer: int) -> None: ...

    def collect_in_time(self, flag: int, fault: int, layer: int) -> None:
        """``collect`` by a kernel of one thread that looks at the clock: after ``limit_s`` it sets ``fault``
        to ``layer`` + 1, leaves the flag, and the stream goes on, whatever the process's threads wait for."""
        arguments = [
            c_uint64(self._on_device(flag)),
            c_uint64(self._on_device(fault)),
            c_uint32(layer + 1),
            c_uint64(int(self.limit_s * 1e9)),
        ]
        self._driver.launch(self._collect, 1, 1, self._stream(), arguments)

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.index)


class MemopBackend(GpuBackend):
    """Waits and writes of the stream itself."""

    name = "memop"

    def __init__(self, device: torch.device, why: str) -> None:
        super().__init__(device, why)
        if reason := self._driver.no_memory_operations(self.index):
            raise MachineError(reason)

    def submit(self, flag: int) -> None:
        self._driver.write_value(self._stream(), self._on_device(flag), 1)

    def collect(self, flag: int, fault: int, layer: int) -> None:
        address = self._on_device(flag)
        self._driver.wait_value(self._stream(), address, 1)
        self._driver.write_value(self._stream(), address, 0)


class SpinBackend(GpuBackend):
    """Kernels of one thread that write a flag, and that wait for one up to a time."""

    name = "spin"

    def submit(self, flag: int) -> None:
        self._launch_send([], self._on_device(flag))

    def collect(self, flag: int, fault: int, layer: int) -> None:
        self.collect_in_time(flag, fault, layer)


class HostFuncBackend(GpuBackend):
    """C functions that the driver calls between the stream's operations."""

    name = "hostfunc"

    def submit(self, flag: int) -> None:
        self._on_device(flag)  # the function is given the host's address, but only of a flag
        self._driver.launch_host(self._stream(), cpu.HOST_SUBMIT, flag)

    def collect(self, flag: int, fault: int, layer: int) -> None:
        self._driver.launch_host(self._stream(), cpu.HOST_COLLECT, flag)
