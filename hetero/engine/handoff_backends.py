"""How the operations of the hand-off get into a stream: four ways behind one interface.

What each must guarantee is in docs/handoff.md.
"""

from __future__ import annotations

import logging
import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from ctypes import c_uint32, c_uint64
from typing import Any, Protocol

import torch
from torch import Tensor

from hetero import cpu
from hetero.core import HeteroError, InputError, MachineError
from hetero.engine.handoff_ptx import ARRAYS, PTX
from hetero.hw.cuda_driver import driver

log = logging.getLogger("hetero.handoff")

GPU_BACKENDS = ("memop", "spin", "hostfunc")

LINE = 128
"""Bytes at whose multiples channel memory begins."""

GPU_LIMIT_S = 10.0
"""After so long a waiting kernel gives up; for layers the watchdog is much earlier."""

_BLOCK = 256
_MOST_BLOCKS = 512
_TRIAL_S = 2.0
_LAYERS, _REPLAYS = 50, 8  # of a timed trial


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


_GPU: dict[str, type[GpuBackend]] = {one.name: one for one in (MemopBackend, SpinBackend, HostFuncBackend)}


class Work(Protocol):
    """A trial of a backend with real work; ``handoff_trial.Trial``."""

    def layer_us(self) -> float: ...
    def close(self) -> None: ...


def make_backend(
    name: str, device: torch.device | str, work: Callable[[Backend], Work] | None = None
) -> Backend:
    """The backend of that name, or for "auto" the faster one of memop and spin, else hostfunc, of those that
    pass a trial. ``work``: what they are timed with; None: layers that have none.

    Raises InputError for a name that does not exist or does not fit the device, MachineError where the
    machine cannot do what was named.
    """
    device = torch.device(device)
    if name not in ("auto", "thread", *GPU_BACKENDS):
        raise InputError(f"no hand-off '{name}'; valid: auto, {', '.join(GPU_BACKENDS)}, thread")
    if device.type == "cpu":
        if name not in ("auto", "thread"):
            raise InputError(f"hand-off '{name}' needs a CUDA device, not {device}")
        return ThreadBackend("asked for" if name == "thread" else "there is no GPU in this run")
    if device.type != "cuda" or name == "thread":
        raise InputError(f"hand-off '{name}' does not work on {device}")
    if not torch.cuda.is_available():
        raise MachineError(f"hand-off on {device}: torch sees no CUDA device")
    if name != "auto":
        return _tried(name, device, "asked for")
    backend = _fastest(device, work)
    log.info("hand-off by %s (%s)", backend.name, backend.why)
    return backend


def _fastest(device: torch.device, work: Callable[[Backend], Work] | None) -> GpuBackend:
    """Of memop and spin, as measured here; hostfunc only where neither works."""
    refused: list[str] = []
    trials: list[tuple[GpuBackend, Work]] = []
    try:
        for name in GPU_BACKENDS:
            if name == "hostfunc" and trials:
                break
            try:
                backend = _tried(name, device, "; ".join(refused))
                trial: Work = _NoWork(backend) if work is None else work(backend)
                trials.append((backend, trial))
                trial.layer_us()  # what is only slow once
            except (HeteroError, RuntimeError) as error:
                trials = [one for one in trials if one[0].name != name]
                refused.append(f"{name}: {error}")
        if not trials:
            raise MachineError(f"no hand-off works on {device}: {'; '.join(refused)}")
        # In turns, so that what else the machine does meets all of them.
        rounds = [[trial.layer_us() for _, trial in trials] for _ in range(_REPLAYS)]
    finally:
        for _, trial in trials:
            trial.close()
    times = [statistics.median(column) for column in zip(*rounds, strict=True)]
    best = min(zip(times, (backend for backend, _ in trials), strict=True), key=lambda one: one[0])[1]
    words = [f"{backend.name} {us:.1f} us a layer" for us, (backend, _) in zip(times, trials, strict=True)]
    told = ", ".join(words) + ("" if work is None else " with its experts")
    best.why = "; ".join([told, *refused])
    return best


def _tried(name: str, device: torch.device, why: str) -> GpuBackend:
    """A backend that has captured and replayed its operations once. Raises MachineError where they fail."""
    try:
        backend = _GPU[name](device, why)
        _trial(backend)
    except RuntimeError as error:  # of torch
        raise MachineError(f"hand-off '{name}' on {device}: {error}") from None
    return backend


def _trial(backend: GpuBackend) -> None:
    """A captured graph, replayed twice, that sets one flag, and waits for another and clears it."""
    memory = backend.memory(3 * LINE)
    flags = memory.view(torch.int32)[:: LINE // 4]
    submit, done, fault = (memory.data_ptr() + LINE * i for i in range(3))
    with torch.cuda.device(backend.index):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            backend.submit(submit)
            backend.collect(done, fault, 0)
        for _ in range(2):
            flags[0], flags[1] = 0, 1
            graph.replay()
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record()
            limit = time.monotonic() + _TRIAL_S
            while not event.query():  # type: ignore[no-untyped-call]
                if time.monotonic() > limit:
                    raise MachineError("a captured trial did not come through")
                time.sleep(1e-4)
            if flags.tolist() != [1, 0, 0]:
                raise MachineError(f"a captured trial left the flags {flags.tolist()}, not [1, 0, 0]")


class _NoWork:
    """A captured graph of _LAYERS layers, with a thread that answers at once in the worker's place."""

    def __init__(self, backend: GpuBackend) -> None:
        self._backend = backend
        self._memory = memory = backend.memory((2 * _LAYERS + 1) * LINE)
        submit = [memory.data_ptr() + LINE * i for i in range(_LAYERS)]
        done = [memory.data_ptr() + LINE * (_LAYERS + i) for i in range(_LAYERS)]
        fault = memory.data_ptr() + LINE * 2 * _LAYERS
        self._twin = cpu.Twin()
        for asked, answered in zip(submit, done, strict=True):
            self._twin.wait(asked, 1)
            self._twin.write(asked, 0)
            self._twin.write(answered, 1)
        with torch.cuda.device(backend.index):
            self._start, self._end = (
                torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
                for _ in range(2)
            )
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, capture_error_mode="thread_local"):
                for layer, (asked, answered) in enumerate(zip(submit, done, strict=True)):
                    backend.submit(asked)
                    backend.collect(answered, fault, layer)

    def layer_us(self) -> float:
        """Raises MachineError where the replay does not come through."""
        with torch.cuda.device(self._backend.index):
            self._twin.launch()
            self._start.record()
            self._graph.replay()
            self._end.record()
            if not self._twin.synchronize(_TRIAL_S):
                words = self._memory.view(torch.int32)[:: LINE // 4]
                words[_LAYERS : 2 * _LAYERS] = 1  # frees the device
                raise MachineError("a timed trial did not come through")
            self._end.synchronize()
            return float(self._start.elapsed_time(self._end)) * 1e3 / _LAYERS

    def close(self) -> None: ...
