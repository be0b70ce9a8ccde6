"""Slots and who sits in them: properties that hold for any sequence of steps, and what the policy prefers."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetero.store.policy import CacheStats, SlotCache

ITEMS = 9
steps = st.lists(st.sets(st.integers(0, ITEMS - 1), min_size=1, max_size=6), max_size=30)


def run(cache: SlotCache, used: set[int], failing: set[int] = frozenset()) -> None:  # type: ignore[assignment]
    """One step as a backend takes it, in groups that fit; ``failing`` cannot be brought."""
    cache.touch(sorted(used))
    here, absent = cache.lookup(sorted(used))
    assert set(here) | set(absent) == used
    size = cache.slots if not here else max(1, cache.slots - len(here))
    pinned = here if len(here) < cache.slots else []
    for at in range(0, len(absent), size):
        group = absent[at : at + size]
        given_slots = cache.admit(group, pinned)
        assert [one.item for one in given_slots] == group
        assert all(one.evicted not in pinned for one in given_slots)
        cache.drop(set(group) & failing)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, ITEMS + 2), steps, st.sets(st.integers(0, ITEMS - 1), max_size=2))
def test_slots_and_items_stay_one_to_one(slots: int, used: list[set[int]], failing: set[int]) -> None:
    cache = SlotCache(ITEMS, slots)
    uses = 0
    for step in used:
        run(cache, step, failing)
        uses += len(step)
        table = cache.slot_of()
        taken = [int(slot) for slot in table if slot >= 0]
        assert len(set(taken)) == len(taken) <= cache.slots == min(slots, ITEMS)
        assert sorted(cache.resident()) == [item for item in range(ITEMS) if table[item] >= 0]
        assert not failing & set(cache.resident())
        assert cache.stats.hits + cache.stats.misses == uses
        rate = cache.stats.hit_rate
        assert rate is not None
        assert 0 <= rate <= 1


@settings(max_examples=60, deadline=None)
@given(steps)
def test_with_a_slot_for_each_nothing_is_read_twice(used: list[set[int]]) -> None:
    cache = SlotCache(ITEMS, ITEMS)
    for step in used:
        run(cache, step)
    assert cache.stats.misses == len(set().union(*used))
    assert cache.stats.evictions == 0


def test_recency_and_frequency_decide() -> None:
    cache = SlotCache(100, 4, half_life=16)
    for _ in range(50):
        run(cache, {0, 1})
    run(cache, {2})
    run(cache, {3})
    run(cache, {4})  # 2 was used as often as 3, and longer ago
    assert sorted(cache.resident()) == [0, 1, 3, 4]
    for item in range(10, 90):  # a long prompt touches all once
        run(cache, {item})
        if item % 8 == 0:
            run(cache, {0, 1})
    assert {0, 1} <= set(cache.resident())
    for _ in range(200):  # what is used no more goes
        run(cache, {5, 6, 7, 8})
    assert sorted(cache.resident()) == [5, 6, 7, 8]


def test_scores_grow_for_ever_without_end() -> None:
    cache = SlotCache(4, 2, half_life=0.25)
    for step in range(3000):
        run(cache, {step % 3})
    run(cache, {0})
    assert 0 in cache.resident()


def test_counts_of_earlier_use_are_a_start() -> None:
    cache = SlotCache(4, 2)
    cache.seed([5, 0, 9, 1])
    for item in range(4):
        run(cache, {item})
    assert sorted(cache.resident()) == [2, 3]
    with pytest.raises(ValueError, match="counts"):
        cache.seed([1.0])


def test_what_makes_no_sense_is_refused_and_changes_nothing() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        SlotCache(3, 0)
    cache = SlotCache(5, 2)
    cache.admit([1, 2])
    for wrong, pinned in (([1], []), ([3, 3], []), ([3, 4], [1]), ([0, 3, 4], [])):
        with pytest.raises(ValueError, match="slots"):
            cache.admit(wrong, pinned)
        assert cache.resident() == [1, 2]
    assert cache.room([1]) == 1
    assert CacheStats().hit_rate is None
    assert CacheStats(1, 2, 3) + CacheStats(1, 1, 1) == CacheStats(2, 3, 4)
