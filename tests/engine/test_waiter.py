"""How the host waits for a step, over events of the test's own."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from hetero.core import InputError
from hetero.engine.gpu.graphs import Waiter


class Event:
    """Is through a while after it was recorded."""

    took = 0.02

    def __init__(self, blocking: bool = False) -> None:
        self.blocking = blocking
        self.looks = self.slept = 0

    def record(self) -> None:
        self.until = time.perf_counter() + self.took

    def query(self) -> bool:
        self.looks += 1
        return time.perf_counter() >= self.until

    def synchronize(self) -> None:
        self.slept += 1


@pytest.fixture
def waiter(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> tuple[Waiter, Any]:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    made = Waiter(request.param)
    return made, made._events[0]


@pytest.mark.parametrize("waiter", ["block"], indirect=True)
def test_asleep(waiter: tuple[Waiter, Any]) -> None:
    one, event = waiter
    one.mark()
    one.wait(4)
    assert event.blocking
    assert (event.slept, event.looks) == (1, 0)


@pytest.mark.parametrize("waiter", ["spin", "nap"], indirect=True)
def test_looking(waiter: tuple[Waiter, Any]) -> None:
    """What is not like other steps is waited for asleep; the rest is through when the call returns."""
    one, event = waiter
    one.mark()
    one.wait(0)
    assert (event.slept, event.looks) == (1, 0)
    for _ in range(3):
        one.mark()
        one.wait(4)
        assert time.perf_counter() >= event.until
    assert event.slept == 1
    # A step that has become longer, and one that has become shorter.
    for event.took in (0.04, 0.001):
        one.mark()
        one.wait(4)
        assert time.perf_counter() >= event.until
    assert set(one._shortest) == {4}


def test_another_word(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "Event", Event)
    with pytest.raises(InputError, match="no way to wait is called 'doze'; valid: block, spin, nap"):
        Waiter("doze")
