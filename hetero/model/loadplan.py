"""A checked plan of a load: which tensors go where, everything found that names and shapes can tell.

Made before the first weight is read and before blocks of the tree are replaced: absent tensors, tensors that
nothing consumes, wrong and transposed shapes, another number of experts, dtypes that are no weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch
from torch import nn

from hetero.core import InputError
from hetero.model.build import is_experts
from hetero.model.convert import Layout, convert, convert_expert, is_expertwise, per_expert_sources
from hetero.model.names import NameMap, Target, map_names
from hetero.model.pieces import PARTS, Found, PartSource, follow_orders, of_source, trace
from hetero.model.source import Source, unsupported_dtype


@dataclass(slots=True)
class Place:
    """Where a parameter or buffer lives: found before blocks are replaced, valid after."""

    owner: nn.Module
    leaf: str
    shape: torch.Size


@dataclass(slots=True)
class LoadPlan:
    """A checked way from a checkpoint into a tree."""

    names: NameMap
    places: dict[str, Place]
    # Dotted name of each experts module -> its layout.
    experts: dict[str, Layout]
    # Tied parameter -> the one that it shares, both names of the tree.
    tied: dict[str, str]
    # Experts module -> part -> where it stands. Of modules in ``own`` all parts, and biases; of others the
    # matrices alone.
    parts: dict[str, dict[str, PartSource]] = field(default_factory=dict)
    # Experts modules whose parts the source has under names of its own: no target makes their parameters.
    own: set[str] = field(default_factory=set)
    # Experts module -> whether its matrices are quantised in the source, and their dtypes.
    quantised: dict[str, bool] = field(default_factory=dict)
    dtypes: dict[str, set[str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # of experts
    # Experts modules whose values must arrive as they are.
    keep: set[str] = field(default_factory=set)

    def names_of(self, experts: Iterable[str]) -> set[str]:
        """Names of the tensors of modules in ``own``."""
        return {
            part.piece(expert).name
            for name in experts
            for part in self.parts[name].values()
            for expert in range(self.counts[name])
        }


def plan_load(model: Any, checkpoint: Source) -> LoadPlan:
    """Match a checkpoint with the tree of ``build_meta``, before any block of it is replaced.

    Raises InputError for whatever does not fit.
    """
    state = model.state_dict(keep_vars=True)
    modules = {name: module for name, module in model.named_modules() if is_experts(module)}
    own = {name: parts for name in modules if (parts := _own_parts(name, modules[name], checkpoint))}
    elsewhere = {
        piece.name
        for name, parts in own.items()
        for part in parts.values()
        for piece in map(part.piece, range(modules[name].down_proj.shape[0]))
    }
    names = map_names(model, [name for name in checkpoint.tensors if name not in elsewhere])
    if names.unconsumed:
        raise InputError(
            f"{checkpoint.folder}: {len(names.unconsumed)} tensors belong to no parameter of "
            f"{type(model).__name__}: {some(names.unconsumed)}"
        )
    tied = {
        name: source for name, source in model.all_tied_weights_keys.items() if {name, source} <= state.keys()
    }
    plan = LoadPlan(names, {}, {}, tied)
    for name in state:
        path, _, leaf = name.rpartition(".")
        plan.places[name] = Place(model.get_submodule(path), leaf, state[name].shape)
    for name, module in modules.items():
        plan.experts[name] = Layout.of(module)
        plan.counts[name] = module.down_proj.shape[0]
    plan.own |= own.keys()
    _check_present(model, plan, checkpoint)
    for target in names.targets:
        _check_dtypes(target, state, checkpoint)
        _check_shapes(target, plan, model, checkpoint)
    for name, module in modules.items():
        if name in own:
            _check_own(name, own[name], module, checkpoint)
        plan.parts[name] = own.get(name) or {}
    _find_parts(plan, model, checkpoint)
    return plan


def _own_parts(name: str, experts: Any, source: Source) -> dict[str, PartSource]:
    """The parts of a module that the source knows under names of its own, none where it does not."""
    parts = part_shapes(experts)
    return of_source(source, name, parts) if source.pieces(name, 0, "down") is not None else {}


def part_shapes(experts: Any) -> dict[str, tuple[int, ...]]:
    """Each part of one expert of a module of transformers' experts interface -> its shape."""
    shape = experts.down_proj.shape
    hidden, intermediate = (shape[2], shape[1]) if experts.is_transposed else (shape[1], shape[2])
    shapes: dict[str, tuple[int, ...]] = {"gate": (intermediate, hidden)} if experts.has_gate else {}
    shapes |= {"up": (intermediate, hidden), "down": (hidden, intermediate)}
    if experts.has_bias:
        shapes |= {f"{part}_bias": shape[:1] for part, shape in shapes.items()}
    return shapes


