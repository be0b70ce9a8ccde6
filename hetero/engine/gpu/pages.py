"""Pages of keys and values: which sequences have them, in a table that the device reads.

A page is free, or held by slots, by kept sequences, or by both. What is held more than once is written by
nobody, but for the place behind all tokens that the others hold: whoever begins from another's tokens has a
page of its own for what it goes on to write.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from hetero.core import HeteroError
from hetero.decode.inputs import PAGE


def settled(tokens: int, grain: int) -> int:
    """Pages of a sequence of so many tokens in which nothing more will be written. ``grain``: as of a
    decoder."""
    return (tokens - tokens % grain) // PAGE


class Pages:
    """Pages for ``slots`` sequences of up to ``context`` tokens each, ``total`` in all (None: as many as all
    of them may need). ``table``: int32 [slots, pages of one sequence] on the device.

    ``reclaim``: is called where pages are short, to have something that is kept given up; False: there is
    nothing.
    """

    def __init__(self, slots: int, context: int, device: torch.device, total: int | None = None) -> None:
        most = -(-context // PAGE)
        self.context, self.total = context, slots * most if total is None else total
        on_gpu = device.type == "cuda"
        self._host = torch.zeros(slots, most, dtype=torch.int32, pin_memory=on_gpu)
        self.table: Tensor = self._host.to(device) if on_gpu else self._host
        self._free = list(range(self.total - 1, -1, -1))
        self._held: list[list[int]] = [[] for _ in range(slots)]
        self._slots_of, self._kept_by = [0] * self.total, [0] * self.total
        self.in_slots, self.only_kept = 0, 0
        self.reclaim: Callable[[], bool] = _nothing

    @property
    def free(self) -> int:
        return len(self._free)

    def held(self, slot: int) -> Sequence[int]:
        """The pages of a slot, in order; a view, which changes."""
        return self._held[slot]

    def used_by_slots(self, pages: Sequence[int]) -> int:
        """How many of these are pages of slots."""
        return sum(self._slots_of[page] > 0 for page in pages)

    def grow(self, slot: int, tokens: int) -> None:
        """Room for ``tokens`` tokens in all. Raises HeteroError where context or pages end."""
        if tokens > self.context:
            raise HeteroError(f"{tokens} tokens of a sequence, and a slot holds {self.context}")
        held = self._held[slot]
        first, last = len(held), -(-tokens // PAGE)
        if last <= first:
            return
        self._require(last - first)
        held += [self._taken() for _ in range(first, last)]
        self._tell(slot, first, last)

    def release(self, slot: int) -> None:
        """Give a slot's pages back."""
        for page in reversed(self._held[slot]):
            self._leave(page)
        self._held[slot] = []

    def share(self, slot: int, pages: Sequence[int]) -> None:
        """Let a slot hold pages that others hold, in place of its own."""
        for page in pages:
            self.in_slots += not self._slots_of[page]
            self.only_kept -= not self._slots_of[page]
            self._slots_of[page] += 1
        self.release(slot)
        self._held[slot] = list(pages)
        self._tell(slot, 0, len(pages))

    def own(self, slot: int, index: int) -> int | None:
        """Make a slot's page one that nobody else holds: the page of before, whose contents are to be copied;
        None where it was so already. Raises HeteroError where there is none left."""
        page = self._held[slot][index]
        while not self._free and self._shared(page) and self.reclaim():
            pass
        if not self._shared(page):
            return None
        self._require(1)
        self._held[slot][index] = self._taken()
        self._leave(page)
        self._tell(slot, index, index + 1)
        return page

    def keep(self, pages: Sequence[int]) -> None:
        """Hold pages for a sequence that is kept; somebody holds them now."""
        for page in pages:
            self._kept_by[page] += 1

    def drop(self, pages: Sequence[int]) -> None:
        """Hold them no more."""
        for page in reversed(pages):
            self._kept_by[page] -= 1
            if not self._kept_by[page] and not self._slots_of[page]:
                self.only_kept -= 1
                self._free.append(page)

    def frees(self, pages: Sequence[int]) -> bool:
        """Whether a page is free once a sequence that is kept holds these no more."""
        return any(self._kept_by[page] == 1 and not self._slots_of[page] for page in pages)

    def _shared(self, page: int) -> bool:
        return self._slots_of[page] + self._kept_by[page] > 1

    def _require(self, count: int) -> None:
        while count > len(self._free) and self.reclaim():
            pass
        if count > len(self._free):
            raise HeteroError(f"all {self.total} pages of keys and values are taken")

    def _taken(self) -> int:
        page = self._free.pop()
        self._slots_of[page] = 1
        self.in_slots += 1
        return page

    def _leave(self, page: int) -> None:
        """A slot holds a page no more."""
        self._slots_of[page] -= 1
        if self._slots_of[page]:
            return
        self.in_slots -= 1
        if self._kept_by[page]:
            self.only_kept += 1
        else:
            self._free.append(page)

    def _tell(self, slot: int, first: int, last: int) -> None:
        """The device's table of a slot's pages [first, last)."""
        self._host[slot, first:last] = torch.tensor(self._held[slot][first:last], dtype=torch.int32)
        if self.table is not self._host:
            self.table[slot, first:last].copy_(self._host[slot, first:last], non_blocking=True)


def _nothing() -> bool:
    return False
