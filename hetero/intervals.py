"""Sets of moments as disjoint intervals in order: what is covered, by both, by neither."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

Interval = tuple[int, int]
"""From the first moment up to, not including, the second; empty where that is not later."""


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order, none empty, no two that touch."""
    merged: list[Interval] = []
    for start, end in sorted(one for one in intervals if one[0] < one[1]):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged


def intersect(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Moments in both; each must be as ``union`` makes it, and so is the result."""
    both: list[Interval] = []
    i = j = 0
    while i < len(first) and j < len(second):
        start, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if start < end:
            both.append((start, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return both


def subtract(first: Sequence[Interval], second: Sequence[Interval]) -> list[Interval]:
    """Moments in the first and not in the second; each as ``union`` makes it, and so is the result."""
    left: list[Interval] = []
    j = 0
    for start, end in first:
        while j < len(second) and second[j][1] <= start:
            j += 1
        at, k = start, j
        while k < len(second) and second[k][0] < end:
            if second[k][0] > at:
                left.append((at, second[k][0]))
            at = max(at, second[k][1])
            k += 1
        if at < end:
            left.append((at, end))
    return left


def length(intervals: Iterable[Interval]) -> int:
    """Of disjoint intervals, together."""
    return sum(end - start for start, end in intervals)
