"""Two clocks beside each other: readings of one between two of the other, and the line through them."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import NamedTuple


class Bracket(NamedTuple):
    """The far clock said ``at`` somewhere between ``before`` and ``after`` of the near one; all in ns."""

    before: int
    at: int
    after: int


class Reading(NamedTuple):
    """Near clock minus far clock, as known when the far one said ``at``; wrong by at most ``error``."""

    at: int
    offset: float
    error: float


def meet(brackets: Iterable[Bracket]) -> Reading:
    """What brackets taken in quick succession say together.

    Each bounds the offset from both sides, and the truth lies within all of them; so together they bound it
    closer than any alone. Where they contradict each other (a clock was set between them), the narrowest
    counts. Raises ValueError without any.
    """
    all_of_them = list(brackets)
    if not all_of_them:
        raise ValueError("no readings of two clocks")
    low = max(one.before - one.at for one in all_of_them)
    high = min(one.after - one.at for one in all_of_them)
    if low > high:
        best = min(all_of_them, key=lambda one: one.after - one.before)
        low, high = best.before - best.at, best.after - best.at
    middle = sorted(one.at for one in all_of_them)[len(all_of_them) // 2]
    return Reading(middle, (low + high) / 2, (high - low) / 2)


class Alignment:
    """Far times as near ones: a straight line between each two readings, the nearest offset outside them."""

    def __init__(self) -> None:
        self._readings: list[Reading] = []

    def add(self, reading: Reading) -> None:
        """Raises ValueError for one that is not later than the last."""
        if self._readings and reading.at <= self._readings[-1].at:
            raise ValueError("readings of two clocks must be in order of time")
        self._readings.append(reading)

    @property
    def last(self) -> Reading | None:
        return self._readings[-1] if self._readings else None

    @property
    def error(self) -> float:
        """Half the width of the widest reading, in ns."""
        return max((one.error for one in self._readings), default=0.0)

    def near(self, at: int) -> int:
        """The near clock when the far one said ``at``. Raises ValueError before the first reading."""
        if not self._readings:
            raise ValueError("the clocks were not read")
        place = bisect_right(self._readings, at, key=lambda one: one.at)
        if place in (0, len(self._readings)):
            return at + round(self._readings[max(place - 1, 0)].offset)
        first, second = self._readings[place - 1], self._readings[place]
        share = (at - first.at) / (second.at - first.at)
        return at + round(first.offset + share * (second.offset - first.offset))
