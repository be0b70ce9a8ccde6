"""A cache of a table's rows in RAM: sets of eight places, so that thousands of rows are looked up at once."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hetero.store.policy import CacheStats

WAYS = 8
"""Places that a row may have."""

HALF_LIFE = 8
"""Later uses, in numbers of slots, after which a use counts half: what finds most rows of real text again."""

# Odd, so that neighbours spread over all sets (Fibonacci hashing).
_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_BESIDE = 8 + 8  # bytes of a place beside its row: whose it is, and its score
_TOO_LARGE = 1e200  # scores grow instead of fading; this long before a float is full


class RowCache:
    """At most ``nbytes`` bytes of rows of ``row_bytes``. Knows no files; not for two threads at once.

    Of the eight places that a row may have, the one of the lowest score goes first: a sum over the uses of
    its row, each worth half after ``HALF_LIFE`` times as many later uses as there are slots. N-grams of text
    that come again and again outlive those that a prompt has once. Attributes: ``rows`` uint8 [slots,
    row_bytes], the contents.
    """

    def __init__(self, total: int, row_bytes: int, ram: int) -> None:
        self._sets = min(ram // (WAYS * (row_bytes + _BESIDE)), -(-total // WAYS))
        self._keys = np.full((self._sets, WAYS), -1, dtype=np.int64)
        self._scores = np.zeros((self._sets, WAYS))
        # Takes memory as it is filled.
        self.rows: NDArray[np.uint8] = np.empty((self.slots, row_bytes), dtype=np.uint8)
        self._worth = 1.0
        self._hits = self._misses = self._evictions = 0

    @property
    def slots(self) -> int:
        """Rows that it can hold."""
        return self._sets * WAYS

    @property
    def nbytes(self) -> int:
        """Bytes of memory when it is full."""
        return self.rows.nbytes + self._keys.nbytes + self._scores.nbytes

    @property
    def stats(self) -> CacheStats:
        return CacheStats(self._hits, self._misses, self._evictions)

    def find(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """The slot of each of ids [n], -1 where it has none."""
        if not self._sets or not len(ids):
            return np.full(len(ids), -1, dtype=np.int64)
        sets = self._set_of(ids)
        same = self._keys[sets] == ids[:, None]
        way = same.argmax(axis=1)
        found = same[np.arange(len(ids)), way]
        return np.where(found, sets * WAYS + way, -1)

    def use(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """``find`` for a step that uses distinct ids; counted."""
        if self._sets:
            # After a prompt of many times the slots, nothing before counts.
            self._worth *= 2.0 ** min(len(ids) / (HALF_LIFE * self.slots), 64.0)
        if self._worth > _TOO_LARGE:
            self._scores /= self._worth
            self._worth = 1.0
        slots = self.find(ids)
        there = slots[slots >= 0]
        self._scores.reshape(-1)[there] += self._worth
        self._hits += len(there)
        self._misses += len(ids) - len(there)
        return slots

    def admit(self, ids: NDArray[np.int64], rows: NDArray[np.uint8]) -> None:
        """Keep distinct rows [n, row_bytes]. Those that are there already stay as they are; of many that come
        to one set at once some are left out, so that a prompt leaves it the best of what it has."""
        if not self._sets or not len(ids):
            return
        new = np.flatnonzero(self.find(ids) < 0)
        sets = self._set_of(ids[new])
        order = np.argsort(sets, kind="stable")
        new, sets = new[order], sets[order]
        # The n-th newcomer of a set takes the n-th place from the lowest score on.
        first = np.searchsorted(sets, sets)
        rank = np.arange(len(sets)) - first
        fits = rank < WAYS
        new, sets, rank = new[fits], sets[fits], rank[fits]
        lowest = np.argsort(self._scores[sets], axis=1, kind="stable")
        way = lowest[np.arange(len(sets)), rank]
        fits = (rank < WAYS // 2) | (self._keys[sets, way] < 0)
        new, sets, way = new[fits], sets[fits], way[fits]
        self._evictions += int(np.count_nonzero(self._keys[sets, way] >= 0))
        self._keys[sets, way] = ids[new]
        self._scores[sets, way] = self._worth
        self.rows[sets * WAYS + way] = rows[new]

    def _set_of(self, ids: NDArray[np.int64]) -> NDArray[np.int64]:
        mixed = ids.astype(np.uint64) * _SPREAD >> np.uint64(32)
        return (mixed * np.uint64(self._sets) >> np.uint64(32)).astype(np.int64)
