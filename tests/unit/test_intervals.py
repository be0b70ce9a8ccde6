"""Sets of moments, against sets of whole numbers."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from hetero.intervals import Interval, intersect, length, subtract, union

some = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def moments(intervals: Iterable[Interval]) -> set[int]:
    return {moment for start, end in intervals for moment in range(start, end)}


def is_plain(intervals: list[Interval]) -> bool:
    """Disjoint, in order, none empty, no two that touch."""
    ends = [end for pair in intervals for end in pair]
    return all(a < b for a, b in pairwise(ends))


@given(some)
def test_union_has_the_same_moments(intervals: list[Interval]) -> None:
    plain = union(intervals)
    assert is_plain(plain)
    assert moments(plain) == moments(intervals)
    assert length(plain) == len(moments(intervals))


@given(some, some)
def test_both_and_one_without_the_other(a: list[Interval], b: list[Interval]) -> None:
    first, second = union(a), union(b)
    both, left = intersect(first, second), subtract(first, second)
    assert is_plain(both)
    assert is_plain(left)
    assert moments(both) == moments(a) & moments(b)
    assert moments(left) == moments(a) - moments(b)
    assert length(both) + length(left) == length(first)
