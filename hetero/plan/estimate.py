"""How long a decode step of fused layers is expected to take, term by term, where the bound tells how long it
takes at least.

A layer is its dense part, then the CPU's and the GPU's experts, of which the later side counts. Experts are
whole: how many are missing differs from layer to layer, and so does how well they divide. ``constants`` has
what was measured of everything else. A step is launched before the host has seen the last one's token, so
that nothing stands between them.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import exp, lgamma, log, log1p

from hetero.plan import constants
from hetero.plan.hardware import Hardware
from hetero.plan.inventory import Inventory
from hetero.plan.roofline import (
    Decode,
    Term,
    both_rates,
    dense_terms,
    disk_terms,
    kept_term,
    kinds_of,
)
from hetero.plan.routing import Routing, misses, touched
from hetero.plan.tiers import Layout, Request, one_expert_bytes

_LEAST = 1e-9


def estimate(
    inventory: Inventory, hardware: Hardware, request: Request, layout: Layout, routing: Routing
) -> Decode:
    """A step of one token for each of the request's sequences; nothing is drafted. ``layout`` has a GPU."""
    gpu = hardware.gpu
    assert gpu is not None
    request = replace(request, draft=0)
    streams = request.concurrency
    recurrent, others, hyper = kinds_of(inventory)
    launches = (
        recurrent * constants.LINEAR_KERNELS
        + others * constants.ATTENTION_KERNELS
        + hyper * constants.HYPER_KERNELS
        + constants.HEAD_KERNELS
    )
    terms = [
        *dense_terms(inventory, hardware, layout),
        kept_term(inventory, hardware, request, layout),
        Term(f"{launches} kernels", launches * constants.KERNEL * gpu.launch_us.value / 1e3),
    ]
    cpu_alone = hardware.ram.read_gb_s.value * hardware.cpu.expert_share.value
    cpu, pcie = both_rates(hardware)
    sides = moves = needed = missing = 0.0
    for site in inventory.sites:
        size, e, k = (
            one_expert_bytes(site.spec, request.expert_format),
            site.spec.num_experts,
            site.spec.top_k,
        )
        wanted = touched(routing, e, k, streams=streams)
        missed = misses(routing, layout.on_gpu, e, k, streams=streams)
        if routing.name == "local" and layout.on_gpu:
            missed *= constants.MISSED
        missed = min(missed, wanted)
        needed, missing = needed + wanted, missing + missed
        seconds = tuple(
            size / max(rate, _LEAST) / 1e3 for rate in (cpu_alone, cpu, pcie, gpu.read_gb_s.value)
        )
        sides += _later_us(round(wanted), missed / wanted if wanted else 0.0, seconds, pcie > _LEAST)
        if routing.name == "local" and 0.0 < layout.on_gpu < 1.0:
            moves += min(1.0, constants.MOVED * missed)
    layers = len(inventory.sites)
    handoff = hardware.handoff_us.value if hardware.handoff_us is not None else 0.0
    terms.append(Term("experts, the later of CPU and GPU", sides / 1e3))
    # Where nothing is ever missing the answer is there before the GPU asks for it.
    each_us = constants.ALL_HERE_US if layout.on_gpu >= 1.0 else handoff + constants.LAYER_US
    terms.append(Term("hand-off", layers * each_us / 1e3))
    terms.append(Term("experts that are moved", moves * constants.MOVE_US / 1e3))
    terms += disk_terms(inventory, hardware, layout, 0.0, streams)
    hits = 1.0 - missing / needed if needed and layout.on_gpu else 0.0
    return Decode(routing.name, hits, tuple(t for t in terms if t.ms > 0), float(streams))


@lru_cache(maxsize=256)
def _later_us(wanted: int, rate: float, each: tuple[float, ...], shared: bool) -> float:
    """Microseconds until the later side of a layer ends, on average over how many of ``wanted`` experts are
    missing, each with chance ``rate``. ``each``: microseconds an expert takes by the CPU alone, by the CPU
    beside PCIe, over PCIe, in GPU memory. ``shared``: PCIe takes some, as many as end soonest."""
    alone, beside, over, here = each
    total = 0.0
    for missing in range(wanted + 1):
        chance = _chance(wanted, missing, rate)
        if chance < 1e-6:
            continue
        hit = (wanted - missing) * here
        best = float("inf")
        for taken in range(missing + 1 if shared else 1):
            left = missing - taken
            by_cpu = constants.LEAD_US + left * (beside if taken else alone) if left else 0.0
            by_gpu = constants.OWN_US + hit + taken * over
            best = min(best, max(by_cpu, by_gpu))
        total += chance * best
    return total


def _chance(of: int, count: int, rate: float) -> float:
    """That exactly ``count`` of so many are missing. By logarithms: the ways of choosing from a thousand and
    more exceed a float."""
    if rate <= 0.0 or rate >= 1.0:
        return float(count == (of if rate >= 1.0 else 0))
    ways = lgamma(of + 1) - lgamma(count + 1) - lgamma(of - count + 1)
    return exp(ways + count * log(rate) + (of - count) * log1p(-rate))