def _check_own(name: str, parts: dict[str, PartSource], experts: Any, source: Source) -> None:
    """Shapes and dtypes of parts that no conversion makes."""
    for part, shape in part_shapes(experts).items():
        for expert in range(experts.down_proj.shape[0]):
            piece = parts[part].piece(expert)
            info = source.tensors.get(piece.name)
            if info is None:
                raise InputError(f"{source.folder}: {name} lacks {part}: there is no tensor {piece.name}")
            if not info.is_weight and info.format is None:
                raise InputError(unsupported_dtype(piece.name, info))
            found = info.shape if piece.index is None else info.shape[1:]
            if piece.rows is not None and found:
                found = (len(range(*piece.rows.indices(found[0]))), *found[1:])
            beyond = piece.index is not None and not 0 <= piece.index < (info.shape or (0,))[0]
            if beyond or found != shape:
                raise InputError(
                    f"{info.file}: tensor {piece.name} of shape {list(info.shape)} does not fit {part} of "
                    f"expert {expert} of {name}: expected {list(shape)} for each of "
                    f"{experts.down_proj.shape[0]} experts"
                )


def _find_parts(plan: LoadPlan, model: Any, source: Source) -> None:
    """Where the experts' matrices stand that transformers' conversions make, and what is quantised."""
    known: dict[Any, Found] = {}
    for target in plan.names.targets:
        experts, _, leaf = target.name.rpartition(".")
        if experts in plan.experts and leaf in PARTS:
            plan.parts[experts] |= trace(
                target,
                plan.experts[experts],
                plan.places[target.name].shape,
                config=model.config,
                source=source,
                known=known,
            )
            infos = [source.tensors[name] for name in target.tensors]
            plan.dtypes.setdefault(experts, set()).update(info.dtype for info in infos)
            quantised = any(info.format is not None or info.inexact for info in infos)
            plan.quantised[experts] = plan.quantised.get(experts, False) or quantised
    for name in plan.own:
        pieces = [part.piece(0) for leaf, part in plan.parts[name].items() if not leaf.endswith("_bias")]
        infos = [source.tensors[piece.name] for piece in pieces]
        plan.dtypes[name] = {info.dtype for info in infos}
        plan.quantised[name] = any(info.format is not None or info.inexact for info in infos)
    for name in plan.experts:
        biases = bool(model.get_submodule(name).has_bias)
        plan.parts[name] = follow_orders(plan.parts[name], plan.counts[name], source, has_bias=biases)
        plan.quantised.setdefault(name, False)
        plan.dtypes.setdefault(name, set())


def _check_present(model: Any, plan: LoadPlan, checkpoint: Source) -> None:
    """Every parameter and learned buffer has a source, every expert too."""
    present = {name for target in plan.names.targets for name in target.names}
    computed = {name for name, buffer in model.named_buffers() if buffer.device.type != "meta"}
    absent = []
    for name in plan.places:
        if name in present or name in computed or name.rpartition(".")[0] in plan.own:
            continue
        partners = {plan.tied.get(name), *(tied for tied, source in plan.tied.items() if source == name)}
        shared = plan.tied.get(name)
        partners |= {tied for tied, source in plan.tied.items() if source == shared}
        if not partners & present:
            absent.append(name)
    if absent:
        raise InputError(
            f"{checkpoint.folder}: nothing in the checkpoint fills {len(absent)} parameters: {some(absent)}"
        )
    for target in plan.names.targets:
        if target.converter is None or not per_expert_sources(target) or not is_expertwise(target):
            continue
        count = plan.places[target.name].shape[0]
        for pattern in target.converter.source_patterns:
            _check_experts(target, pattern, count, checkpoint)


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def _check_experts(target: Target, pattern: str, count: int, checkpoint: Source) -> None:
    """One tensor for each of ``count`` experts, numbered from 0."""
    names = target.sources.get(pattern, [])
    if not names:
        raise InputError(f"{checkpoint.folder}: {target.name} has no tensors like {pattern}")
    numbered = {}
    for name in names:
        *_, number = _INDEX.finditer(name)
        numbered[int(number.group())] = (name, number.span())
    name, (start, end) = next(iter(numbered.values()))
    absent = [f"{name[:start]}{expert}{name[end:]}" for expert in range(count) if expert not in numbered]
    if absent:
        raise InputError(f"{checkpoint.folder}: {len(absent)} expert tensors are absent: {some(absent)}")
    beyond = [name for expert, (name, _) in sorted(numbered.items()) if expert >= count]
    if beyond or len(names) != count:
        raise InputError(
            f"{checkpoint.folder}: the configuration has {count} experts, "
            f"but the checkpoint has {len(names)}: {some(beyond or names)}"
        )


