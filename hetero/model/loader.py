"""From a checkpoint into a tree: dense tensors become parameters, experts go to their sinks one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hetero.core import HeteroError, InputError
from hetero.formats import Format
from hetero.model.ahead import Job, in_batches, run_ahead, share_of
from hetero.model.build import float32_names, target_dtype
from hetero.model.convert import (
    EXPERT_PARAMETERS,
    convert,
    convert_expert,
    is_expertwise,
    only_concatenates,
)
from hetero.model.loadplan import LoadPlan, plan_load, some
from hetero.model.names import Target
from hetero.model.pieces import PARTS
from hetero.model.quantised import InexactError
from hetero.model.reading import Reading, together
from hetero.model.source import Source
from hetero.quant.pack import Codes

__all__ = ["ExpertSink", "LoadPlan", "LoadReport", "load", "plan_load"]


class ExpertSink(Protocol):
    """What takes a block's expert weights, each part of each expert exactly once.

    One that has ``format_of`` and ``put_codes`` too is given quantised values as they are, where they are in
    its own format; those of GGUF files by ``put_ggml`` where it has that. One that has ``bring`` is told of
    an expert, on any thread, before its parts come.
    """

    def put(self, expert: int, part: str, tensor: torch.Tensor) -> None:
        """Take "gate", "up" [intermediate, hidden], "down" [hidden, intermediate], or a part's "_bias"."""

    def missing(self) -> list[tuple[int, str]]:
        """The (expert, part) pairs that have not arrived."""


class CodeSink(ExpertSink, Protocol):
    """A sink of packed experts."""

    def format_of(self, part: str) -> Format | None:
        """The format that it keeps "gate", "up" or "down" in."""

    def put_codes(
        self, expert: int, part: str, codes: torch.Tensor, scales: torch.Tensor, extra: torch.Tensor | None
    ) -> None:
        """Take a part in its format's codes, see ``hetero.quant.pack.pack_codes``."""


class LinearSink(Protocol):
    """What takes the weight of a linear layer as it is quantised."""

    def keeps(self, fmt: Format) -> bool:
        """Whether it does so of this format."""

    def take_codes(self, fmt: Format, codes: Codes) -> Callable[[], None]:
        """Prepare, on any thread; the call puts them in the weight's place, on the loader's own."""


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


def load(
    model: Any,
    checkpoint: Source,
    sinks: Mapping[str, ExpertSink] | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | Callable[[str], str | torch.device] = "cpu",
    progress: Callable[[int, int], None] | None = None,
    plan: LoadPlan | None = None,
    filled: Collection[str] = (),
    experts_only: bool = False,
    linears: Mapping[str, LinearSink] | None = None,
) -> LoadReport:
    """Bring a checkpoint's tensors to where they belong.

    ``sinks`` maps names of experts modules to what takes their weights; without one, experts become
    parameters. ``device`` may be a function of the tensor's name. ``progress`` is called with bytes read and
    all bytes. Where blocks of the tree have been replaced already, pass the ``plan`` that was made before.
    ``filled`` names experts modules whose weights are there already; with ``experts_only`` the sinks alone
    are filled, and the tree stays as it is. ``linears`` maps names of weights to what takes them as they are
    quantised, where it can.
    """
    sinks = dict(sinks or {})
    plan = plan if plan is not None else plan_load(model, checkpoint)
    unknown = sinks.keys() - plan.experts.keys()
    if unknown:
        raise HeteroError(f"no experts module is named {some(sorted(unknown))}")
    loading = _Loading(
        model,
        checkpoint,
        sinks,
        plan,
        dtype=dtype,
        device=device,
        progress=progress,
        filled=frozenset(filled),
        experts_only=experts_only,
        linears=linears or {},
    )
    return loading.run()


LINE = 64
"""Bytes that a parameter begins at a multiple of."""

Delivery = Callable[[], None]
"""Brings what a job has made to where it belongs."""

Put = tuple[str, str, tuple[Any, ...]]
"""A method of a sink, a part, and what the method takes beside expert and part."""

PUT = "put"


