"""What a split is made of: times of the CPU's experts by the rows of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from hetero.core import ExpertSpec
from hetero.engine.gpu import share

SPEC = ExpertSpec(40, 32, 16, 4)
EACH, LEAD, CALL = 30e-6, 8e-6, 7e-6


class Clocked:
    """Experts whose clock goes on by what they would take."""

    spec = SPEC

    def __init__(self, each: float = EACH) -> None:
        self.now, self.each, self.seen = 0.0, each, list[int]()

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, out: torch.Tensor) -> None:
        assert x.shape == out.shape == (len(ids), SPEC.hidden)
        assert weights.shape == ids.shape
        count = len(set(ids[ids >= 0].tolist()))
        self.seen.append(count)
        self.now += CALL + (LEAD + count * self.each if count else 0.0)


@pytest.mark.parametrize("rows", [1, 8])
def test_what_experts_take_is_told_from_what_a_step_takes(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = Clocked()
    monkeypatch.setattr(share.time, "perf_counter", lambda: one.now)
    calls = []

    def run(timed: Callable[[], bool]) -> None:
        calls.append(timed())  # the other side ends after each

    each, lead = share.cpu_seconds([one], rows, run)
    assert (each, lead) == (pytest.approx(EACH), pytest.approx(LEAD))
    assert calls == [True] * (len(calls) - 1) + [False]
    every, half, none = one.seen[:3]
    assert (every == SPEC.top_k) if rows == 1 else (every > 2 * SPEC.top_k)
    assert (half, none) == (-(-every // 2), 0)


def test_what_was_just_read_is_not_read_again() -> None:
    one: Any = Clocked()
    drawn = share.draw(one, 1, torch.Generator().manual_seed(2))
    every, half, none = (set(ids[ids >= 0].tolist()) for ids in drawn.ids)
    assert (len(every), len(half), len(none)) == (SPEC.top_k, -(-SPEC.top_k // 2), 0)
    assert drawn.counts == (len(every), len(half))
    assert not every & half


def test_times_of_a_busy_machine_stay_within_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts take no longer than half of them; and much is taken besides."""
    one: Any = Clocked(each=0.0)
    monkeypatch.setattr(share.time, "perf_counter", lambda: one.now)
    each, lead = share.cpu_seconds([one], 1, lambda timed: timed())
    assert each == pytest.approx(LEAD / SPEC.top_k)
    assert 0.0 <= lead <= LEAD
    monkeypatch.setattr("tests.engine.test_share.LEAD", 1.0)
    assert share.cpu_seconds([one], 2, lambda timed: timed())[1] == share.LONGEST_LEAD_S


def test_the_share_is_of_two_rates() -> None:
    assert share.Rates(cpu=75e9, bus=25e9).share == pytest.approx(0.25)
