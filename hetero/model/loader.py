"""From a checkpoint into a tree: dense tensors become parameters, experts go to their sinks one by one.

Everything that names and shapes can tell is checked before the first weight is read: absent tensors, tensors
that nothing consumes, wrong and transposed shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, Protocol

import torch
from torch import nn

from hetero.core import HeteroError, InputError
from hetero.model.build import float32_names, is_experts, target_dtype
from hetero.model.convert import (
    EXPERT_PARAMETERS,
    Layout,
    convert,
    convert_expert,
    is_expertwise,
    per_expert_sources,
)
from hetero.model.names import NameMap, Target, map_names
from hetero.model.source import Checkpoint, unsupported_dtype


class ExpertSink(Protocol):
    """What takes a block's expert weights, each part of each expert exactly once."""

    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Take "gate", "up" [intermediate, hidden], "down" [hidden, intermediate], or a part's "_bias"."""

    def missing(self) -> list[tuple[int, str]]:
        """The (expert, part) pairs that have not arrived."""


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


@dataclass(slots=True)
class LoadReport:
    """What was read, and what was not."""

    tensors: int = 0
    nbytes: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def lines(self) -> list[str]:
        """For the user: one line naming what the model does not run, then notes."""
        parts = [f"{label} ({count} tensors)" for label, count in sorted(self.skipped.items())]
        return ([f"not loaded: {', '.join(parts)}"] if parts else []) + self.notes


def plan_load(model: Any, checkpoint: Checkpoint) -> LoadPlan:
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
            f"{type(model).__name__}: {_some(names.unconsumed)}"
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


def load(
    model: Any,
    checkpoint: Checkpoint,
    sinks: Mapping[str, ExpertSink] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | Callable[[str], str | torch.device] = "cpu",
    progress: Callable[[int, int], None] | None = None,
    plan: LoadPlan | None = None,
) -> LoadReport:
    """Bring a checkpoint's tensors to where they belong.

    ``sinks`` maps names of experts modules to what takes their weights; without one, experts become
    parameters. ``device`` may be a function of the tensor's name. ``progress`` is called with bytes read and
    all bytes. Where blocks of the tree have been replaced already, pass the ``plan`` that was made before.
    """
    sinks = dict(sinks or {})
    plan = plan if plan is not None else plan_load(model, checkpoint)
    unknown = sinks.keys() - plan.experts.keys()
    if unknown:
        raise HeteroError(f"no experts module is named {_some(sorted(unknown))}")
    loading = _Loading(model, checkpoint, sinks, plan, dtype=dtype, device=device, progress=progress)
    return loading.run()


class _Loading:
    """One call of ``load``."""

    def __init__(
        self,
        model: Any,
        checkpoint: Checkpoint,
        sinks: dict[str, ExpertSink],
        plan: LoadPlan,
        *,
        dtype: torch.dtype,
        device: str | torch.device | Callable[[str], str | torch.device],
        progress: Callable[[int, int], None] | None,
    ) -> None:
        self.model = model
        self.checkpoint = checkpoint
        self.sinks = sinks
        self.dtype = dtype
        self.device_of = device if callable(device) else lambda name: device
        self.progress = progress
        self.plan = plan
        self.float32 = float32_names(model, dtype)
        self.total = sum(checkpoint.tensors[name].nbytes for t in plan.names.targets for name in t.tensors)
        self.report = LoadReport(skipped=plan.names.skipped)

    def run(self) -> LoadReport:
        streamed: dict[str, list[Target]] = {name: [] for name in self.sinks}
        whole = []
        for target in self.plan.names.targets:
            experts = self._sink_of(target.name)
            if experts is not None and is_expertwise(target):
                streamed[experts].append(target)
            else:
                whole.append(target)
            self.report.tensors += len(target.tensors)
        with torch.no_grad(), self.checkpoint:
            for target in whole:
                for name, tensor in convert(target, self.model, self._read, self._shape_of).items():
                    self._deliver(name, tensor)
            for experts, targets in streamed.items():
                self._stream(experts, targets)
        self._tie()
        self._move_buffers()
        for experts, sink in self.sinks.items():
            absent = sink.missing()
            if absent:
                shown = _some([f"{part} of expert {expert}" for expert, part in absent])
                raise InputError(f"{self.checkpoint.folder}: {experts} lacks {shown}")
        return self.report

    def _sink_of(self, name: str) -> str | None:
        """The experts module with a sink that takes a parameter, if one does."""
        path, _, leaf = name.rpartition(".")
        return path if path in self.sinks and leaf in EXPERT_PARAMETERS else None

    def _read(self, name: str) -> torch.Tensor:
        return self._count(self.checkpoint.read(name))

    def _count(self, tensor: torch.Tensor) -> torch.Tensor:
        self.report.nbytes += tensor.nbytes
        if self.progress is not None:
            self.progress(self.report.nbytes, self.total)
        return tensor

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[name].shape

    def _stream(self, experts: str, targets: list[Target]) -> None:
        """Expert by expert, all parameters of each, so that a checkpoint's files are read in their order."""
        layout, sink = self.plan.experts[experts], self.sinks[experts]
        shapes = {target.name: self.plan.places[target.name].shape for target in targets}
        for expert in range(max((shape[0] for shape in shapes.values()), default=0)):
            for target in targets:

                def read_slice(name: str, expert: int = expert) -> torch.Tensor:
                    return self._count(self.checkpoint.read_slice(name, expert))

                shape, config = shapes[target.name], self.model.config
                value = convert_expert(target, expert, shape, config, read=self._read, read_slice=read_slice)
                for part, tensor in layout.parts(target.name.rpartition(".")[2], value):
                    sink.put(expert, part, tensor)

    def _deliver(self, name: str, tensor: torch.Tensor) -> None:
        experts = self._sink_of(name)
        if experts is None:
            self._assign(name, tensor)
            return
        layout, sink = self.plan.experts[experts], self.sinks[experts]
        for expert, value in enumerate(tensor):
            for part, piece in layout.parts(name.rpartition(".")[2], value):
                sink.put(expert, part, piece)

    def _assign(self, name: str, tensor: torch.Tensor) -> None:
        place = self.plan.places[name]
        current = getattr(place.owner, place.leaf)
        wanted = target_dtype(name, current, self.dtype, self.float32)
        value = tensor.to(device=self.device_of(name), dtype=wanted)
        if place.leaf in place.owner._buffers:
            place.owner._buffers[place.leaf] = value
        else:
            place.owner._parameters[place.leaf] = nn.Parameter(value, requires_grad=False)

    def _tie(self) -> None:
        """Share tied parameters, whichever of the two names the checkpoint has."""
        present = {name for target in self.plan.names.targets for name in target.names}
        for name, source in self.plan.tied.items():
            if source not in present and name in present:
                self._share(source, name)
                present.add(source)
        for name, source in self.plan.tied.items():
            if name in present:
                one, other = self._value(name), self._value(source)
                if one.shape != other.shape or not torch.equal(one.to(other.device), other):
                    self.report.notes.append(
                        f"{name} and {source} are tied by the configuration but differ: each keeps its values"
                    )
                    continue
            self._share(name, source)

    def _share(self, name: str, source: str) -> None:
        place, origin = self.plan.places[name], self.plan.places[source]
        place.owner._parameters[place.leaf] = origin.owner._parameters[origin.leaf]

    def _value(self, name: str) -> torch.Tensor:
        place = self.plan.places[name]
        value = getattr(place.owner, place.leaf)
        assert isinstance(value, torch.Tensor)
        return value

    def _move_buffers(self) -> None:
        for prefix, module in self.model.named_modules():
            for leaf, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != "meta":
                    module._buffers[leaf] = buffer.to(self.device_of(f"{prefix}.{leaf}" if prefix else leaf))


