"""A place in a captured step where the stream waits until the host has brought what comes late."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from hetero.engine.handoff_backends import LINE, GpuBackend


class Gate(Protocol):
    """Of steps on several lanes, of which each passes its own once a step."""

    def record(self, lane: int) -> None:
        """Into the current stream: wait until it is open, and close it."""

    def shut(self, lane: int) -> None:
        """As in the beginning, whatever became of the steps before; none is on its way."""

    def open(self, lane: int) -> None:
        """What the host wrote before, the stream finds behind the gate."""

    def failed(self, lane: int) -> bool:
        """Whether the last step went on though nobody had opened; both are then as in the beginning."""


class FlagGate:
    """By flags in a backend's memory, the host in the worker's place, and whatever the backend's name by its
    kernel with a clock: the thread that opens a gate may be kept from it by the driver, which for another
    thread of the process waits until the device is idle, and no watchdog frees it."""

    def __init__(self, backend: GpuBackend, lanes: int) -> None:
        self._backend, self._lanes = backend, lanes
        self._memory = backend.memory(2 * lanes * LINE)
        self._base = self._memory.data_ptr()
        # Aligned words, which a processor of x86 stores in the order of the program.
        self._words = self._memory.numpy().view(np.uint32)[:: LINE // 4]

    def record(self, lane: int) -> None:
        fault = self._base + (self._lanes + lane) * LINE
        self._backend.collect_in_time(self._base + lane * LINE, fault, 0)

    def shut(self, lane: int) -> None:
        self._words[self._lanes + lane] = self._words[lane] = 0

    def open(self, lane: int) -> None:
        self._words[lane] = 1

    def failed(self, lane: int) -> bool:
        if not self._words[self._lanes + lane]:
            return False
        self.shut(lane)
        return True
