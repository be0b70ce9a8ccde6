"""A plan as a rule file: what of it today's operators can do, and as comments what they cannot yet."""

from __future__ import annotations

from hetero.plan.inventory import Kind
from hetero.plan.planner import Plan
from hetero.plan.sizes import gib

_WIDTH = 100


def rule_file(plan: Plan) -> str:
    """The YAML text. It asks for ``cuda:0`` where the plan has a GPU."""
    on_gpu = plan.layout.gpu is not None
    device = '"${gpu}"' if on_gpu else "cpu"
    place = (
        f"{plan.hardware.name}, {'experts on the CPU, the rest on one GPU' if on_gpu else 'the CPU alone'}"
    )
    lines = [
        *_comment(f"Written by hetero plan for {plan.model} on {plan.hardware.name}."),
        *(line for tier in _tiers(plan) for line in _comment(tier)),
        *_comment(
            f"Dense layers: run with --dtype {plan.dtype}. Decode, at most: "
            f"{plan.today.tok_s:.1f} tokens/s with these rules, "
            + " and ".join(f"{d.tok_s:.0f} ({d.routing} routing)" for d in plan.decode)
            + (" once the rest is built:" if plan.waits else " as the bound.")
        ),
        *(line for wait in plan.waits for line in _comment(f"- {wait}", indent="  ")),
        f"description: {place}; written by hetero plan.",
        f"models: [{plan.inventory.model_type}]",
        "vars:",
    ]
    if on_gpu:
        lines.append("  gpu: cuda:0")
    if plan.inventory.sites:
        lines.append(f"  experts: {plan.request.expert_format}")
    if lines[-1] == "vars:":
        lines.pop()
    lines.append("rules:")
    if plan.inventory.of(Kind.TABLE) and on_gpu:
        lines += _rule("n-gram table", r"{name: '\.ngram_embedding$'}", "{op: keep, device: cpu}")
    if plan.inventory.sites:
        experts = '{device: cpu, format: "${experts}", isa: auto, numa: split}'
        lines += _rule(
            "routed experts", "{class: MoeBlock}", f"{{op: moe, device: {device}, experts: {experts}}}"
        )
    lines += _rule("everything else", "{name: '.*'}", f"{{op: keep, device: {device}}}")
    return "\n".join(lines) + "\n"


def _rule(name: str, match: str, replace: str) -> list[str]:
    return [f"  - name: {name}", f"    match: {match}", f"    replace: {replace}"]


def _tiers(plan: Plan) -> list[str]:
    found = []
    for tier in (plan.layout.gpu, plan.layout.ram, plan.layout.disk):
        if tier is not None and tier.items:
            items = ", ".join(f"{item.name} {gib(item.bytes)}" for item in tier.items)
            of = f" of {gib(tier.capacity)}" if tier.capacity is not None else ""
            found.append(f"{tier.name}: {gib(tier.used)}{of}: {items}.")
    return found


def _comment(text: str, indent: str = "") -> list[str]:
    lines, line = [], "#"
    for word in (indent + text.lstrip()).split(" "):
        if len(line) + len(word) + 1 > _WIDTH and line != "#":
            lines.append(line)
            line = f"# {indent}"
        line += f" {word}"
    return [*lines, line]