def _check_present(model: Any, plan: LoadPlan, checkpoint: Checkpoint) -> None:
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
            f"{checkpoint.folder}: nothing in the checkpoint fills {len(absent)} parameters: {_some(absent)}"
        )
    for target in plan.names.targets:
        if target.converter is None or not per_expert_sources(target) or not is_expertwise(target):
            continue
        count = plan.places[target.name].shape[0]
        for pattern in target.converter.source_patterns:
            _check_experts(target, pattern, count, checkpoint)


_INDEX = re.compile(r"(?<=\.)\d+(?=\.)")


def _check_experts(target: Target, pattern: str, count: int, checkpoint: Checkpoint) -> None:
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
        raise InputError(f"{checkpoint.folder}: {len(absent)} expert tensors are absent: {_some(absent)}")
    beyond = [name for expert, (name, _) in sorted(numbered.items()) if expert >= count]
    if beyond or len(names) != count:
        raise InputError(
            f"{checkpoint.folder}: the configuration has {count} experts, "
            f"but the checkpoint has {len(names)}: {_some(beyond or names)}"
        )


def _check_dtypes(target: Target, state: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    if not state[target.name].is_floating_point():
        return
    for name in target.tensors:
        info = checkpoint.tensors[name]
        if not info.is_weight:
            raise InputError(unsupported_dtype(name, info))


def _check_shapes(target: Target, plan: LoadPlan, model: Any, checkpoint: Checkpoint) -> None:
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
    made = _dry_run(target, model, checkpoint)
    if made == expected:
        return
    for count in range(1, len(target.sources) + 1):
        for patterns in combinations(target.sources, count):
            swapped = {name for pattern in patterns for name in target.sources[pattern]}
            if _dry_run(target, model, checkpoint, swapped) == expected:
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
    target: Target, model: Any, checkpoint: Checkpoint, transposed: Collection[str] = ()
) -> dict[str, torch.Size] | None:
    """Shapes that a target's conversion makes, of sources some of which may be taken as transposed.

    None when the conversion cannot run on them.
    """

    def shape_of(name: str) -> tuple[int, ...]:
        shape = checkpoint.tensors[name].shape
        return _swapped(shape) if name in transposed else shape

    def read(name: str) -> torch.Tensor:
        return torch.empty(shape_of(name), device="meta")

    try:
        return {name: tensor.shape for name, tensor in convert(target, model, read, shape_of).items()}
    except (RuntimeError, ValueError, IndexError, KeyError, AttributeError):
        return None


def _some(names: Iterable[str]) -> str:
    names = list(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _quantisation(config: Any) -> str:
    if isinstance(config, dict):
        return str(config.get("quant_method", "an unknown method"))
    return str(getattr(config, "quant_method", "an unknown method"))
