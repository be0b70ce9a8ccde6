"""A plan as a rule file: what of it the operators can do, and as comments what they cannot."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence

from hetero.plan.inventory import TABLES, Kind
from hetero.plan.planner import Plan
from hetero.plan.sizes import gib

_WIDTH = 100
_THIS, _MODEL = "THIS FILE", "MODEL"


def rule_file(plan: Plan) -> str:
    """The YAML text. It asks for ``cuda:0`` where the plan has a GPU."""
    on_gpu = plan.layout.gpu is not None
    device = '"${gpu}"' if on_gpu else "cpu"
    place = (
        f"{plan.hardware.name}, {'experts on the CPU, the rest on one GPU' if on_gpu else 'the CPU alone'}"
    )
    lines = [
        *_comment(f"Written by hetero plan for {plan.model} on {plan.hardware.name}."),
        *_comment(f"Made for: {command(plan, _THIS)}"),
        *(line for tier in _tiers(plan) for line in _comment(tier)),
        *_comment(
            "Decode, expected: "
            + " and ".join(f"{d.tok_s:.1f} tokens/s ({d.routing} routing)" for d in plan.expected)
            + "; at most "
            + " and ".join(f"{d.tok_s:.0f}" for d in plan.decode)
            + (", the bound, which needs:" if plan.waits else ", the bound.")
        ),
        *(line for wait in plan.waits for line in _comment(f"- {wait}", indent="  ")),
        f"description: {json.dumps(f'{place}; written by hetero plan.', ensure_ascii=False)}",
        f"models: [{plan.inventory.model_type}]",
        "vars:",
    ]
    if on_gpu:
        lines.append("  gpu: cuda:0")
    if plan.inventory.sites:
        fmt = plan.request.expert_format
        lines.append(f"  experts: {'keep' if plan.request.keep or fmt.kept_only else fmt}")
    if plan.today.fused is not None:
        lines.append(f"  dense: {'bf16' if plan.layout.dense == 'bfloat16' else plan.layout.dense}")
        if plan.today.table:
            lines.append(f"  table: {plan.today.table}")
        return "\n".join([*lines, f"extends: {plan.today.fused}"]) + "\n"
    if lines[-1] == "vars:":
        lines.pop()
    lines.append("rules:")
    if plan.inventory.of(Kind.TABLE):
        place = f"{{op: embedding, device: cpu, table: {{tier: {plan.today.table}}}}}"
        lines += _rule("large tables", rf"{{name: '\.({'|'.join(TABLES)})$'}}", place)
    if layers := plan.today.gpu_layers:
        match = f"{{class: MoeBlock, layers: '{_ranges(layers)}'}}"
        experts = '{device: "${gpu}", format: "${experts}"}'
        lines += _rule("experts on the GPU", match, f"{{op: moe, device: {device}, experts: {experts}}}")
    if len(plan.today.gpu_layers) < len(plan.inventory.sites):
        tier = ", tier: disk" if plan.today.tier == "disk" else ""
        experts = f'{{device: cpu, format: "${{experts}}", isa: auto, numa: split{tier}}}'
        replace = f"{{op: moe, device: {device},\n              experts: {experts}}}"
        lines += _rule("routed experts", "{class: MoeBlock}", replace)
    lines += _rule("everything else", "{name: '.*'}", f"{{op: keep, device: {device}}}")
    return "\n".join(lines) + "\n"


def command(plan: Plan, file: str | None, model: str = _MODEL) -> str:
    """The run that a plan of ``model`` is made for, by its rules in ``file``; None: by ``--auto``."""
    request, layout = plan.request, plan.layout
    many = request.concurrency > 1
    chosen = "--auto" if file is None else f"--rules {file if file == _THIS else shlex.quote(file)}"
    words = [
        f"hetero {'serve' if many else 'run'} {model if model == _MODEL else shlex.quote(model)} {chosen}"
    ]
    words.append(f"--ctx {request.context}")
    if many:
        words.append(f"--slots {request.concurrency}")
    if file is not None and plan.today.fused is None:
        words.append(f"--dtype {plan.dtype}")
    elif request.vram is not None and layout.gpu is not None:
        words.append(f"--vram {request.vram // 2**20}MiB")
    return " ".join(words)


def _ranges(layers: Sequence[int]) -> str:
    """Layer numbers as a rule writes them: 0-11,14."""
    runs: list[list[int]] = []
    for layer in layers:
        if runs and layer == runs[-1][1] + 1:
            runs[-1][1] = layer
        else:
            runs.append([layer, layer])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def _rule(name: str, match: str, replace: str) -> list[str]:
    return [f"  - name: {name}", f"    match: {match}", f"    replace: {replace}"]


def _tiers(plan: Plan) -> list[str]:
    found = []
    for tier in plan.today.tiers:
        if tier.items:
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
