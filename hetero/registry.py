"""Names of operators: what a rule's ``op`` and ``class`` lead to. Imports no torch.

An operator is a class (or any object) with ``from_module``; ``docs/operators.md`` describes the protocol. A
package offers one under a name of its own by an entry point in the group ``hetero.ops``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Protocol, TypeVar

from hetero.core import InputError

GROUP = "hetero.ops"


class Operator(Protocol):
    """What a rule's ``op`` or ``class`` names."""

    @staticmethod
    def from_module(module: Any, *, name: str, config: Any, device: str, options: Mapping[str, Any]) -> Any:
        """The module that takes the place of ``module``, which may be ``module`` itself, changed.

        ``name`` is its dotted name, ``config`` the model's configuration, ``device`` where its own weights
        will be. Weights are on ``meta`` here and arrive later, in the parameters and buffers that ``module``
        and its children have. Raise InputError for options that make no sense.
        """


OperatorT = TypeVar("OperatorT", bound=Operator)

_registered: dict[str, Operator] = {}


def register_op(name: str) -> Callable[[type[OperatorT]], type[OperatorT]]:
    """Class decorator: make an operator known under ``name``. A name can be taken once."""

    def register(operator: type[OperatorT]) -> type[OperatorT]:
        known: Any = _registered.get(name)
        if known is not None and known is not operator:
            raise ValueError(f"operator {name!r} is registered already, by {known.__module__}")
        _registered[name] = operator
        return operator

    return register


def op_names() -> list[str]:
    """Every name that a rule's ``op`` may use: registered here, or offered by an installed package."""
    return sorted({*_registered, *_offered()})


def get_op(name: str) -> Operator:
    """The operator of a name. Raises InputError, with a near name, for one that nobody offers."""
    if name in _registered:
        return _registered[name]
    offered = _offered()
    if name not in offered:
        near = get_close_matches(name, op_names(), n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"the operators are: {', '.join(op_names())}"
        raise InputError(f"unknown op {name!r}; {hint}")
    entry = offered[name]
    try:
        found: Any = entry.load()
    except Exception as error:  # another package's import may fail in any way
        raise InputError(f"op {name!r}: {entry.value} cannot be loaded: {_one_line(error)}") from error
    return _checked(found, f"op {name!r}: {entry.value}")


def load_class(path: str) -> Operator:
    """The operator behind ``package.module.Class``. Raises InputError where there is none."""
    module_name, _, class_name = path.rpartition(".")
    if not module_name:
        raise InputError(f"class {path!r} must be a dotted path such as package.module.Class")
    try:
        module = importlib.import_module(module_name)
    except Exception as error:  # the user's own code
        raise InputError(f"class {path!r}: {module_name} cannot be imported: {_one_line(error)}") from error
    if not hasattr(module, class_name):
        public = [n for n in vars(module) if not n.startswith("_")]
        near = get_close_matches(class_name, public, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise InputError(f"class {path!r}: {module_name} has no {class_name!r}{hint}")
    return _checked(getattr(module, class_name), f"class {path!r}")


def _offered() -> dict[str, EntryPoint]:
    return {entry.name: entry for entry in entry_points(group=GROUP)}


def _checked(found: Any, what: str) -> Operator:
    if not callable(getattr(found, "from_module", None)):
        raise InputError(f"{what} is no operator: it has no function 'from_module'")
    return found  # type: ignore[no-any-return]


def _one_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
