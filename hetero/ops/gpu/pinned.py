"""The CPU's experts as a GPU sees them: one view over their memory, pinned and mapped on CUDA."""

from __future__ import annotations

import resource
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hetero.core import InputError, MachineError
from hetero.cpu import CpuExperts
from hetero.hw.cuda_driver import driver
from hetero.hw.memory import gib

THREADS = 8
"""Threads that pin: one alone takes half a minute for 64 GiB."""

PIECE = 256 << 20
"""Bytes that are pinned at a time, about; a piece is of whole experts, since no copy may cross its end."""

# Of cudaHostRegister: for every context, and at an address of the device.
_PORTABLE_AND_MAPPED = 1 | 2
_NO_MEMORY = 2


class PinnedArena:
    """``view``: uint8 [experts, stride] over the memory of ``experts``, each whole expert contiguous.

    On CUDA the memory is pinned and mapped, at the same address for the device; ``close`` undoes it, which
    must come before the memory goes. ``pieces``: copies to the device may not cross multiples of so many
    experts. Raises InputError where a placement cuts experts over memory nodes, MachineError where the
    memory cannot be pinned.
    """

    def __init__(
        self, experts: CpuExperts, device: str | torch.device, *, pool: ThreadPoolExecutor | None = None
    ) -> None:
        self.experts, self.device = experts, torch.device(device)
        count = experts.spec.num_experts
        memory = experts.view(0, count)
        if memory is None:
            raise InputError(
                "experts that are cut over memory nodes cannot be read by a GPU; 'numa: off' or 'numa: node "
                "N' keeps them whole"
            )
        self.view: Tensor = torch.from_numpy(np.frombuffer(memory, dtype=np.uint8)).view(count, -1)
        self.pieces = max(1, PIECE // self.view.shape[1])
        self._registered: list[int] = []
        if self.device.type == "cuda":
            self._register(pool)

    def _register(self, pool: ThreadPoolExecutor | None) -> None:
        with torch.cuda.device(self.device):
            torch.zeros(1, device=self.device)  # the context is there from here on
            starts = range(0, len(self.view), self.pieces)
            parts = [self.view[start : start + self.pieces] for start in starts]
            own = pool or ThreadPoolExecutor(THREADS, thread_name_prefix="hetero-pin")
            try:
                codes = list(own.map(self._register_one, parts))
            finally:
                if pool is None:
                    own.shutdown()
            self._registered = [part.data_ptr() for part, code in zip(parts, codes, strict=True) if not code]
            bad = next((code for code in codes if code), 0)
            if bad:
                self.close()
                raise MachineError(_why(bad, self.view.numel(), self.device))
            for address in self._registered:
                if driver().device_address(address) != address:
                    self.close()
                    raise MachineError(
                        f"{self.device} sees pinned memory at addresses of its own; experts cannot be read "
                        "in place there"
                    )

    def _register_one(self, part: Tensor) -> int:
        """0 or the error's number."""
        with torch.cuda.device(self.device):
            found: Any = torch.cuda.cudart().cudaHostRegister(  # type: ignore[no-untyped-call]
                part.data_ptr(), part.numel(), _PORTABLE_AND_MAPPED
            )
        return int(found)

    def close(self) -> None:
        """Undo the pinning. Nothing on the device may use the memory any more."""
        registered, self._registered = self._registered, []
        for address in registered:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]

    def __del__(self) -> None:
        if getattr(self, "_registered", None):
            self.close()


def pin_all(experts: Sequence[CpuExperts], device: str | torch.device) -> list[PinnedArena]:
    """Arenas of all layers, pinned side by side: seconds for 64 GiB. Raises as ``PinnedArena`` does, with
    nothing left pinned."""
    done: list[PinnedArena] = []
    with ThreadPoolExecutor(THREADS, thread_name_prefix="hetero-pin") as pool:
        try:
            done += [PinnedArena(one, device, pool=pool) for one in experts]
        except BaseException:
            for arena in done:
                arena.close()
            raise
    return done


def _why(code: int, nbytes: int, device: torch.device) -> str:
    """What a user can do about memory that is not pinned."""
    limit = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]
    told = "unlimited" if limit == resource.RLIM_INFINITY else gib(limit)
    what = f"{gib(nbytes)} of experts cannot be pinned for {device} (CUDA error {code})"
    if code == _NO_MEMORY or limit != resource.RLIM_INFINITY:
        return (
            f"{what}: the limit of locked memory is {told}; raise it (ulimit -l unlimited, in a container "
            "--ulimit memlock=-1), free memory, or leave the GPU without experts (cache: 0, share: 0)"
        )
    return f"{what}; without it the GPU can hold no experts (cache: 0, share: 0)"
