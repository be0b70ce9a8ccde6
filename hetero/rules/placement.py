"""The result of matching a rule file against a model: which module goes where, and as what."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from hetero.rules.schema import Rule, RuleSet


@dataclass(frozen=True, slots=True)
class Assignment:
    """What one module becomes.

    Either ``op`` (a registered operator, "keep" leaves the module as transformers builds it) or ``cls`` (the
    dotted path of a user's operator) is set on a module that a rule reached. A module inside one that was
    replaced whole has neither: ``owner`` names the replaced module, and the owner's operator builds it.
    """

    module: str  # dotted name, "" for the root
    rule: Rule
    op: str | None
    cls: str | None
    device: str  # "cpu" or "cuda:N"; where the module's own weights live
    # Complete, defaults filled in. Op "moe": {"experts": {"device": "cpu", "format": "int4", "isa": "auto",
    # "numa": "split", "threads": None, "backend": "native", "tier": "ram", "ram": None,
    # "cache": CacheSize(), "share": None, "defer": 0}, "format": None}. Op "embedding":
    # {"table": {"tier": "auto", "ram": 67108864}}. Foreign operators: the rule's kwargs.
    options: Mapping[str, Any] = field(default_factory=dict)
    owner: str | None = None

    @property
    def replaces(self) -> bool:
        """Whether an operator takes the module's place."""
        return self.owner is None and self.op != "keep"


@dataclass(frozen=True)
class Placement:
    """Every module with weights or without children has an assignment, in the order of the tree.

    Containers (a list of layers, the root) have one only where a rule names them.
    """

    ruleset: RuleSet
    assignments: tuple[Assignment, ...]
    # Rules that placed nothing and may, one sentence each: optional ones, inherited ones that match nothing,
    # and, where the match was not strict, any.
    notes: tuple[str, ...] = ()

    @cached_property
    def by_module(self) -> Mapping[str, Assignment]:
        return {a.module: a for a in self.assignments}

    def replacements(self) -> Iterator[Assignment]:
        """The modules that operators replace, in the order of the tree; none lies inside another one unless
        its rule says ``recursive: true``."""
        return (a for a in self.assignments if a.replaces)

    def device_of(self, module: str) -> str | None:
        """Where a module's own weights live; None for a container that no rule names."""
        found = self.by_module.get(module)
        return found.device if found else None
