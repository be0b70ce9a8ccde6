"""A plan as JSON; ``docs/plan.md`` explains the fields."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hetero.plan.planner import Plan
from hetero.plan.prefill import Prefill
from hetero.plan.roofline import Decode, Term
from hetero.plan.tiers import Tier

_VERSION = 1


def as_dict(plan: Plan) -> dict[str, Any]:
    """The plan as JSON; ``docs/plan.md`` explains the fields."""
    layout, inventory = plan.layout, plan.inventory
    return {
        "kind": "hetero-plan",
        "version": _VERSION,
        "model": plan.model,
        "model_type": inventory.model_type,
        "hardware": plan.hardware.name,
        "figures": {
            name: {"value": f.value, "basis": f.basis, "source": f.source}
            for name, f in plan.hardware.figures()
        },
        "request": {
            "vram": plan.request.vram,
            "ram": plan.request.ram,
            "ctx": plan.request.context,
            "concurrency": plan.request.concurrency,
            "draft": plan.request.draft,
            "accept": plan.request.accept,
            "format": str(plan.request.expert_format),
            "prompt": plan.request.prompt,
        },
        "parameters": {
            "total": inventory.params,
            "active": inventory.active_params,
            "by_kind": inventory.by_kind(),
        },
        "dense": layout.dense,
        "dense_of_run": plan.dense,
        "dense_instead": plan.instead,
        "tiers": [_tier(t) for t in plan.today.tiers],
        "bound_tiers": [_tier(t) for t in (layout.gpu, layout.ram, layout.disk) if t is not None],
        "experts": {
            "bytes": layout.expert_bytes,
            "gpu_share": layout.on_gpu,
            "ram_share": layout.in_ram,
            "disk_share": layout.on_disk,
            "slots": layout.slots,
            "copies_in_ram": layout.copies,
        },
        "fits": plan.fits,
        "decode": [_decode(d) for d in plan.decode],
        "expected": [_decode(d) for d in plan.expected],
        "today": {
            "loads": plan.fits,
            "why_not": plan.today.why_not,
            "dtype": plan.today.dtype,
            "gpu_layers": list(plan.today.gpu_layers),
            "tier": plan.today.tier,
            "fused": plan.today.fused,
            "ram_share": plan.today.ram_share,
            "table": plan.today.table,
            **_decode(plan.today.decode),
        },
        "prefill": [_prefill(p) for p in plan.prefill],
        "expected_prefill": [_prefill(p) for p in plan.today.prompts],
        "prefill_ways": [_prefill(p) for p in plan.ways],
        "alternatives": [
            {
                "change": a.change,
                "local_tok_s": a.local_tok_s,
                "uniform_tok_s": a.uniform_tok_s,
                "expected_local": a.expected_local,
                "expected_uniform": a.expected_uniform,
                "gpu_share": a.on_gpu,
                "disk_share": a.on_disk,
                "why_not": a.why,
            }
            for a in plan.alternatives
        ],
        "waits": list(plan.waits),
        "warnings": list(plan.warnings),
    }


def _tier(tier: Tier) -> dict[str, Any]:
    return {
        "name": tier.name,
        "capacity": tier.capacity,
        "used": tier.used,
        "items": [{"name": item.name, "bytes": item.bytes} for item in tier.items],
    }


def _decode(found: Decode) -> dict[str, Any]:
    return {
        "routing": found.routing,
        "hit_rate": found.hit_rate,
        "step_ms": found.step_ms,
        "tokens_per_step": found.tokens,
        "tok_s": found.tok_s,
        "binds": found.binds,
        "terms": [_term(t) for t in found.terms],
    }


def _prefill(found: Prefill) -> dict[str, Any]:
    terms = [_term(t) for t in found.terms]
    return {"tokens": found.tokens, "way": found.way, "ms": found.ms, "tok_s": found.tok_s, "terms": terms}


def _term(term: Term) -> Mapping[str, Any]:
    return {"name": term.name, "ms": term.ms, "bytes": term.bytes, "gb_s": term.gb_s, "beside": term.beside}
