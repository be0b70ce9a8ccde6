"""The model of a step's timeline: what it must show of the runs that it was made from, and by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tests.scripts import script as load

SIZE = {"layers": 6, "steps": 90}


@pytest.fixture(scope="module")
def model() -> Any:
    return load("benchmarks/step_model.py")


def test_measured_runs_are_reproduced(model: Any) -> None:
    for _, machine, policy, routing, slots, measured in model.MEASURED:
        found = model.simulate(machine, policy, routing, slots=slots, rows=1, **SIZE)
        assert found.tok_s == pytest.approx(measured, rel=0.05)


def test_a_read_and_moves_share_the_bus(model: Any) -> None:
    bus = model.Bus()
    bus.add(10.0, 20.0)
    assert bus.read(0.0, 5.0) == 5.0
    assert bus.read(20.0, 30.0) == 60.0  # 10 of the move were left, each at half speed
    bus.add(100.0, 50.0)
    assert bus.read(90.0, 20.0) == 120.0  # 10 alone, 10 at half speed
    assert bus.busy(120.0, 130.0) == 10.0
    assert bus.busy(200.0, 210.0) == 0.0


def test_a_layer_by_hand(model: Any) -> None:
    """All choices of one step miss, and the CPU computes them; nothing else takes time."""
    zero = dict.fromkeys(
        ("dense", "shared", "tail", "row", "pcie", "copy", "move", "hit", "own", "gap", "empty", "choose",
         "there", "back", "fence", "queue"), 0.0
    )  # fmt: skip
    machine = replace(model.H200, **zero, cpu=10.0, lead=7.0, busy=1.0)
    policy = model.Policy(None, most=0, reserve=0)
    found = model.simulate(machine, policy, "uniform", slots=0, rows=1, **SIZE)
    assert found.layer == pytest.approx(107.0)
    assert (found.hits, found.pcie, found.moved) == (0.0, 0.0, 0.0)
    both = replace(policy, rates=model.Rates(10.0, 10.0, 7.0, 0.0), early=True)
    found = model.simulate(replace(machine, copy=10.0), both, "uniform", slots=0, rows=1, **SIZE)
    assert found.layer == pytest.approx(57.0)
    assert found.pcie == 5.0


def test_splits_of_parts_end_together(model: Any) -> None:
    rates = model.Rates(10.0, 30.0, 0.0, 0.0)
    for parts in (1, 2, 8):
        policy = model.Policy(rates, parts=parts)
        taken = [model.split(policy, misses, 0, 1.0, model.H200) for misses in range(9)]
        ends = [max(10.0 * (m - t), 30.0 * t) for m, t in enumerate(taken)]
        best = [min(max(10.0 * (m - t), 30.0 * t) for t in np.arange(0, m + 1, 1 / parts)) for m in range(9)]
        assert ends == pytest.approx(best)


def test_reads_from_the_submit_on_are_predicted_to_help(model: Any) -> None:
    """What the defaults of a step over all tiers follow."""
    for routing, least in (("local", 1.05), ("uniform", 1.05)):
        now, then = (
            model.simulate(model.H200, model.POLICIES[name], routing, slots=model.SLOTS, rows=1, **SIZE).tok_s
            for name in ("reads and moves at submit", "as measured")
        )
        assert now > least * then
