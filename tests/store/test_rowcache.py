"""The cache of a table's rows: what it holds is right, it stays in its bounds, and what is used stays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hetero.store.rowcache import WAYS, RowCache

TOTAL, ROW = 5000, 24


def contents(ids: np.ndarray) -> np.ndarray:
    """Rows of these numbers: [n, ROW]."""
    return (ids[:, None] * 31 + np.arange(ROW)).astype(np.uint8)


def seeded(generator: torch.Generator) -> np.random.Generator:
    return np.random.default_rng(int(torch.randint(2**31, (), generator=generator)))


def test_what_is_found_is_what_was_kept(generator: torch.Generator) -> None:
    rng = seeded(generator)
    cache = RowCache(TOTAL, ROW, 20_000)
    cache.rows[:] = 0xAA
    assert 0 < cache.nbytes <= 20_000
    hits = misses = 0
    for size in rng.integers(0, 700, 60):
        ids = np.unique(rng.integers(0, TOTAL // 5, size))
        slots = cache.use(ids)
        there = slots >= 0
        assert np.array_equal(cache.rows[slots[there]], contents(ids[there]))
        assert len(set(slots[there].tolist())) == there.sum()
        hits, misses = hits + int(there.sum()), misses + int((~there).sum())
        absent = ids[~there]
        cache.admit(absent, contents(absent))
        known = ids[cache.find(ids) >= 0]
        cache.admit(known, np.zeros((len(known), ROW), dtype=np.uint8))
        if len(absent) == 1:
            assert cache.find(absent)[0] >= 0
    stats = cache.stats
    assert (stats.hits, stats.misses) == (hits, misses)
    assert hits > 0
    assert stats.evictions > 0


def test_rows_that_are_used_outlive_a_flood(generator: torch.Generator) -> None:
    """As words of an answer a long prompt."""
    rng = seeded(generator)
    cache = RowCache(10**9, ROW, 100_000)
    mine = np.unique(rng.integers(0, 10**9, cache.slots // 40))
    for _ in range(6):
        slots = cache.use(mine)
        cache.admit(mine[slots < 0], contents(mine[slots < 0]))
    assert (cache.find(mine) >= 0).all()
    for size in (3 * cache.slots, *[cache.slots // 40] * 40):  # at once, and bit by bit
        flood = np.unique(rng.integers(0, 10**9, size))
        slots = cache.use(flood)
        cache.admit(flood[slots < 0], contents(flood[slots < 0]))
        assert (cache.find(mine) >= 0).mean() > 0.9
    there = cache.find(mine)
    assert np.array_equal(cache.rows[there[there >= 0]], contents(mine[there >= 0]))


@pytest.mark.parametrize("ram", [0, 1, WAYS * (ROW + 16) - 1])
def test_too_little_room_keeps_nothing(ram: int) -> None:
    cache = RowCache(TOTAL, ROW, ram)
    ids = np.arange(5)
    assert cache.slots == cache.nbytes == 0
    assert cache.use(ids).tolist() == [-1] * 5
    cache.admit(ids, contents(ids))
    assert cache.stats.misses == 5


def test_one_set_and_a_prompt_of_thousands_of_rows() -> None:
    cache = RowCache(10**6, ROW, WAYS * (ROW + 16))
    ids = np.arange(30_000)
    for _ in range(20):
        slots = cache.use(ids)
        cache.admit(ids[slots < 0], contents(ids[slots < 0]))
    found = cache.find(ids)
    assert (found >= 0).sum() == cache.slots == WAYS
    assert np.array_equal(cache.rows[found[found >= 0]], contents(ids[found >= 0]))


def test_no_more_than_the_table(generator: torch.Generator) -> None:
    cache = RowCache(20, ROW, 1 << 30)
    assert cache.slots == 24
    ids = np.arange(20)
    for _ in range(3):
        cache.admit(ids, contents(ids))
    found = cache.find(ids)
    assert np.array_equal(cache.rows[found[found >= 0]], contents(ids[found >= 0]))
    assert (found >= 0).sum() >= 12
