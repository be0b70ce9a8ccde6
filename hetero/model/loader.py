"""From a checkpoint into a tree: dense tensors become parameters, experts go to their sinks one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from hetero.core import HeteroError, InputError
from hetero.formats import Format
from hetero.model.build import float32_names, target_dtype
from hetero.model.convert import EXPERT_PARAMETERS, convert, convert_expert, is_expertwise
from hetero.model.loadplan import LoadPlan, plan_load, some
from hetero.model.names import Target
from hetero.model.pieces import PARTS
from hetero.model.quantised import InexactError
from hetero.model.source import Source
from hetero.quant.pack import Codes

__all__ = ["ExpertSink", "LoadPlan", "LoadReport", "load", "plan_load"]


class ExpertSink(Protocol):
    """What takes a block's expert weights, each part of each expert exactly once.

    One that has ``format_of`` and ``put_codes`` too is given quantised values as they are, where they are in
    its own format; those of GGUF files by ``put_ggml`` where it has that.
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
) -> LoadReport:
    """Bring a checkpoint's tensors to where they belong.

    ``sinks`` maps names of experts modules to what takes their weights; without one, experts become
    parameters. ``device`` may be a function of the tensor's name. ``progress`` is called with bytes read and
    all bytes. Where blocks of the tree have been replaced already, pass the ``plan`` that was made before.
    ``filled`` names experts modules whose weights are there already; with ``experts_only`` the sinks alone
    are filled, and the tree stays as it is.
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
    )
    return loading.run()


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
    ) -> None:
        self.model = model
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
        # The codes read last: gate and up may stand in one tensor.
        self.last: tuple[tuple[str, int | None], Codes] | None = None
        self.last_blocks: tuple[tuple[str, int | None], torch.Tensor] | None = None

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
        with torch.no_grad(), self.checkpoint:
            for target in whole:
                for name, tensor in convert(target, self.model, self._read, self._shape_of).items():
                    self._deliver(name, tensor)
            for experts, targets in streamed.items():
                self._stream(experts, targets)
            for experts in sorted(self.own):
                self._own(experts)
        self.report.tensors += len(self.plan.names_of(self.own))
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

    def _read(self, name: str) -> torch.Tensor:
        tensor = self.checkpoint.read(name)
        self._count(self.checkpoint.tensors[name].nbytes)
        return tensor

    def _read_slice(self, name: str, index: int) -> torch.Tensor:
        tensor = self.checkpoint.read_slice(name, index)
        info = self.checkpoint.tensors[name]
        self._count(info.nbytes // info.shape[0])
        return tensor

    def _count(self, nbytes: int) -> None:
        self.report.nbytes += nbytes
        if self.progress is not None:
            self.progress(self.report.nbytes, self.total)

    def _shape_of(self, name: str) -> tuple[int, ...]:
        return self.checkpoint.tensors[name].shape

    def _stream(self, experts: str, targets: list[Target]) -> None:
        """Expert by expert, all parameters of each, so that a checkpoint's files are read in their order."""
        layout, sink = self.plan.experts[experts], self.sinks[experts]
        shapes = {target.name: self.plan.places[target.name].shape for target in targets}
        for expert in range(max((shape[0] for shape in shapes.values()), default=0)):
            for target in targets:
                leaf = target.name.rpartition(".")[2]
                if self._put_codes(experts, expert, PARTS.get(leaf, ())):
                    continue

                def read_slice(name: str, expert: int = expert) -> torch.Tensor:
                    return self._read_slice(name, expert)

                shape, config = shapes[target.name], self.model.config
                value = convert_expert(target, expert, shape, config, read=self._read, read_slice=read_slice)
                for part, tensor in layout.parts(leaf, value):
                    sink.put(expert, part, tensor)

    def _put_codes(self, experts: str, expert: int, parts: tuple[str, ...]) -> bool:
        """Give the sink the parts of an expert as they are quantised; False where it has another format."""
        sink: Any = self.sinks[experts]
        sources = self.plan.parts[experts]
        if not parts or not hasattr(sink, "put_codes") or not sources.keys() >= set(parts):
            return False
        for part in parts:
            wanted = sink.format_of(part)
            if wanted is None or sources[part].format != replace(wanted, blocks=False):
                return False
        if all(sources[part].ggml for part in parts) and hasattr(sink, "put_ggml"):
            self._put_blocks(experts, expert, parts)
            return True
        read = []
        for part in parts:
            piece = sources[part].piece(expert)
            key = (piece.name, piece.index)
            if self.last is None or self.last[0] != key:
                try:
                    self.last = key, self.checkpoint.codes(*key)
                except InexactError:
                    if experts in self.plan.keep:
                        raise
                    return False
                info = self.checkpoint.tensors[piece.name]
                self._count(info.nbytes if piece.index is None else info.nbytes // info.shape[0])
            read.append((part, sources[part].cut(self.last[1], expert)))
        for part, codes in read:
            sink.put_codes(expert, part, *codes)
        columns = sources["up"].columns_of if "up" in parts else None
        if columns is not None:
            sink.put(expert, "order", columns(expert))
        return True

    def _put_blocks(self, experts: str, expert: int, parts: tuple[str, ...]) -> None:
        """Give the sink the parts of an expert in the blocks of their file, which it packs itself."""
        sink: Any = self.sinks[experts]
        for part in parts:
            source = self.plan.parts[experts][part]
            piece = source.piece(expert)
            key = (piece.name, piece.index)
            if self.last_blocks is None or self.last_blocks[0] != key:
                self.last_blocks = key, self.checkpoint.blocks(*key)
                self._count(self.last_blocks[1].nbytes)
            rows = self.last_blocks[1] if piece.rows is None else self.last_blocks[1][piece.rows]
            sink.put_ggml(expert, part, source.ggml, rows.contiguous())

    def _own(self, experts: str) -> None:
        """A module whose parts the source has under names of its own."""
        sources, sink = self.plan.parts[experts], self.sinks.get(experts)
        count = self.plan.counts[experts]

        def read(expert: int, part: str) -> torch.Tensor:
            piece = sources[part].piece(expert)
            whole = piece.index is None
            value = self._read(piece.name) if whole else self._read_slice(piece.name, piece.index or 0)[0]
            return value if piece.rows is None else value[piece.rows]

        if sink is not None:
            for expert in range(count):
                for part in sources:
                    if not self._put_codes(experts, expert, (part,)):
                        sink.put(expert, part, read(expert, part))
            return
        layout = self.plan.experts[experts]
        for name, place in self.plan.places.items():
            path, _, leaf = name.rpartition(".")
            if path == experts and leaf in EXPERT_PARAMETERS:
                value = torch.empty(place.shape)
                for expert in range(count):
                    value[expert] = layout.join(leaf, partial(read, expert))
                self._assign(name, value)

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
