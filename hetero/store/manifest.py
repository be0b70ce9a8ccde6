"""What a file of packed experts holds, as its header says it, and what one must hold to serve a model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

from hetero import jsonfile
from hetero.core import ExpertSpec
from hetero.store.reads import aligned

LAYOUT = 2
"""Of packed experts (cpu_ext/kernels.h): to be raised when the same weights make other bytes."""


class StoredTensor(Protocol):
    """A tensor of a source, as far as its identity goes."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def dtype(self) -> str: ...
    @property
    def file(self) -> Path: ...
    @property
    def start(self) -> int: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, slots=True)
class Block:
    """The experts of one module: dotted name, shapes, formats by part, bytes of one whole expert."""

    name: str
    experts: int
    hidden: int
    intermediate: int
    gate: bool
    bias: bool
    formats: tuple[str, ...]  # of gate and up, of down
    expert_bytes: int

    @property
    def stride(self) -> int:
        """From one expert to the next, in a file as in an arena."""
        return aligned(self.expert_bytes)

    @property
    def nbytes(self) -> int:
        """Of all experts, in a file."""
        return self.experts * self.stride


@dataclass(frozen=True, slots=True)
class SourceIdentity:
    """What experts were packed from: (name, size, change in ns) of each file, a hash of the headers."""

    files: tuple[tuple[str, int, int], ...]
    headers: str

    @staticmethod
    def of(tensors: Mapping[str, StoredTensor]) -> SourceIdentity:
        """Of the files behind ``tensors``. Raises OSError where one is gone."""
        files = [_state(path) for path in sorted({info.file for info in tensors.values()})]
        digest = hashlib.sha256()
        for name, info in sorted(tensors.items()):
            digest.update(repr((name, info.dtype, info.shape, info.file.name, info.start)).encode())
        return SourceIdentity(tuple(files), digest.hexdigest())

    def lies_in(self, folder: Path) -> bool:
        """Whether all files are there as they were. Raises OSError where one cannot be looked at."""
        paths = [folder / name for name, _, _ in self.files]
        return all(p.is_file() for p in paths) and tuple(map(_state, paths)) == self.files


def _state(path: Path) -> tuple[str, int, int]:
    status = path.stat()
    return path.name, status.st_size, status.st_mtime_ns


@dataclass(frozen=True, slots=True)
class Manifest:
    """Source and blocks. Two equal ones are the same bytes."""

    source: SourceIdentity
    blocks: tuple[Block, ...]
    layout: int = LAYOUT

    @property
    def nbytes(self) -> int:
        """Of all blocks, in a file."""
        return sum(block.nbytes for block in self.blocks)

    def file_name(self, model: str) -> str:
        """By model, formats, shapes and tensors, but not by the time of the source: what is packed anew after
        a change takes the place of the stale file."""
        what = json.dumps([[asdict(block) for block in self.blocks], self.source.headers, self.layout])
        return f"{model}-{hashlib.sha256(what.encode()).hexdigest()[:12]}.hpack"

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @staticmethod
    def from_json(text: bytes) -> Manifest:
        """Raises ValueError for what ``to_json`` has not made."""
        try:
            return Manifest._parsed(text)
        except (KeyError, TypeError, AttributeError, OverflowError):
            raise ValueError("no manifest") from None

    @staticmethod
    def _parsed(text: bytes) -> Manifest:
        data: dict[str, Any] = jsonfile.parse(text)
        source = data["source"]
        files = tuple((str(name), int(size), int(time)) for name, size, time in source["files"])
        kinds = {"name": str, "gate": bool, "bias": bool, "formats": tuple}
        blocks = tuple(
            Block(**{key: kinds.get(key, int)(value) for key, value in block.items()})
            for block in data["blocks"]
        )
        found = Manifest(SourceIdentity(files, str(source["headers"])), blocks, int(data["layout"]))
        if found.to_json() != text or not all(block.experts > 0 < block.expert_bytes for block in blocks):
            raise ValueError("no manifest")
        return found

    def difference(self, wanted: Manifest) -> str | None:
        """Why this one does not serve where ``wanted`` is needed; None: it does."""
        if self == wanted:
            return None
        if self.layout != wanted.layout:
            return f"holds layout {self.layout} of packed experts, this version makes {wanted.layout}"
        if self.source != wanted.source:
            changed = _changed(self.source.files, wanted.source.files)
            return f"the checkpoint has changed since ({', '.join(changed) or 'its tensors'})"
        return "holds other experts or formats"


def _changed(before: Iterable[tuple[str, int, int]], now: Sequence[tuple[str, int, int]]) -> list[str]:
    known = {name: rest for name, *rest in before}
    return [name for name, *rest in now if known.get(name) != rest]


def block_of(name: str, spec: ExpertSpec, formats: tuple[str, str], expert_bytes: int) -> Block:
    """The block of one experts module."""
    return Block(
        name,
        spec.num_experts,
        spec.hidden,
        spec.intermediate,
        spec.has_gate,
        spec.has_bias,
        formats,
        expert_bytes,
    )
