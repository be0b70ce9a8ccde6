"""A rule file meets a model: every module gets its first matching rule, and every mistake is told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.core import MOE_BLOCK, InputError, ModuleInfo
from hetero.rules.devices import check_device
from hetero.rules.options import BUILTIN, OpSchema, find_schema
from hetero.rules.placement import Assignment, Placement
from hetero.rules.schema import Match, Rule, RuleSet
from hetero.rules.source import listed

_SHOWN = 5


@dataclass(slots=True)
class _Ready:
    """A rule with its operator looked up, and what became of it."""

    rule: Rule
    schema: OpSchema
    device: str
    options: Mapping[str, Any]
    recursive: bool
    wins: int = 0
    lost: dict[str, int] = field(default_factory=dict)  # label of the rule that took a module -> modules
    inside: dict[str, int] = field(default_factory=dict)  # label of the rule that owns the tree -> modules

    @property
    def matched(self) -> int:
        return self.wins + sum(self.lost.values()) + sum(self.inside.values())


def match(
    ruleset: RuleSet,
    modules: Sequence[ModuleInfo],
    *,
    devices: Sequence[str] = ("cpu",),
    ops: Mapping[str, OpSchema] = BUILTIN,
    model_type: str | None = None,
    strict: bool = True,
) -> Placement:
    """Place every module of a model.

    ``modules``: the tree in order, parents before children. ``devices``: those that exist. ``ops``: the known
    operators. ``model_type``: refused if the file claims others. Without ``strict``, a rule that places
    nothing is a note of the result instead of an error.

    Raises InputError, with file, line and rule, for an unknown operator, option or device, a layer range
    beyond the model, a rule that places nothing, a module without a rule.
    """
    if model_type is not None and ruleset.models is not None and model_type not in ruleset.models:
        raise InputError(
            f"{ruleset.file}: the file is for {listed(ruleset.models)}, and the model is '{model_type}'; "
            "a file of your own may extend it"
        )
    ready = [_prepare(rule, devices, ops) for rule in ruleset.rules]
    for one in ready:
        _check_layers(one.rule, modules)
    assignments, uncovered = _walk(ready, modules)
    notes = []
    for one in ready:
        if one.wins:
            if one.rule.inherited:
                check_device(one.rule.replace.device, one.rule.where, devices)
            continue
        if one.rule.inherited and (one.matched or one.rule.optional):
            continue  # to be overridden is what an inherited rule is for
        complaint = _complain(one, modules)
        if strict and not (one.rule.optional or one.rule.inherited):
            one.rule.where.fail(complaint)
        notes.append(f"{one.rule.where}: {complaint}")
    if uncovered:
        some = listed(uncovered[:_SHOWN]) + (", ..." if len(uncovered) > _SHOWN else "")
        raise InputError(
            f"{ruleset.file}: {len(uncovered)} {_modules(len(uncovered))} without a rule: {some}; "
            "end the file with a rule for name '.*'"
        )
    return Placement(ruleset, tuple(assignments), tuple(notes))


def _prepare(rule: Rule, devices: Sequence[str], ops: Mapping[str, OpSchema]) -> _Ready:
    schema = find_schema(rule.replace, ops)
    # An inherited rule may name a device that is not there, as long as it places nothing.
    device = check_device(rule.replace.device, rule.where, None if rule.inherited else devices)
    options = schema.parse(rule.replace, devices)
    if rule.recursive and schema.needs_moe_block and rule.replace.op is not None:
        rule.where.fail(
            f"op '{rule.replace.op.data}' builds its whole block, so 'recursive: true' is not possible"
        )
    recursive = not schema.owns_subtree if rule.recursive is None else rule.recursive
    return _Ready(rule, schema, device, options, recursive)


def _check_layers(rule: Rule, modules: Sequence[ModuleInfo]) -> None:
    layers = rule.match.layers
    if layers is None:
        return
    count = max((m.layer for m in modules if m.layer is not None), default=-1) + 1
    if layers.last >= count:
        has = f"the model has layers 0-{count - 1}" if count else "the model has no numbered layers"
        layers.where.fail(f"layers {layers.text} go beyond the model: {has}")


def _walk(ready: list[_Ready], modules: Sequence[ModuleInfo]) -> tuple[list[Assignment], list[str]]:
    assignments: list[Assignment] = []
    uncovered: list[str] = []
    parents = {_parent(m.name) for m in modules if m.name}
    stops: dict[str, Assignment] = {}  # module -> the assignment that its whole subtree follows
    experts_on: dict[str, str] = {}  # experts modules and what lies in them -> their device
    by_rule = {id(one.rule): one for one in ready}
    for module in modules:
        above = stops.get(_parent(module.name)) if module.name else None
        matching = [one for one in ready if one.rule.match.matches(module)]
        if above is not None:
            assignment = _follow(module, above, experts_on)
            for one in matching:
                _count(one.inside, above.rule.label)
            stops[module.name] = above
        elif matching:
            first = matching[0]
            first.wins += 1
            for one in matching[1:]:
                _count(one.lost, first.rule.label)
            assignment = _assign(module, first)
            if not by_rule[id(first.rule)].recursive:
                stops[module.name] = assignment
        else:
            if module.own_params or module.name not in parents:
                uncovered.append(module.name or "(the root)")
            continue
        assignments.append(assignment)
    return assignments, uncovered


def _assign(module: ModuleInfo, one: _Ready) -> Assignment:
    rule = one.rule
    if one.schema.needs_moe_block and MOE_BLOCK not in module.classes and rule.replace.op is not None:
        rule.where.fail(
            f"op '{rule.replace.op.data}' replaces MoE blocks, and {module.name} is a {module.classes[0]}; "
            f"'class: {MOE_BLOCK}' in 'match' picks the blocks only"
        )
    op = None if rule.replace.op is None else str(rule.replace.op.data)
    cls = None if rule.replace.cls is None else str(rule.replace.cls.data)
    return Assignment(module.name, rule, op, cls, one.device, one.options)


def _follow(module: ModuleInfo, above: Assignment, experts_on: dict[str, str]) -> Assignment:
    """A module below one whose rule stops the descent."""
    if above.op == "keep":
        return Assignment(module.name, above.rule, "keep", None, above.device)
    device = above.device
    experts = above.options.get("experts") if above.op == "moe" else None
    if experts is not None:
        if module.experts is not None:
            experts_on[module.name] = experts["device"]
        elif (parent := _parent(module.name)) in experts_on:
            experts_on[module.name] = experts_on[parent]
        device = experts_on.get(module.name, device)
    return Assignment(module.name, above.rule, None, None, device, {}, owner=above.module)


def _complain(one: _Ready, modules: Sequence[ModuleInfo]) -> str:
    if not one.matched:
        return f"matched 0 modules{_why_nothing(one, modules)}"
    count = f"places nothing: the {one.matched} {_modules(one.matched)} that it matches "
    count = count.replace("the 1 module that it matches", "the module that it matches")
    if not one.inside:
        return f"{count}are taken by earlier rules: {_tally(one.lost)}; move it up or remove it"
    inside = f"inside modules that another rule replaces whole: {_tally(one.inside)}"
    if not one.lost:
        return f"{count}lie {inside}"
    return f"{count}are taken by earlier rules: {_tally(one.lost)}; or lie {inside}"


def _tally(counts: Mapping[str, int]) -> str:
    return listed(f"{label} ({count})" for label, count in counts.items())


def _why_nothing(one: _Ready, modules: Sequence[ModuleInfo]) -> str:
    """Which condition fails, and what the model has that looks like it."""
    match = one.rule.match
    where = match.where
    parts = {
        "name": Match(where, name=match.name) if match.name is not None else None,
        "class": Match(where, cls=match.cls) if match.cls is not None else None,
        "layers": Match(where, layers=match.layers) if match.layers is not None else None,
    }
    alone = {key: sum(part.matches(m) for m in modules) for key, part in parts.items() if part is not None}
    text = ""
    if len(alone) > 1:
        text = ": " + listed(f"'{key}' alone matches {count}" for key, count in alone.items())
    if one.schema.needs_moe_block:
        blocks = list(dict.fromkeys(_starred(m.name) for m in modules if MOE_BLOCK in m.classes))
        return text + (
            f"; the MoE blocks are {listed(blocks[:_SHOWN])}" if blocks else "; the model has no MoE block"
        )
    close: list[str] = []
    if alone.get("name") == 0 and match.name is not None:
        names = list(dict.fromkeys(_starred(m.name) for m in modules))
        close = difflib.get_close_matches(_as_glob(match.name.pattern), names, n=1, cutoff=0.5)
    elif alone.get("class") == 0 and match.cls is not None:
        classes = list(dict.fromkeys(c for m in modules for c in m.classes))
        close = difflib.get_close_matches(match.cls.strip("*"), classes, n=1, cutoff=0.5)
    return text + (f"; the closest in the model is '{close[0]}'" if close else "")


def _starred(name: str) -> str:
    return re.sub(r"\b[0-9]+\b", "*", name)


def _as_glob(pattern: str) -> str:
    """A regular expression about as a person reads it, for comparison with names only."""
    text = re.sub(r"\\d[+*]?|\.[*+]|\[[^\]]*\][+*]?|\([^)]*\)", "*", pattern)
    return re.sub(r"[\\^$?+]", "", text)


def _count(counts: dict[str, int], key: str) -> None:
    counts[key] = counts.get(key, 0) + 1


def _parent(name: str) -> str:
    return name.rpartition(".")[0]


def _modules(count: int) -> str:
    return "module" if count == 1 else "modules"
