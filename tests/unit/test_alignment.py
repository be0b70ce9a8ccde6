"""Two clocks, of which the tests know how they differ."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetero.alignment import Alignment, Bracket, Reading, meet

delays = st.lists(st.tuples(st.integers(0, 9000), st.integers(0, 9000)), min_size=1, max_size=20)


@given(delays, st.integers(-(10**15), 10**15))
def test_brackets_together_hold_the_truth(waits: list[tuple[int, int]], offset: int) -> None:
    """The near clock reads first, the far one after some time, the near one again after some more."""
    brackets = [
        Bracket(at + offset - before, at, at + offset + after)
        for at, (before, after) in zip(range(0, 10**9, 50_000), waits, strict=False)
    ]
    reading = meet(brackets)
    assert abs(reading.offset - offset) <= reading.error
    assert reading.error <= min(before + after for before, after in waits) / 2
    assert brackets[0].at <= reading.at <= brackets[-1].at


def test_the_narrowest_counts_where_brackets_contradict_each_other() -> None:
    assert meet([Bracket(0, 1000, 10), Bracket(2000, 2000, 2004)]) == Reading(2000, 2.0, 2.0)
    with pytest.raises(ValueError, match="no readings"):
        meet([])


@given(
    st.integers(-(10**12), 10**12),
    st.floats(-5e-4, 5e-4),
    st.lists(st.integers(1, 10**10), min_size=1, max_size=6),
    st.floats(0, 1),
)
def test_clocks_that_drift_apart_evenly(offset: int, drift: float, steps: list[int], share: float) -> None:
    def truth(at: int) -> float:
        return at + offset + drift * at

    alignment, at, times = Alignment(), 0, []
    for step in steps:
        at += step
        times.append(at)
        alignment.add(Reading(at, truth(at) - at, 100.0))
    wanted = times[0] + round(share * (times[-1] - times[0]))
    assert alignment.near(wanted) == pytest.approx(truth(wanted), abs=1.01)
    near = [alignment.near(one) for one in sorted({*times, wanted})]
    assert near == sorted(near)
    assert alignment.error == 100.0


def test_outside_the_readings_the_nearest_offset_holds() -> None:
    alignment = Alignment()
    with pytest.raises(ValueError, match="not read"):
        alignment.near(5)
    alignment.add(Reading(100, 10.0, 1.0))
    assert (alignment.near(50), alignment.near(1000)) == (60, 1010)
    alignment.add(Reading(200, 30.0, 1.0))
    assert [alignment.near(at) for at in (50, 100, 150, 200, 300)] == [60, 110, 170, 230, 330]
    with pytest.raises(ValueError, match="order"):
        alignment.add(Reading(200, 0.0, 0.0))
