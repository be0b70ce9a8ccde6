"""A checked plan of a load: which tensors go where, everything found that names and shapes can tell.

Made before the first weight is read and before blocks of the tree are replaced: absent tensors, tensors that
nothing consumes, wrong and transposed shapes, another number of experts, dtypes that are no weights.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import nn

from hetero.core import InputError
from hetero.model.build import is_experts
from hetero.model.convert import Layout, convert, convert_expert, is_expertwise, per_expert_sources
from hetero.model.names import NameMap, Target, map_names
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


def plan_load(model: Any, checkpoint: Source) -> LoadPlan:
    """Match a checkpoint with the tree of ``build_meta``, before any block of it is replaced.

    Raises InputError for whatever does not fit.
    """
    if getattr(model.config, "quantization_config", None):
        method = _quantisation(model.config.quantization_config)
        raise InputError(
            f"{checkpoint.folder}: quantised with {method}; quantised checkpoints are not supported yet"
        )
    state = model.state_dict(keep_vars=True)
    names = map_names(model, checkpoint.tensors)
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
    for name, module in model.named_modules():
        if is_experts(module):
            plan.experts[name] = Layout.of(module)
    _check_present(model, plan, checkpoint)
    for target in names.targets:
        _check_dtypes(target, state, checkpoint)
        _check_shapes(target, plan, model, checkpoint)
    return plan


def _check_present(model: Any, plan: LoadPlan, checkpoint: Source) -> None:
    """Every parameter and learned buffer has a source, every expert too."""
    present = {name for target in plan.names.targets for name in target.names}
    computed = {name for name, buffer in model.named_buffers() if buffer.device.type != "meta"}
    absent = []
    for name in plan.places:
        if name in present or name in computed:
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


def _quantisation(config: Any) -> str:
    if isinstance(config, dict):
        return str(config.get("quant_method", "an unknown method"))
    return str(getattr(config, "quant_method", "an unknown method"))
