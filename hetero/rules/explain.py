"""What a placement means: module -> rule -> operator -> device -> bytes, and totals per device."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hetero.core import ExpertSpec, ModuleInfo
from hetero.formats import expert_bytes, parse_format
from hetero.rules.options import expected_format
from hetero.rules.placement import Assignment, Placement

_RUNS = 3  # runs of numbers that a folded name spells out
CACHE = "cache of moe"
"""Operator of lines for experts that a GPU holds besides main memory."""
IN_RAM = "RAM of moe"
"""Operator of lines for experts of the disk tier that main memory holds besides."""
IN_RAM_ROWS = "RAM of embedding"
"""Operator of lines for rows that main memory holds besides, of a table on disk."""
DISK = "disk"
DENSE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Line:
    """One module: what its rule makes of it, and the bytes of its own weights."""

    module: str
    cls: str
    rule: str
    op: str  # the operator, or the one that built the owner
    device: str
    format: str  # dtype of dense weights, format of experts; "" where there are no weights
    bytes: int
    owner: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {
            "module": self.module,
            "class": self.cls,
            "rule": self.rule,
            "op": self.op,
            "device": self.device,
            "format": self.format,
            "bytes": self.bytes,
            "owner": self.owner,
        }


@dataclass(frozen=True, slots=True)
class Group:
    """Modules that differ in their numbers only and fare alike."""

    pattern: str  # numbers as {0-47}, {0,4,8} or {36 of 0-46}
    count: int
    line: Line  # the first of them
    bytes: int  # of all


def bytes_of_experts(spec: ExpertSpec, fmt: str, down_format: str | None = None) -> int:
    """Bytes of all packed experts of one block. ``down_format``: of the down projection, if another."""
    one = expert_bytes(
        parse_format(fmt),
        spec.hidden,
        spec.intermediate,
        has_gate=spec.has_gate,
        has_bias=spec.has_bias,
        down_format=None if down_format is None else parse_format(down_format),
    )
    return spec.num_experts * one


def explain(placement: Placement, modules: Sequence[ModuleInfo], dtype: str = "float32") -> list[Line]:
    """One line per module that has an assignment. ``dtype``: of dense weights. Weights of experts that op
    "moe" takes are counted in their packed format, on "disk" those of that tier. Experts of which a GPU or
    main memory holds some besides have a second line, where their rule says how many; so has a table of op
    "embedding" that is on disk. One that may be in either counts as in main memory."""
    lines = []
    rows: list[Line] = []
    cached: list[tuple[Line, Assignment]] = []
    for module in modules:
        assignment = placement.by_module.get(module.name)
        if assignment is None:
            continue
        line = _line(module, assignment, placement.by_module, dtype)
        lines.append(line)
        owner = placement.by_module.get(assignment.owner or "", assignment)
        if module.experts is not None and owner.op == "moe" and line.device in ("cpu", DISK):
            cached.append((line, owner))
        if assignment.op == "embedding" and line.device == DISK:
            ram = min(assignment.options["table"]["ram"], line.bytes)
            rows.append(replace(line, op=IN_RAM_ROWS, device="cpu", bytes=ram))
    return lines + rows + _caches(cached)


def table_notes(placement: Placement) -> list[str]:
    """Of tables that are in main memory where there is room: a sentence each."""
    found = {
        one.rule.label: one.module
        for one in placement.assignments
        if one.op == "embedding" and one.options["table"]["tier"] == "auto"
    }
    return [
        f"{label}: 'tier: auto' leaves {module} on disk where main memory has no room for it beside the rest"
        for label, module in found.items()
    ]


def cache_notes(placement: Placement) -> list[str]:
    """Of rules whose experts a GPU holds besides, as many as there is room for: a sentence each."""
    if not any(one.op == "fused" for one in placement.assignments):
        return []
    found = {}
    for one in placement.assignments:
        experts = one.options["experts"] if one.op == "moe" else None
        if experts is not None and one.device != experts["device"] == "cpu" and experts["cache"].is_auto:
            found[one.rule.label] = one.device
    return [f"{label}: 'cache: auto' takes what is left of {device}" for label, device in found.items()]


def _caches(experts: Sequence[tuple[Line, Assignment]]) -> list[Line]:
    """The lines of what GPUs hold of experts in main memory, and main memory of those on disk."""
    of_rule: dict[str, int] = {}
    for line, owner in experts:
        of_rule[owner.rule.label] = of_rule.get(owner.rule.label, 0) + line.bytes
    found = []
    for line, owner in experts:
        total = of_rule[owner.rule.label]
        held = owner.options["experts"]["cache"].of(total)
        if held and owner.device != "cpu":
            share = line.bytes * held // total
            found.append(replace(line, op=CACHE, device=owner.device, bytes=share))
        ram = owner.options["experts"].get("ram")
        if line.device == DISK and ram is not None:
            share = line.bytes * min(ram, total) // total
            found.append(replace(line, op=IN_RAM, device="cpu", bytes=share))
    return found


def totals(lines: Sequence[Line]) -> dict[str, int]:
    """Bytes per device, the CPU first; "disk" for experts of that tier."""
    found: dict[str, int] = {}
    for line in lines:
        found[line.device] = found.get(line.device, 0) + line.bytes
    return dict(sorted(found.items(), key=lambda item: (item[0] != "cpu", item[0])))


def group(lines: Sequence[Line]) -> list[Group]:
    """Fold modules that differ in numbers only and have the same class, rule, operator, device and format."""
    folded: dict[tuple[str, ...], list[Line]] = {}
    for line in lines:
        owner = _collapse(line.owner or "")
        key = (
            _collapse(line.module),
            line.cls,
            line.rule,
            _collapse(line.op),
            line.device,
            line.format,
            owner,
        )
        folded.setdefault(key, []).append(line)
    return [
        Group(_pattern([m.module for m in many]), len(many), many[0], sum(m.bytes for m in many))
        for many in folded.values()
    ]


def human(count: int) -> str:
    """Bytes for people: 1.5 GiB."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def _line(
    module: ModuleInfo, assignment: Assignment, by_module: Mapping[str, Assignment], dtype: str
) -> Line:
    owner = by_module.get(assignment.owner) if assignment.owner else None
    fmt, size = (dtype, module.own_params * DENSE_BYTES[dtype]) if module.own_params else ("", 0)
    acting = owner or assignment
    device = assignment.device
    if module.experts is not None and acting.op == "moe":
        experts = acting.options["experts"]
        expected = str(expected_format(experts["format"]))
        first, down = experts.get("formats", {}).get(module.name, (expected, expected))
        fmt = first if first == down else f"{first} + {down}"
        size = bytes_of_experts(module.experts, first, down)
        device = DISK if experts.get("tier") == "disk" else device
    elif acting.op == "embedding" and size:
        table = acting.options["table"]
        # As most checkpoints have it, until one is known.
        fmt = table.get("dtype", "bfloat16")
        as_stored = table.get("nbytes", module.own_params * DENSE_BYTES["bfloat16"])
        size = module.own_params * DENSE_BYTES[fmt] if fmt in DENSE_BYTES else as_stored
        if table["tier"] == DISK:
            size, device = as_stored, DISK
    elif size and (packed := _linear_format(module, acting)) is not None:
        linear = parse_format(packed)
        # Without the padding of blocks, which the number of weights does not tell.
        fmt, size = str(linear), int(module.own_params * linear.bits_per_weight / 8)
    cls = module.classes[0] if module.classes else ""
    op = acting.op or acting.cls or ""
    return Line(module.name, cls, assignment.rule.name, op, device, fmt, size, assignment.owner)


def _linear_format(module: ModuleInfo, acting: Assignment) -> str | None:
    """The format of a packed linear layer, alone or in a MoE block; None for what is not packed."""
    if acting.op == "linear" or (acting.op == "moe" and "Linear" in module.classes):
        found: str | None = acting.options.get("format")
        return found
    return None


def _collapse(name: str) -> str:
    return re.sub(r"(?<![^.\s])[0-9]+(?![^.])", "*", name)


def _pattern(names: Sequence[str]) -> str:
    """One name for many: numbers that vary become their ranges."""
    split = [name.split(".") for name in names]
    parts = []
    for column in zip(*split, strict=True):
        values = list(dict.fromkeys(column))
        parts.append(values[0] if len(values) == 1 else "{" + _numbers([int(v) for v in values]) + "}")
    return ".".join(parts)


def _numbers(numbers: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    if len(runs) > _RUNS:
        return f"{len(numbers)} of {runs[0][0]}-{runs[-1][1]}"
    return ",".join(f"{a}" if a == b else f"{a}-{b}" for a, b in runs)
