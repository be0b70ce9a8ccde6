"""Which format each block's experts get where a rule says ``keep`` or ``auto``: the checkpoint decides."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hetero.core import InputError
from hetero.formats import Format, in_blocks
from hetero.model.loadplan import LoadPlan
from hetero.model.pieces import PartSource
from hetero.model.quantised import InexactError
from hetero.model.quantised.base import QuantisedCheckpoint
from hetero.model.source import Source
from hetero.rules.options import FormatChoice, parse_choice
from hetero.rules.placement import Assignment, Placement
from hetero.rules.source import Where


def resolve_formats(
    placement: Placement, plan: LoadPlan, source: Source
) -> tuple[Placement, tuple[str, ...]]:
    """The placement with a format for every experts module, and notes for the user.

    A rule's ``keep`` becomes the format that has the checkpoint's values to the bit, ``auto`` the same where
    there is one, else the format after it. ``options["experts"]["formats"]`` maps names of experts modules to
    the formats (of gate and up, of down). Raises InputError where a rule says ``keep`` and no format does.
    """
    notes: Counter[str] = Counter()
    changed = []
    for assignment in placement.assignments:
        experts = assignment.options.get("experts")
        if assignment.op != "moe" or not isinstance(experts, Mapping) or "format" not in experts:
            changed.append(assignment)
            continue
        changed.append(_resolve(assignment, experts, plan, source, notes))
    lines = [f"{text} ({count} blocks)" if count > 1 else text for text, count in notes.items()]
    return replace(placement, assignments=tuple(changed)), tuple(lines)


def _resolve(
    assignment: Assignment,
    experts: Mapping[str, Any],
    plan: LoadPlan,
    source: Source,
    notes: Counter[str],
) -> Assignment:
    choice = parse_choice(str(experts["format"]))
    takes_codes = experts.get("backend", "native") == "native"
    formats: dict[str, tuple[str, str]] = {}
    for name in plan.experts:
        if not name.startswith(f"{assignment.module}."):
            continue
        if choice.keeps and takes_codes:
            found = _kept(name, plan, source, choice=choice, where=assignment.rule.where, notes=notes)
            formats[name] = (str(found[0]), str(found[1]))
            continue
        quantised = _stored(name, plan)
        if quantised:
            notes[f"experts: the checkpoint's {quantised} becomes {choice.fallback}, as the rule says"] += 1
        formats[name] = (str(choice.fallback), str(choice.fallback))
    if not formats:
        return assignment
    options = {**assignment.options, "experts": {**experts, "formats": formats}}
    return replace(assignment, options=options)


def _kept(
    name: str, plan: LoadPlan, source: Source, *, choice: FormatChoice, where: Where, notes: Counter[str]
) -> tuple[Format, Format]:
    parts = {part: one for part, one in plan.parts[name].items() if part in ("gate", "up", "down")}
    if not plan.quantised[name]:
        if choice.fallback is not None:
            return choice.fallback, choice.fallback
        plain = Format("bf16" if plan.dtypes[name] == {"BF16"} else "f32")
        return plain, plain
    why = next((f"{part}: {one.inexact}" for part, one in parts.items() if one.format is None), "")
    formats = [one.format for one in parts.values() if one.format is not None]
    if not why and len({one.format for part, one in parts.items() if part != "down"}) > 1:
        why = "gate and up are quantised in different formats"
    if not why:
        why = _inexact_scales(name, plan, source)
    if not why:
        down = parts["down"].format
        assert down is not None
        plan.keep.add(name)
        if choice.blocks:
            into = [part for name, part in parts.items() if name != "down"]
            formats, down = [_in_blocks(into, formats[0])], _in_blocks([parts["down"]], down)
        said = str(formats[0]) if formats[0] == down else f"{formats[0]} (down: {down})"
        notes[f"experts keep the checkpoint's values: {said}"] += 1
        return formats[0], down
    if choice.fallback is None:
        raise InputError(
            f"{where}: 'format: keep' cannot be: {name}: {why}; write another format, for example with "
            "--set experts=int8, to quantise its experts anew"
        )
    notes[
        f"experts: the checkpoint's {_stored(name, plan)} becomes {choice.fallback}, "
        f"since no packed format keeps it: {why}"
    ] += 1
    return choice.fallback, choice.fallback


def _in_blocks(parts: list[PartSource], fmt: Format) -> Format:
    return in_blocks(fmt) if all(part.ggml for part in parts) else fmt


def _inexact_scales(name: str, plan: LoadPlan, source: Source) -> str:
    """Why the values of an expert do not fit their format: found here, before all is read."""
    for part, one in plan.parts[name].items():
        if one.format is None or not one.format.name.startswith("int"):
            continue
        last = plan.counts[name] - 1
        for expert in range(plan.counts[name]):
            piece = one.piece(expert)
            try:
                if expert in (0, last):
                    source.codes(piece.name, piece.index)
                elif isinstance(source, QuantisedCheckpoint):
                    source.check_codes(piece.name, piece.index)
            except InexactError as error:
                return f"{part}: {error}".partition("; ")[0]
    return ""


def _stored(name: str, plan: LoadPlan) -> str:
    """What the checkpoint quantises a module's experts in, "" for plain ones."""
    if not plan.quantised[name]:
        return ""
    found = dict.fromkeys(str(one.format) for one in plan.parts[name].values() if one.format is not None)
    return ", ".join(found) or "quantised values"