def _check_dtypes(target: Target, state: dict[str, torch.Tensor], checkpoint: Source) -> None:
    if not state[target.name].is_floating_point():
        return
    for name in target.tensors:
        info = checkpoint.tensors[name]
        if not info.is_weight:
            raise InputError(unsupported_dtype(name, info))


def _check_shapes(target: Target, plan: LoadPlan, model: Any, checkpoint: Source) -> None:
    """Run the conversion on shapes alone, and compare with the tree."""
    infos = {name: checkpoint.tensors[name] for name in target.tensors}
    if per_expert_sources(target):
        for names in target.sources.values():
            first = infos[names[0]].shape
            for name in names:
                if infos[name].shape != first:
                    raise InputError(
                        f"{infos[name].file}: tensor {name} has shape {list(infos[name].shape)}, "
                        f"but {names[0]} has {list(first)}"
                    )
    expected = {name: plan.places[name].shape for name in target.names if name in plan.places}
    made = _dry_run(target, plan, model, checkpoint)
    if made == expected:
        return
    for count in range(1, len(target.sources) + 1):
        for patterns in combinations(target.sources, count):
            swapped = {name for pattern in patterns for name in target.sources[pattern]}
            if _dry_run(target, plan, model, checkpoint, swapped) == expected:
                name = target.sources[patterns[0]][0]
                raise InputError(
                    f"{infos[name].file}: tensor {name} of shape {list(infos[name].shape)} does not fit "
                    f"{target.name}: expected {list(_swapped(infos[name].shape))}; it looks transposed"
                )
    name, info = next(iter(infos.items()))
    if target.converter is None:
        raise InputError(
            f"{info.file}: tensor {name} of shape {list(info.shape)} does not fit {target.name}: "
            f"expected {list(expected[target.name])}"
        )
    shapes = ", ".join(f"{key} {list(shape)}" for key, shape in (made or {}).items()) or "nothing"
    raise InputError(
        f"{info.file}: {len(infos)} tensors like {name} of shape {list(info.shape)} make {shapes}; "
        f"expected {', '.join(f'{key} {list(shape)}' for key, shape in expected.items())}"
    )


def _swapped(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *shape[:-3:-1])


def _dry_run(
    target: Target, plan: LoadPlan, model: Any, checkpoint: Source, transposed: Collection[str] = ()
) -> dict[str, torch.Size] | None:
    """Shapes that a target's conversion makes, of sources some of which may be taken as transposed.

    None when the conversion cannot run on them. One expert stands for all, whose number is checked already.
    """

    def shape_of(name: str) -> tuple[int, ...]:
        shape = checkpoint.tensors[name].shape
        return _swapped(shape) if name in transposed else shape

    def read(name: str) -> torch.Tensor:
        return torch.empty(shape_of(name), device="meta")

    try:
        if per_expert_sources(target) and is_expertwise(target):
            shape, config = plan.places[target.name].shape, model.config
            one = convert_expert(target, 0, shape, config, read=read, read_slice=read)
            return {target.name: torch.Size((shape[0], *one.shape))}
        return {name: tensor.shape for name, tensor in convert(target, model, read, shape_of).items()}
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        return None


def some(names: Iterable[str]) -> str:
    """The first five names, and how many more there are."""
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more
