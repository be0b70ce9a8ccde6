"""Which of many experts sit in few slots: for experts in RAM over a disk, or on a GPU over RAM.

An expert's score is a sum over the steps that used it, each worth half after ``half_life`` later steps:
recency for experts used as often, frequency for those used as lately. One long prompt, which touches every
expert once, does not push out those that answers use all the time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

HALF_LIFE = 64.0
"""Steps after which a use counts half."""

# Scores grow instead of fading, so that a use changes one number; this long before a float is full.
_TOO_LARGE = 1e200


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Since the start. A use is of one expert in one step."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0

    @property
    def hit_rate(self) -> float | None:
        """Share of uses that found their expert in a slot; None before the first."""
        uses = self.hits + self.misses
        return self.hits / uses if uses else None

    def __add__(self, other: CacheStats) -> CacheStats:
        return CacheStats(
            self.hits + other.hits, self.misses + other.misses, self.evictions + other.evictions
        )


@dataclass(frozen=True, slots=True)
class Admitted:
    """An item that now has a slot, where its contents must be brought; ``evicted`` was there before."""

    item: int
    slot: int
    evicted: int | None


class SlotCache:
    """``items`` items, ``slots`` slots. Knows numbers only; not for two threads at once.

    A step: ``touch`` what it uses, ``lookup`` what is there, ``admit`` the rest with what must stay pinned,
    bring the contents, ``drop`` what could not be brought.
    """

    def __init__(self, items: int, slots: int, half_life: float = HALF_LIFE) -> None:
        if items < 1 or slots < 1:
            raise ValueError(f"{items} items in {slots} slots: both must be at least 1")
        self.items = items
        self.slots = min(slots, items)
        self._slot_of = np.full(items, -1, dtype=np.int64)
        self._item_in = np.full(self.slots, -1, dtype=np.int64)
        self._scores = np.zeros(items)
        self._worth = 1.0
        self._growth = 2.0 ** (1.0 / half_life)
        self._hits = self._misses = self._evictions = 0

    @property
    def stats(self) -> CacheStats:
        return CacheStats(self._hits, self._misses, self._evictions)

    def slot_of(self) -> npt.NDArray[np.int64]:
        """The slot of each item, -1 where it has none: [items], a copy."""
        return self._slot_of.copy()

    def resident(self) -> list[int]:
        """The items that have slots, in the order of the slots."""
        return [int(item) for item in self._item_in if item >= 0]

    def seed(self, counts: Sequence[float]) -> None:
        """Begin with scores in proportion to ``counts`` [items], the largest as of an item used for long."""
        weights = np.asarray(counts, dtype=np.float64)
        if weights.shape != (self.items,):
            raise ValueError(f"{weights.shape} counts for {self.items} items")
        steady = self._worth / (1.0 - 1.0 / self._growth)
        self._scores = weights / max(float(weights.max()), 1e-300) * steady

    def touch(self, items: Iterable[int]) -> None:
        """One step uses these, each at most once; counted as a hit where they are."""
        used = np.fromiter(items, dtype=np.int64)
        there = int(np.count_nonzero(self._slot_of[used] >= 0))
        self._hits += there
        self._misses += len(used) - there
        self._worth *= self._growth
        if self._worth > _TOO_LARGE:
            self._scores /= self._worth
            self._worth = 1.0
        self._scores[used] += self._worth

    def lookup(self, items: Iterable[int]) -> tuple[list[int], list[int]]:
        """(those that have a slot, those that have none), each in the order given."""
        here: list[int] = []
        absent: list[int] = []
        for item in items:
            (absent if self._slot_of[item] < 0 else here).append(item)
        return here, absent

    def room(self, pinned: Iterable[int] = ()) -> int:
        """How many items ``admit`` can take beside the pinned ones."""
        return self.slots - sum(1 for item in set(pinned) if self._slot_of[item] >= 0)

    def admit(self, items: Sequence[int], pinned: Iterable[int] = ()) -> list[Admitted]:
        """Give slots to ``items``, none of which has one: free slots first, then those of the lowest scores
        that are not pinned. Raises ValueError, changing nothing, where there are too few."""
        if any(self._slot_of[item] >= 0 for item in items) or len(set(items)) != len(items):
            raise ValueError("an item would have two slots")
        order = self._candidates(set(pinned))
        if len(items) > len(order):
            raise ValueError(f"{len(items)} items for {len(order)} slots")
        done = []
        for item, slot in zip(items, order, strict=False):
            before = int(self._item_in[slot])
            if before >= 0:
                self._slot_of[before] = -1
                self._evictions += 1
            self._item_in[slot], self._slot_of[item] = item, slot
            done.append(Admitted(item, slot, before if before >= 0 else None))
        return done

    def drop(self, items: Iterable[int]) -> None:
        """Take the slots of these back: their contents did not come."""
        for item in items:
            slot = int(self._slot_of[item])
            if slot >= 0:
                self._slot_of[item] = self._item_in[slot] = -1

    def _candidates(self, pinned: set[int]) -> list[int]:
        """Slots that may be taken, the first to go first."""
        free = [slot for slot in range(self.slots) if self._item_in[slot] < 0]
        used = [s for s in range(self.slots) if self._item_in[s] >= 0 and int(self._item_in[s]) not in pinned]
        return free + sorted(used, key=lambda slot: float(self._scores[self._item_in[slot]]))
