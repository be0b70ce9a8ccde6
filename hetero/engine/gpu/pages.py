"""Pages of keys and values: which a sequence has, in a table that the device reads."""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.core import HeteroError
from hetero.decode.inputs import PAGE


class Pages:
    """Pages for ``slots`` sequences of up to ``context`` tokens each, ``total`` in all (None: as many as all
    of them may need). ``table``: int32 [slots, pages of one sequence] on the device."""

    def __init__(self, slots: int, context: int, device: torch.device, total: int | None = None) -> None:
        most = -(-context // PAGE)
        self.context, self.total = context, slots * most if total is None else total
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(slots, most, dtype=torch.int32, pin_memory=on_gpu)
        self.table: Tensor = self._host.to(device) if on_gpu else self._host
        self._free = list(range(self.total - 1, -1, -1))
        self._held: list[list[int]] = [[] for _ in range(slots)]

    @property
    def free(self) -> int:
        return len(self._free)

    def grow(self, slot: int, tokens: int) -> None:
        """Room for ``tokens`` tokens in all. Raises HeteroError where context or pages end."""
        if tokens > self.context:
            raise HeteroError(f"{tokens} tokens of a sequence, and a slot holds {self.context}")
        held = self._held[slot]
        first, last = len(held), -(-tokens // PAGE)
        if last <= first:
            return
        if last - first > len(self._free):
            raise HeteroError(f"all {self.total} pages of keys and values are taken")
        held += [self._free.pop() for _ in range(first, last)]
        self._host[slot, first:last] = torch.tensor(held[first:], dtype=torch.int32)
        if self.table is not self._host:
            self.table[slot, first:last].copy_(self._host[slot, first:last], non_blocking=True)

    def release(self, slot: int) -> None:
        self._free += reversed(self._held[slot])
        self._held[slot] = []
