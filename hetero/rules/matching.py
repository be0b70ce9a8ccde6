"""A rule file meets a model: every module gets its first matching rule, and every mistake is told."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hetero.core import MOE_BLOCK, ModuleInfo
from hetero.rules.devices import check_device
from hetero.rules.mistakes import Mistakes
from hetero.rules.options import BUILTIN, FOREIGN, OpSchema, find_schema
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
    mistakes: Mistakes | None = None,
) -> Placement:
    """Place every module of a model.

    ``modules``: the tree in order, parents before children. ``devices``: those that exist. ``ops``: the known
    operators. ``model_type``: refused if the file claims others. Without ``strict``, a rule that places
    nothing is a note of the result instead of an error.

    Raises InputError, with file, line and rule, for every unknown operator, option or device, layer range
    beyond the model and rule that matches nothing, and for those of ``mistakes``; where there are none of
    these, for every rule that places nothing and for modules without a rule.
    """
    mistakes = Mistakes() if mistakes is None else mistakes
    if model_type is not None and ruleset.models is not None and model_type not in ruleset.models:
        claims = f"the file is for {listed(ruleset.models)}, and the model is '{model_type}'"
        mistakes.add(ruleset.file, f"{claims}; a file of your own may extend it")
        mistakes.tell()
    ready: list[_Ready] = []
    for rule in ruleset.rules:
        with mistakes:
            ready.append(_prepare(rule, devices, ops))
        with mistakes:
            _check_layers(rule, modules)
            if strict and not (rule.optional or rule.inherited):
                _check_matches(rule, ops, modules)
    # What follows depends on all rules, so a mistake in one of them would be told as many.
    mistakes.tell()
    assignments, uncovered = _walk(ready, modules, mistakes)
    notes = []
    for one in ready:
        with mistakes:
            notes += _unplaced(one, devices, modules, strict)
    if uncovered:
        some = listed(uncovered[:_SHOWN]) + (", ..." if len(uncovered) > _SHOWN else "")
        count = f"{len(uncovered)} {_modules(len(uncovered))} without a rule"
        mistakes.add(ruleset.file, f"{count}: {some}; end the file with a rule for name '.*'")
    mistakes.tell()
    return Placement(ruleset, tuple(assignments), tuple(notes))


def _prepare(rule: Rule, devices: Sequence[str], ops: Mapping[str, OpSchema]) -> _Ready:
    mistakes = Mistakes()
    device = ""
    options: Mapping[str, Any] = {}
    with mistakes:
        # An inherited rule may name a device that is not there, as long as it places nothing.
        device = check_device(rule.replace.device, rule.where, None if rule.inherited else devices)
    schema = FOREIGN
    with mistakes:
        schema = find_schema(rule.replace, ops)
        options = schema.parse(rule.replace, devices)
    with mistakes:
        if rule.recursive and schema.needs_moe_block and rule.replace.op is not None:
            rule.where.fail(
                f"op '{rule.replace.op.data}' builds its whole block, so 'recursive: true' is not possible"
            )
    mistakes.tell()
    recursive = not schema.owns_subtree if rule.recursive is None else rule.recursive
    return _Ready(rule, schema, device, options, recursive)


def _check_matches(rule: Rule, ops: Mapping[str, OpSchema], modules: Sequence[ModuleInfo]) -> None:
    if not any(rule.match.matches(module) for module in modules):
        rule.where.fail(_nothing(rule, _needs_block(rule, ops), modules))


def _needs_block(rule: Rule, ops: Mapping[str, OpSchema]) -> bool:
    op = rule.replace.op
    return op is not None and op.data in ops and ops[op.data].needs_moe_block


def _unplaced(one: _Ready, devices: Sequence[str], modules: Sequence[ModuleInfo], strict: bool) -> list[str]:
    """Notes about a rule that places nothing. Raises RuleError where it must not."""
    rule = one.rule
    if one.wins:
        if rule.inherited:
            check_device(rule.replace.device, rule.where, devices)
        return []
    if rule.inherited and (one.matched or rule.optional):
        return []  # to be overridden is what an inherited rule is for
    complaint = _shadowed(one) if one.matched else _nothing(rule, one.schema.needs_moe_block, modules)
    if strict and not (rule.optional or rule.inherited):
        rule.where.fail(complaint)
    return [f"{rule.where}: {complaint}"]


def _check_layers(rule: Rule, modules: Sequence[ModuleInfo]) -> None:
    layers = rule.match.layers
    if layers is None:
        return
    count = max((m.layer for m in modules if m.layer is not None), default=-1) + 1
    if layers.last >= count:
        has = f"the model has layers 0-{count - 1}" if count else "the model has no numbered layers"
        layers.where.fail(f"layers {layers.text} go beyond the model: {has}")


def _walk(
    ready: list[_Ready], modules: Sequence[ModuleInfo], mistakes: Mistakes
) -> tuple[list[Assignment], list[str]]:
    assignments: list[Assignment] = []
    uncovered: list[str] = []
    parents = {_parent(m.name) for m in modules if m.name}
    stops: dict[str, Assignment] = {}  # module -> the assignment that its whole subtree follows
    experts_on: dict[str, str] = {}  # experts modules and what lies in them -> their device
    refused: set[int] = set()  # rules whose first module that they cannot replace has been told
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
            if id(first) not in refused:
                with mistakes:
                    refused.add(id(first))
                    _check_block(module, first)
                    refused.remove(id(first))
            assignment = _assign(module, first)
            if not first.recursive:
                stops[module.name] = assignment
        else:
            if module.own_params or module.name not in parents:
                uncovered.append(module.name or "(the root)")
            continue
        assignments.append(assignment)
    return assignments, uncovered


def _check_block(module: ModuleInfo, one: _Ready) -> None:
    rule = one.rule
    if one.schema.needs_moe_block and MOE_BLOCK not in module.classes and rule.replace.op is not None:
        rule.where.fail(
            f"op '{rule.replace.op.data}' replaces MoE blocks, and {module.name} is a {module.classes[0]}; "
            f"'class: {MOE_BLOCK}' in 'match' picks the blocks only"
        )
    if one.schema.needs_embedding and "Embedding" not in module.classes and rule.replace.op is not None:
        rule.where.fail(
            f"op '{rule.replace.op.data}' replaces tables of embeddings, and {module.name} is a "
            f"{module.classes[0]}; 'class: Embedding' in 'match' picks such tables only"
        )


def _assign(module: ModuleInfo, one: _Ready) -> Assignment:
    rule = one.rule
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


def _shadowed(one: _Ready) -> str:
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


def _nothing(rule: Rule, needs_block: bool, modules: Sequence[ModuleInfo]) -> str:
    """That a rule matches nothing, which condition fails, and what the model has that looks like it."""
    match = rule.match
    where = match.where
    parts = {
        "name": Match(where, name=match.name) if match.name is not None else None,
        "class": Match(where, cls=match.cls) if match.cls is not None else None,
        "layers": Match(where, layers=match.layers) if match.layers is not None else None,
    }
    alone = {key: sum(part.matches(m) for m in modules) for key, part in parts.items() if part is not None}
    text = "matched 0 modules"
    if len(alone) > 1:
        text += ": " + listed(f"'{key}' alone matches {count}" for key, count in alone.items())
    if needs_block:
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
