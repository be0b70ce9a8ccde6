"""What the plan says of a benchmark's model: on another machine, and on this one beside what was measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero.core import MachineError
from hetero.plan import constants
from hetero.plan.as_json import as_dict
from hetero.plan.estimate import estimate
from hetero.plan.hardware import Figure, Hardware
from hetero.plan.inventory import Inventory
from hetero.plan.machine import this_machine
from hetero.plan.planner import make_plan
from hetero.plan.routing import Routing
from hetero.plan.sizes import gib
from hetero.plan.tiers import Layout, Request
from hetero.plan.today import modules_step
from hetero.plan.workspace import LATER
from hetero.report.bench import Series
from hetero.report.bench_memory import everything_in_memory, host_items, run_layout
from hetero.report.bench_options import Options

ROOMY = 128 << 30
"""Of main memory, where a profile's is too small for all experts."""


def predicted(
    name: str, plan_for: Hardware, inventory: Inventory, options: Options, series: Series
) -> list[dict[str, Any]]:
    """What the plan says of another machine with the same request; where main memory is all that keeps its
    layers from being fused, of one with ROOMY bytes too. ``plan_for``: its profile."""
    asked = Request(
        options.fmt,
        vram=options.vram,
        context=series.context,
        concurrency=series.batches[0],
        dense=options.dense,
    )
    roomy = plan_for.model_copy(
        update={
            "name": f"{plan_for.name} with {gib(ROOMY)}",
            "ram": plan_for.ram.model_copy(update={"bytes": ROOMY}),
        }
    )
    found = []
    for hardware in (plan_for, roomy):
        try:
            made = make_plan(name, inventory, hardware, asked, alternatives=False)
        except MachineError as error:
            nothing: dict[str, Any] = {
                "decode": [],
                "expected": [],
                "prefill": [],
                "experts": None,
                "dense": options.dense,
            }
            told = {"hardware": hardware.name, "fits": False, "why_not": str(error), **nothing}
            short = plan_for.ram.bytes < ROOMY
        else:
            all_told = as_dict(made)
            keys = ("hardware", "fits", "decode", "expected", "prefill", "experts", "dense")
            told = {key: all_told[key] for key in keys} | {"why_not": made.today.why_not}
            short = made.layout.fused and made.today.fused is None and plan_for.ram.bytes < ROOMY
        found.append(told | {"layers": options.layers})
        if not short:
            break
    return found


def against_plan(
    result: Mapping[str, Any], options: Options, series: Series, inventory: Inventory, hardware: Hardware
) -> dict[str, Any]:
    """The plan of this run from ``hardware``, what it measured of the machine, beside ``result``: memory of
    each tier, experts in GPU memory, and each decode series."""
    gpu = result.get("gpu_memory")
    size = None if gpu is None else options.vram or gpu["device_total"] - gpu["used_by_others_before"]
    layout = run_layout(options, series, inventory, size)
    hardware = with_experts(hardware, on_gpu=gpu is not None)
    found: dict[str, Any] = {
        "memory": [_compared("main memory", host_items(layout, options).used, result["host_memory"])],
        "slots": None,
        "moe_layers": len(inventory.sites),
        "decode": [],
    }
    if gpu is not None and layout.gpu is not None:
        # What a run keeps free is not in use at its peak.
        planned = layout.gpu.used - (LATER if layout.fused else 0)
        found["memory"].append(_compared("GPU memory", planned, gpu))
    if layout.fused:
        found["slots"] = {"planned": layout.slots, "measured": result["slots_on_gpu"]}
    for one in result["decode"]:
        request = replace(
            everything_in_memory(options, series), concurrency=one["rows"], context=one["context"]
        )
        routing = Routing("local" if one["routing"] == "local" else "uniform")
        step = expected_step(inventory, hardware, request, layout, routing)
        measured = one["tok_s"]["median"]
        found["decode"].append(
            {
                "routing": one["routing"],
                "rows": one["rows"],
                "share": one.get("share"),
                "expected_tok_s": step.tok_s,
                "measured_tok_s": measured,
                "ratio": step.tok_s / measured,
                "terms": [{"name": term.name, "ms": term.ms} for term in step.terms],
            }
        )
    return found


def expected_step(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, routing: Routing
) -> Any:
    """A ``Decode``: of fused layers on a GPU, else of transformers' modules with their experts on the CPU."""
    if layout.fused:
        return estimate(inventory, hardware, request, layout, routing)
    return modules_step(inventory, hardware, request, layout, routing)


def with_experts(hardware: Hardware, *, on_gpu: bool) -> Hardware:
    """A run's own rates are plain reads, of which the experts' operator reaches a part."""
    share = this_machine().cpu.expert_share
    if on_gpu:
        share = Figure(estimate=constants.EXPERT_SHARE, source="runs of a 125B model, docs/perf.md")
    return hardware.model_copy(update={"cpu": hardware.cpu.model_copy(update={"expert_share": share})})


def _compared(tier: str, planned: int, measured: Mapping[str, Any]) -> dict[str, Any]:
    peak = measured["peak"]
    return {"tier": tier, "planned": planned, "measured": peak, "ratio": planned / peak if peak else None}
