"""How much of a GPU's memory this process has, as the driver tells it, and how much more it may take."""

from __future__ import annotations

import torch

from hetero.core import MachineError
from hetero.hw.memory import gib
from hetero.hw.nvml import free_bytes, process_bytes

MARGIN = 256 << 20
"""Left alone without a cap: what the driver and others on the device may still want."""

MODULES = 128 << 20
"""Of a cap, that torch leaves to what the driver takes besides, later on: kernels that are used for the first
time, graphs of other steps. 69 MB in a run of ``hetero bench`` (docs/perf.md)."""

DRIVER = 256 << 20
"""What the driver takes of a device at most for a context, and counts as no process's."""

BESIDES = 3 << 30
"""What a process takes of a GPU at most besides torch's own; where the driver says more, or less than torch
has, it speaks of a process of another container that has the same number."""

CONTEXT = 640 << 20
"""What a context is taken for where it was there before anybody could look."""


class Vram:
    """Everything that this process allocates on ``device``, its context included, from the driver's view.
    ``cap``: most bytes of it; None: what is free less a margin.

    That is what the driver's management library says of this process, and what the device has less since its
    context was made that it says of none. Where it does not tell
    (``by_process`` is false), it is what is in use on the device less what was before: make it before the
    process has used the device, and what others take there meanwhile counts as ours.
    """

    def __init__(self, device: str | torch.device, cap: int | None = None) -> None:
        self.device = torch.device(device)
        self.cap = cap
        # Asking torch makes a context, so the driver is asked before where that is still possible.
        begun: bool = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        known = None if begun else free_bytes(self.device.index or 0)
        free, _ = torch.cuda.mem_get_info(self.device)
        own = CONTEXT + torch.cuda.memory_reserved(self.device)
        self._free_before = free + own if known is None else known
        self._driver = 0
        told = self._told()
        self.by_process = told is not None
        if told is not None and known is not None:
            # Of a card that shows another program's window nothing may be missing either.
            self._driver = max(0, min(known - free - told, DRIVER))
        if cap is not None and cap > (total := self._total()):
            raise MachineError(f"--vram {gib(cap)}: {self.device} has {gib(total)}")

    def _total(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    @property
    def used(self) -> int:
        """Bytes that this process has taken."""
        told = self._told() if self.by_process else None
        if told is not None:
            return told
        return max(0, self._free_before - int(torch.cuda.mem_get_info(self.device)[0]))

    def _told(self) -> int | None:
        """What the driver says of this process, where that can be."""
        told = process_bytes(self.device.index or 0)
        besides = None if told is None else told - torch.cuda.memory_reserved(self.device)
        return (
            told + self._driver
            if told is not None and besides is not None and 0 <= besides <= BESIDES
            else None
        )

    @property
    def left(self) -> int:
        """Bytes that it may still take; what torch keeps for itself counts as taken."""
        free = int(torch.cuda.mem_get_info(self.device)[0]) - MARGIN
        return max(0, free if self.cap is None else min(free, self.cap - self.used))

    @property
    def basis(self) -> str:
        """For a message: whose memory ``used`` counts."""
        return "by this process" if self.by_process else "since the start, by whoever took it"

    def require(self, needed: int, what: str) -> None:
        """Raises MachineError where less is left."""
        left = self.left
        if needed > left:
            raise MachineError(f"{what}: {gib(needed)} on {self.device}, {gib(left)} is left{self._why()}")

    def hold(self) -> None:
        """Keep torch within the cap from now on: it gives back what it keeps, and then fails, before it
        passes it; without a cap it may take all. Raises MachineError where more is in use already."""
        if self.cap is None:
            torch.cuda.set_per_process_memory_fraction(1.0, self.device)
            return
        used = self.used
        if used > self.cap:
            raise MachineError(f"{gib(used)} of {self.device} are in use, more than --vram {gib(self.cap)}")
        besides = used - torch.cuda.memory_reserved(self.device) + MODULES
        share = max(0, self.cap - besides) / self._total()
        torch.cuda.set_per_process_memory_fraction(share, self.device)

    def told(self) -> str:
        """For a message: what is in use, and what is left."""
        return f"{gib(self.used)} of {self.device} are in use, {gib(self.left)} is left{self._why()}"

    def _why(self) -> str:
        return "" if self.cap is None else f" of --vram {gib(self.cap)}"
