"""A placement applied to a model's tree: modules give way to operators."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import nn

import hetero.ops  # noqa: F401  registers the operators of this package
from hetero.core import HeteroError, InputError
from hetero.model.build import meta_tensors
from hetero.model.loader import ExpertSink
from hetero.registry import get_op, load_class
from hetero.rules.placement import Assignment, Placement


@dataclass(slots=True)
class Injected:
    """What ``apply`` did to a tree."""

    # Dotted name of each experts module -> what the loader hands its weights to.
    sinks: dict[str, ExpertSink] = field(default_factory=dict)
    # Dotted name of each replaced module -> its operator, by op name or class path.
    replaced: dict[str, str] = field(default_factory=dict)

    @property
    def expert_bytes(self) -> int:
        """Memory that the experts' backends hold."""
        backends = (getattr(sink, "backend", None) for sink in self.sinks.values())
        return sum(backend.nbytes for backend in backends if backend is not None)


def apply(model: Any, placement: Placement) -> Injected:
    """Replace modules of a tree of ``build_meta`` in place, in the order of the tree.

    Make the loader's plan before: it reads shapes of experts that are gone afterwards. Raises InputError for
    an operator that does not exist or does not fit, and for a module that is gone since the operator of one
    above it, whose rule says ``recursive: true``, did not keep it.
    """
    done = Injected()
    for assignment in placement.replacements():
        name = assignment.module
        if not name:
            raise InputError(f"{assignment.rule.label}: the whole model cannot be replaced; match its parts")
        path, _, leaf = name.rpartition(".")
        try:
            parent = model.get_submodule(path)
            old = parent.get_submodule(leaf)
        except AttributeError:
            raise InputError(_gone(name, assignment, done, placement)) from None
        new = _operator(assignment, old, model)
        setattr(parent, leaf, new)
        done.replaced[name] = assignment.op or assignment.cls or ""
    for name, module in model.named_modules():
        if is_sink(module):
            done.sinks[name] = module
    return done


def _gone(name: str, assignment: Assignment, done: Injected, placement: Placement) -> str:
    above = max((path for path in done.replaced if name.startswith(f"{path}.")), key=len)
    owner = placement.by_module[above].rule.label
    return (
        f"{assignment.rule.where}: {name} is gone: {done.replaced[above]}, which {owner} has put in place of "
        f"{above}, does not keep it under this name; {owner} must not say 'recursive: true'"
    )


def _operator(assignment: Assignment, module: nn.Module, model: Any) -> nn.Module:
    operator = get_op(assignment.op) if assignment.op is not None else load_class(assignment.cls or "")
    new = operator.from_module(
        module,
        name=assignment.module,
        config=model.config,
        device=assignment.device,
        options=assignment.options,
    )
    if not isinstance(new, nn.Module):
        what = assignment.op or assignment.cls
        raise InputError(f"{assignment.rule.label}: {what} returned {type(new).__name__}, not a torch module")
    return new


def is_sink(module: nn.Module) -> bool:
    """Whether a module takes experts' weights itself instead of having them as parameters."""
    return callable(getattr(module, "put", None)) and callable(getattr(module, "missing", None))


def finish(model: nn.Module) -> None:
    """After the loader: let operators see their weights (``after_load``), and check that all have arrived.

    Raises HeteroError, naming them, when parameters or buffers are still on ``meta``.
    """
    left = list(meta_tensors(model))
    if left:
        raise HeteroError(f"left without weights: {', '.join(left[:5])} ({len(left)} tensors)")
    for module in list(model.modules()):
        after_load = getattr(module, "after_load", None)
        if callable(after_load):
            after_load()
