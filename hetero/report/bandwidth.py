"""What memory, PCIe and the GPU's memory give in this very run: plain reads and copies that do nothing else.

Rates are GB/s of 1e9 bytes. Rounds of the CPU alone, PCIe alone and both at once take turns.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from hetero import cpu
from hetero.cpu import CpuExperts

READ_BYTES = 2**30
"""Of a round, more than any cache holds."""

HOST_BYTES = 512 * 2**20
"""Of pinned memory that a GPU reads in place."""

COPY_BYTES = 32 * 2**20

_LAUNCHES = 256  # kernels of the graph that times a launch


@dataclass
class Rates:
    """Rounds of each, empty where it does not exist here."""

    cpu: list[float] = field(default_factory=list)  # all threads reading experts where they lie
    pcie: list[float] = field(default_factory=list)  # a kernel reading pinned memory in place
    copy: list[float] = field(default_factory=list)  # pinned copies to the GPU
    cpu_of_both: list[float] = field(default_factory=list)
    pcie_of_both: list[float] = field(default_factory=list)
    gpu: list[float] = field(default_factory=list)  # a kernel reading the GPU's memory
    launch_us: list[float] = field(default_factory=list)  # of a small kernel in a graph, itself included


class CpuReads:
    """Plain reads of experts, on and on through all layers."""

    def __init__(self, layers: Sequence[CpuExperts]) -> None:
        self._layers = list(layers)
        self._layer = self._expert = 0

    def run(self, nbytes: int = READ_BYTES) -> int:
        """Read at least so many bytes, or all there are; returns how many."""
        done = 0
        for _ in range(len(self._layers)):
            layer = self._layers[self._layer]
            count = layer.spec.num_experts
            each = max(1, layer.nbytes // count)
            some = min(count - self._expert, max(1, -(-(nbytes - done) // each)))
            done += layer.plain_read(self._expert, some)
            self._expert += some
            if self._expert == count:
                self._layer, self._expert = (self._layer + 1) % len(self._layers), 0
            if done >= nbytes:
                break
        return done

    def gb_s(self) -> float:
        start = time.perf_counter()
        done = self.run()
        return done / (time.perf_counter() - start) / 1e9


class GpuReads:
    """Reads by a GPU of pinned memory and of its own. ``own``: memory of the device that is read where it is,
    uint8, larger than its caches; copies go to a small buffer, so that a model that fills the device leaves
    enough."""

    def __init__(self, own: Tensor) -> None:
        self.device = own.device
        self._own = own[: own.numel() // 8 * 8]
        self._host: Tensor = torch.ones(HOST_BYTES, dtype=torch.uint8, pin_memory=True)
        self._target = torch.empty(COPY_BYTES, dtype=torch.uint8, device=own.device)
        self.zero_copy()  # compiles

    def zero_copy(self) -> None:
        from hetero.ops.gpu.read import plain_read

        plain_read(self._host, self.device)

    def timed(self, call: Callable[[], object], repeats: int) -> float:
        """Seconds of one of ``repeats`` calls."""
        start, end = self._event(), self._event()
        start.record()
        for _ in range(repeats):
            call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end)) / 1e3 / repeats

    def pcie_gb_s(self) -> float:
        return self._host.nbytes / self.timed(self.zero_copy, 2) / 1e9

    def copy_gb_s(self) -> float:
        host = self._host[:COPY_BYTES]
        return COPY_BYTES / self.timed(lambda: self._target.copy_(host, non_blocking=True), 16) / 1e9

    def own_gb_s(self) -> float:
        from hetero.ops.gpu.read import plain_read

        return self._own.nbytes / self.timed(lambda: plain_read(self._own, self.device), 16) / 1e9

    def launch_us(self) -> float:
        """Of one of many small kernels in a graph."""
        small = self._target[:256]
        small.add_(1)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(_LAUNCHES):
                small.add_(1)
        graph.replay()
        return self.timed(graph.replay, 4) / _LAUNCHES * 1e6

    def beside(self, reads: CpuReads, repeats: int = 4) -> tuple[float, float]:
        """(CPU, PCIe) while both read."""
        start, end = self._event(), self._event()
        torch.cuda.synchronize(self.device)
        start.record()
        for _ in range(repeats):
            self.zero_copy()
        end.record()
        began, done = time.perf_counter(), 0
        while not end.query():
            done += reads.run(READ_BYTES // 8)
        seconds = time.perf_counter() - began
        return done / seconds / 1e9, repeats * self._host.nbytes / float(start.elapsed_time(end)) / 1e6

    @staticmethod
    def _event() -> Any:
        return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def measure(reads: CpuReads, gpu: GpuReads | None, rates: Rates, rounds: int = 3) -> None:
    """The CPU, PCIe, both, and the GPU's own memory, in turns; may be called again, before and after what is
    compared with it."""
    for _ in range(rounds):
        rates.cpu.append(reads.gb_s())
        if gpu is None:
            continue
        rates.pcie.append(gpu.pcie_gb_s())
        of_cpu, of_pcie = gpu.beside(reads)
        rates.cpu_of_both.append(of_cpu)
        rates.pcie_of_both.append(of_pcie)
        rates.copy.append(gpu.copy_gb_s())
        rates.gpu.append(gpu.own_gb_s())
        rates.launch_us.append(gpu.launch_us())


def threads_within(gb_s: float, reads: CpuReads, most: int, rounds: int = 2) -> int:
    """The largest number of threads of the pool, up to ``most``, that reads no more than ``gb_s``; the pool
    has it afterwards. One thread at least."""
    for count in range(most, 0, -1):
        cpu.set_threads(count)
        reads.run(READ_BYTES // 16)  # starts the threads
        if count == 1 or max(reads.gb_s() for _ in range(rounds)) <= gb_s:
            return count
    return 1
