"""What a decode step is expected to take, against steps that were measured on a GPU."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetero.formats import parse_format
from hetero.plan import constants
from hetero.plan.estimate import _later_us, estimate
from hetero.plan.families import inventory
from hetero.plan.hardware import Hardware
from hetero.plan.prefill import prefill
from hetero.plan.prompt import expected_prefill
from hetero.plan.roofline import decode
from hetero.plan.routing import Routing
from hetero.plan.tiers import Layout, Request, lay_out
from hetero.report.bandwidth import Rates
from hetero.report.bench_plan import with_experts
from hetero.report.bound import hardware_of
from tests.plan.example import GIB, asked, flagship, machine, shape

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
# Of the runs whose steps are launched ahead: constants are from the first three.
RUNS = [
    (name, model, number)
    for name, model in (
        ("bench-125b-h200-2026-11-30b", "qwen3.8-flash-next-125b"),
        ("bench-qwen3-next-80b-h200-2026-11-30", "qwen3-next-80b-a3b"),
        ("bench-qwen3-30b-h200-2026-11-30", "qwen3-30b-a3b"),
        ("bench-125b-h200-2026-12-01", "qwen3.8-flash-next-125b"),
    )
    for number in (0, 1)
]


def run_of(name: str, model: str) -> tuple[dict[str, Any], Any, Hardware, Request, Layout]:
    """Its result, its model, its machine by its own rates, and where its experts were."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    made = inventory(shape(model))
    assert made is not None
    rates = Rates(**{kind: told["rounds"] for kind, told in found["rates"].items()})
    hardware = with_experts(hardware_of(rates, "NVIDIA H200", 141 * 10**9), on_gpu=True)
    request = asked("int4 g32", vram=24 * GIB, ram=128 * GIB, context=1024, dense="int8")
    layout = lay_out(made, hardware, replace(request, context=8192), "int8")  # of the run's longest prompt
    share = found["slots_on_gpu"] / sum(site.spec.num_experts for site in made.sites)
    return found, made, hardware, request, replace(layout, on_gpu=share, slots=found["slots_on_gpu"])


@pytest.mark.parametrize(("name", "model", "number"), RUNS)
def test_steps_of_three_models_within_10_percent(name: str, model: str, number: int) -> None:
    found, made, hardware, request, layout = run_of(name, model)
    series = found["decode"][number]
    step = estimate(made, hardware, request, layout, Routing(series["routing"]))
    assert step.tok_s == pytest.approx(series["tok_s"]["median"], rel=0.1)
    assert step.hit_rate == pytest.approx(series["hit_rate"], abs=0.03)


@pytest.mark.parametrize(("name", "model"), sorted({run[:2] for run in RUNS}))
def test_prompts_of_three_models_within_10_percent(name: str, model: str) -> None:
    """Beyond the bound by the run's own machine, which is in its result."""
    found, made, hardware, request, layout = run_of(name, model)
    for one in found["prefill"]:
        told = expected_prefill(made, hardware, request, layout, one["tokens"], fused=True)
        beyond = told.ms - prefill(made, hardware, request, layout, one["tokens"])[0].ms
        bound = 1e3 * one["tokens"] / one["bound"]["tok_s"]
        assert bound + beyond == pytest.approx(1e3 * one["ttft_s"]["median"], rel=0.1), one["tokens"]


def layout_of(hardware: Any, **changes: Any) -> Any:
    request = asked(vram=24 * GIB, ram=256 * GIB, **changes)
    return request, lay_out(flagship(), hardware, request, "int8")


def test_it_takes_longer_than_the_bound() -> None:
    hardware = machine(ram=256 * GIB)
    for streams in (1, 4):
        request, layout = layout_of(hardware, concurrency=streams)
        for routing in (Routing("local"), Routing("uniform")):
            step = estimate(flagship(), hardware, request, layout, routing)
            assert step.tok_s < decode(flagship(), hardware, request, layout, routing).tok_s
            assert step.tokens == streams
            assert all(not term.beside for term in step.terms)


def test_whole_experts_divide_as_well_as_they_can() -> None:
    lead, own = constants.LEAD_US, constants.OWN_US
    # (the CPU alone, the CPU beside PCIe, over PCIe, in GPU memory) of one expert.
    each = (10.0, 20.0, 30.0, 1.0)
    assert _later_us(4, 0.0, each, True) == pytest.approx(own + 4)
    assert _later_us(1, 1.0, each, True) == pytest.approx(lead + 10)
    assert _later_us(4, 1.0, each, False) == pytest.approx(lead + 40)
    # Two by each side, or three by the CPU and one over PCIe.
    both = min(max(lead + 20 * (4 - n), own + 30 * n) for n in (1, 2, 3))
    assert _later_us(4, 1.0, each, True) == pytest.approx(min(both, lead + 40))
    # Half of two are missing: none, one or two of them.
    two = min(lead + 20, max(lead + 20, own + 30))
    want = 0.25 * (own + 2) + 0.5 * (max(lead + 10, own + 1)) + 0.25 * two
    assert _later_us(2, 0.5, each, True) == pytest.approx(want)


def test_only_local_routing_moves_experts() -> None:
    hardware = machine(ram=256 * GIB)
    request, layout = layout_of(hardware)
    names = {
        kind: {term.name for term in estimate(flagship(), hardware, request, layout, Routing(kind)).terms}
        for kind in ("local", "uniform")
    }
    assert names["local"] - names["uniform"] == {"experts that are moved"}
    assert parse_format("int4") == request.expert_format


def test_layers_of_thousands_of_experts() -> None:
    each = (1.0, 2.0, 3.0, 0.1)
    assert _later_us(4096, 0.5, each, True) == pytest.approx(constants.LEAD_US + 2048, rel=1e-3)
    assert _later_us(4096, 0.0, each, True) == pytest.approx(constants.OWN_US + 409.6)
