"""Streams, events and what crosses between the host and a device beside a stream's own work. On a CPU, which
has no streams, everything is done at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hetero.hw.cuda_driver import driver
from hetero.ops.gpu import hybrid_kernels
from hetero.ops.gpu.tiers import Ints

UP, DOWN = 0, 1
"""Streams: to the device, whose copies wait for nothing but their target; to the host, behind what the
current stream holds when they are asked for."""

_WIDTH = 1024  # numbers of a program
_FLAGS = 64  # more than layers whose sums are awaited at a time


class Lanes:
    """The side streams of one device, for one thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cuda = device.type == "cuda"
        self._streams = [torch.cuda.Stream(device) for _ in (UP, DOWN)] if self.cuda else []  # type: ignore[no-untyped-call]
        self._lent: deque[tuple[Any, Tensor]] = deque()  # host memory that kernels read until an event

    @contextmanager
    def stream(self, which: int) -> Iterator[None]:
        if not self.cuda:
            yield
            return
        stream = self._streams[which]
        if which == DOWN:
            stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            yield

    def event(self, timed: bool = False) -> Any:
        """Of what the current stream holds; None on a CPU."""
        if not self.cuda:
            return None
        event = torch.cuda.Event(enable_timing=timed)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def wait(self, event: Any) -> None:
        """The current stream waits for an event, if it is one."""
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy that is on its way, in the current stream."""
        if not self.cuda:
            return tensor.clone()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        tensor.record_stream(torch.cuda.current_stream(self.device))
        return host.copy_(tensor, non_blocking=True)

    def to_device(self, array: Ints) -> Tensor:
        """A few numbers; by a kernel, since a copy would wait behind experts that are on their way."""
        host = torch.from_numpy(array)
        if not self.cuda:
            return host
        host = host.pin_memory()
        out = torch.empty(host.shape, dtype=host.dtype, device=self.device)
        hybrid_kernels.pull[(-(-len(host) // _WIDTH),)](host, out, len(host), WIDTH=_WIDTH)
        self.lend(host)
        return out

    def add_host(self, out: Tensor, result: Tensor) -> None:
        """Add what lies in pinned host memory, read in place: a copy would wait behind the next layer's
        experts, which are on their way by now."""
        hybrid_kernels.add[(-(-out.numel() // _WIDTH),)](
            out, result, out, out, out.numel(), HAS_OWN=True, HAS_EXTRA=False, WIDTH=_WIDTH
        )
        if self.cuda:
            # Its memory is given back once the kernel has read it.
            self.lend(result)

    def lend(self, host: Tensor) -> None:
        """Keep what kernels in the current stream read from here, and let go of what they have read."""
        while self._lent and self._lent[0][0].query():
            self._lent.popleft()
        self._lent.append((self.event(), host))


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


class Flags:
    """Words that a stream waits for and a thread of the host sets, so that who launches kernels need not wait
    for that thread. ``able``: whether the device's streams can."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.able = device, False
        if device.type == "cuda":
            self.able = driver().no_memory_operations(_index(device)) is None
        self._ticket = 0
        if self.able:
            self._words = torch.zeros(_FLAGS, dtype=torch.int32, pin_memory=True)
            self._address = driver().device_address(self._words.data_ptr())
            self._numbers = self._words.numpy()

    def take(self) -> int:
        """A new ticket."""
        self._ticket += 1
        return self._ticket

    def set(self, ticket: int) -> None:
        """By any thread; what it wrote before can then be read by who waited."""
        self._numbers[ticket % _FLAGS] = ticket

    def wait(self, ticket: int) -> None:
        """The current stream waits until it is set."""
        stream = int(torch.cuda.current_stream(self.device).cuda_stream)
        driver().wait_value(stream, self._address + 4 * (ticket % _FLAGS), ticket)