class _Loading:
    """One call of ``load``."""

    def __init__(
        self,
        model: Any,
        checkpoint: Source,
        sinks: dict[str, ExpertSink],
        plan: LoadPlan,
        *,
        dtype: torch.dtype,
        device: str | torch.device | Callable[[str], str | torch.device],
        progress: Callable[[int, int], None] | None,
        filled: frozenset[str],
        experts_only: bool,
        linears: Mapping[str, LinearSink],
    ) -> None:
        self.model = model
        tied = {*plan.tied, *plan.tied.values()}  # of which each sees the other's parameter
        self.linears = {name: linear for name, linear in linears.items() if name not in tied}
        self.kept: Counter[str] = Counter()  # format -> linear layers that keep their codes
        self.checkpoint = checkpoint
        self.sinks = sinks
        self.device_of = device if callable(device) else lambda name: device
        self.progress = progress
        self.plan = plan
        self.float32 = float32_names(model, dtype)
        self.experts_only = experts_only
        self.targets = [t for t in plan.names.targets if self._is_wanted(t, filled)]
        self.total = sum(checkpoint.tensors[name].nbytes for t in self.targets for name in t.tensors)
        self.own = [name for name in plan.own if name not in filled and (name in sinks or not experts_only)]
        self.total += sum(checkpoint.tensors[name].nbytes for name in plan.names_of(self.own))
        self.report = LoadReport(skipped=plan.names.skipped)

    def run(self) -> LoadReport:
        streamed: dict[str, list[Target]] = {name: [] for name in self.sinks}
        whole = []
        for target in self.targets:
            experts = self._sink_of(target.name)
            if experts is not None and is_expertwise(target):
                streamed[experts].append(target)
            else:
                whole.append(target)
            self.report.tensors += len(target.tensors)
        with (
            torch.no_grad(),
            self.checkpoint,
            closing(run_ahead(in_batches(self._jobs(whole, streamed)), share_of(self.total))) as made,
        ):
            for deliveries in made:
                while deliveries:
                    deliveries.pop(0)()
        self.report.tensors += len(self.plan.names_of(self.own))
        for fmt, count in self.kept.items():
            self.report.notes.append(f"{count} linear layers keep the checkpoint's values: {fmt}")
        if not self.experts_only:
            self._tie()
            self._move_buffers()
        for experts, sink in self.sinks.items():
            absent = sink.missing()
            if absent:
                shown = some([f"{part} of expert {expert}" for expert, part in absent])
                raise InputError(f"{self.checkpoint.folder}: {experts} lacks {shown}")
        return self.report

    def _is_wanted(self, target: Target, filled: frozenset[str]) -> bool:
        path, _, leaf = target.name.rpartition(".")
        if path in filled and leaf in EXPERT_PARAMETERS:
            return False
        return not self.experts_only or self._sink_of(target.name) is not None

    def _sink_of(self, name: str) -> str | None:
        """The experts module with a sink that takes a parameter, if one does."""
        path, _, leaf = name.rpartition(".")
        return path if path in self.sinks and leaf in EXPERT_PARAMETERS else None

    def _count(self, nbytes: int) -> None:
        self.report.nbytes += nbytes
        if self.progress is not None:
            self.progress(self.report.nbytes, self.total)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[name].shape

    def _jobs(self, whole: list[Target], streamed: dict[str, list[Target]]) -> Iterator[Job[Delivery]]:
        """All that is to be read, in the order of its delivery. A job reads and unpacks, on any thread;
        what it returns is called on the loader's own."""
        for target in whole:
            nbytes = sum(self.checkpoint.tensors[name].nbytes for name in target.tensors)
            # A conversion of several tensors may take several times their memory, and look at the model.
            late = target.converter is not None and not only_concatenates(target)
            yield Job(0 if late else nbytes, partial(self._whole_late if late else self._whole, target))
        for experts, targets in streamed.items():
            # Expert by expert, all parameters of each, so that a checkpoint's files are read in their order.
            shapes = {target.name: self.plan.places[target.name].shape for target in targets}
            for expert in range(max((shape[0] for shape in shapes.values()), default=0)):
                for target in targets:
                    nbytes = sum(self.checkpoint.tensors[name].nbytes for name in target.tensors)
                    yield Job(
                        nbytes // shapes[target.name][0], partial(self._of_target, experts, expert, target)
                    )
        for experts in sorted(self.own):
            yield from self._own(experts)

    def _whole(self, target: Target) -> Delivery:
        reading = Reading(self.checkpoint)
        kept = self._kept(reading, target)
        if kept is not None:
            return kept
        made = convert(target, self.model, reading.read, self._shape_of)

        def deliver() -> None:
            self._count(reading.nbytes)
            for name in list(made):
                self._deliver(name, made.pop(name))

        return deliver

    def _kept(self, reading: Reading, target: Target) -> Delivery | None:
        """The weight of a linear layer as it is quantised, for one that keeps it so; else None."""
        linear = self.linears.get(target.name)
        if linear is None or target.converter is not None or len(target.tensors) != 1:
            return None
        (name,) = target.tensors
        info, shape = self.checkpoint.tensors[name], tuple(self.plan.places[target.name].shape)
        fmt = info.format
        if fmt is None or info.transposed or info.shape != shape or not linear.keeps(fmt):
            return None
        try:
            put = linear.take_codes(fmt, reading.whole_codes(name))
        except InexactError:
            return None
        except InputError as error:
            raise InputError(f"{info.file}: tensor {name}: {error}") from None

        def deliver() -> None:
            self._count(reading.nbytes)
            self.kept[str(fmt)] += 1
            put()

        return deliver

    def _whole_late(self, target: Target) -> Delivery:
        def deliver() -> None:
            self._whole(target)()

        return deliver

    def _of_target(self, experts: str, expert: int, target: Target) -> Delivery:
        """What one parameter has of an expert."""
        self._bring(experts, expert)
        reading, leaf = Reading(self.checkpoint), target.name.rpartition(".")[2]
        parts = PARTS.get(leaf, ())
        sources = self.plan.parts[experts]
        puts = self._as_quantised(reading, experts, expert, parts)
        if (
            puts is None
            and parts
            and all(part in sources and sources[part].columns is not None for part in parts)
        ):
            puts = [(PUT, part, reading.floats(sources[part], expert)) for part in parts]
        if puts is None:
            shape = self.plan.places[target.name].shape
            value = convert_expert(
                target,
                expert,
                shape,
                self.model.config,
                read=reading.read,
                read_slice=partial(reading.slice, index=expert),
            )
            layout = self.plan.experts[experts]
            puts = [(PUT, part, (tensor,)) for part, tensor in layout.parts(leaf, value)]
        return partial(self._put, experts, expert, reading.nbytes, puts)

    def _put(self, experts: str, expert: int, nbytes: int, puts: list[Put]) -> None:
        self._count(nbytes)
        sink = self.sinks[experts]
        for method, part, values in puts:
            getattr(sink, method)(expert, part, *values)

    def _as_quantised(
        self, reading: Reading, experts: str, expert: int, parts: tuple[str, ...]
    ) -> list[Put] | None:
        """The parts of an expert as they are quantised, for a sink that has the same format; else None."""
        sink: Any = self.sinks[experts]
        sources = self.plan.parts[experts]
        if not parts or not hasattr(sink, "put_codes") or not sources.keys() >= set(parts):
            return None
        for part in parts:
            wanted = sink.format_of(part)
            if wanted is None or sources[part].format != replace(wanted, blocks=False):
                return None
        if all(sources[part].ggml for part in parts) and hasattr(sink, "put_ggml"):
            return [("put_ggml", part, reading.blocks(sources[part], expert)) for part in parts]
        try:
            puts: list[Put] = [("put_codes", part, reading.codes(sources[part], expert)) for part in parts]
        except InexactError:
            if experts in self.plan.keep:
                raise
            return None
        columns = sources["up"].columns_of if "up" in parts else None
        return puts if columns is None else [*puts, (PUT, "order", (columns(expert),))]

    def _own(self, experts: str) -> Iterator[Job[Delivery]]:
        """A module whose parts the source has under names of its own."""
        sources, count = self.plan.parts[experts], self.plan.counts[experts]
        nbytes = sum(self.checkpoint.tensors[name].nbytes for name in self.plan.names_of([experts]))
        if experts in self.sinks:
            for expert in range(count):
                for parts in together(sources, expert):
                    size = nbytes // count // len(sources)
                    yield Job(size, partial(self._of_parts, experts, expert, parts))
            return
        for name, place in self.plan.places.items():
            path, _, leaf = name.rpartition(".")
            if path == experts and leaf in EXPERT_PARAMETERS:
                yield Job(nbytes, partial(self._joined, experts, name, leaf, place.shape))

    def _bring(self, experts: str, expert: int) -> None:
        bring = getattr(self.sinks[experts], "bring", None)
        if bring is not None:
            bring(expert)

    def _of_parts(self, experts: str, expert: int, parts: tuple[str, ...]) -> Delivery:
        self._bring(experts, expert)
        reading, sources = Reading(self.checkpoint), self.plan.parts[experts]
        puts: list[Put] = []
        for part in parts:
            puts += self._as_quantised(reading, experts, expert, (part,)) or [
                (PUT, part, reading.floats(sources[part], expert))
            ]
        return partial(self._put, experts, expert, reading.nbytes, puts)

    def _joined(self, experts: str, name: str, leaf: str, shape: torch.Size) -> Delivery:
        """A parameter of all experts, for a module without a sink."""
        sources, layout = self.plan.parts[experts], self.plan.experts[experts]
        value, nbytes = torch.empty(shape), 0
        for expert in range(self.plan.counts[experts]):
            reading = Reading(self.checkpoint)

            def part_of(part: str, reading: Reading = reading, expert: int = expert) -> torch.Tensor:
                return reading.floats(sources[part], expert)[0]

            value[expert] = layout.join(leaf, part_of)
            nbytes += reading.nbytes

        def deliver() -> None:
            self._count(nbytes)
            self._assign(name, value)

        return deliver

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
        wanted = target_dtype(name, current, self.float32)
        value = tensor.to(device=self.device_of(name), dtype=wanted)
        if value.data_ptr() % LINE and value.device.type == "cpu":
            value = value.clone()  # it lies as in its file, in memory that is wanted for other reads
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
