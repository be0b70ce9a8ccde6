"""Where each part of each expert stands in a source, and the packed format that keeps its values.

Sources with the Hub's names leave that to transformers' conversions, which concatenate, interleave, split
and transpose. They are run once on tensors whose values number their elements: the result shows which rows of
which tensor each part is. A part whose rows do not come whole, in equal steps and from one tensor has no
codes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import FP8_TILE, Format, in_order
from hetero.model.convert import Layout, convert_expert, is_expertwise, per_expert_sources
from hetero.model.names import Target
from hetero.model.quantised.base import QuantisedCheckpoint
from hetero.model.source import Piece, Source, TensorInfo
from hetero.quant.pack import Codes

PARTS = {
    "gate_up_proj": ("gate", "up"),
    "up_proj": ("up",),
    "down_proj": ("down",),
}
"""Parameter of an experts module -> the matrices of an expert in it."""


@dataclass(frozen=True, slots=True)
class PartSource:
    """One part of all experts of a module."""

    piece: Callable[[int], Piece]  # of an expert
    format: Format | None  # that keeps its values exactly
    inexact: str = ""  # why there is none
    # Whether the stored matrix is the part's transpose.
    turned: bool = False
    # The GGUF type whose blocks the source gives, "" for none.
    ggml: str = ""
    # Where a format is ``ordered``: the order int32 of an expert's columns, and of its rows (None: as they
    # stand).
    columns_of: Callable[[int], Tensor] | None = None
    rows_of: Callable[[int], Tensor] | None = None
    # Of a tensor that is not quantised: whether the part is its rows, or its columns; None: neither is known.
    columns: bool | None = None

    def floats(self, tensor: Tensor, piece: Piece) -> Tensor:
        """The part [n, k], where ``columns`` is known, of the matrix that ``piece`` is of."""
        value = tensor.T if self.columns else tensor
        return value if piece.rows is None else value[piece.rows]

    def codes(self, source: Source, expert: int) -> Codes:
        """The part's quantised values, read from the source."""
        piece = self.piece(expert)
        return self.cut(source.codes(piece.name, piece.index), expert)

    def cut(self, codes: Codes, expert: int) -> Codes:
        """The part's rows of the codes of its tensor, those of an expert."""
        assert self.format is not None
        found = self._rows(codes, self.piece(expert))
        if self.rows_of is None:
            return found
        order = self.rows_of(expert)
        extra = None if found.extra is None else found.extra[order]
        return Codes(found.codes[order], found.scales[order], extra)

    def _rows(self, codes: Codes, piece: Piece) -> Codes:
        assert self.format is not None
        fp8 = self.format.name == "fp8"
        if self.turned:  # of fp8 alone, whose tiles are square
            codes = Codes(codes.codes.T.contiguous(), codes.scales.T.contiguous(), codes.extra)
        rows = piece.rows
        if rows is None:
            return codes
        start, stop, _ = rows.indices(codes.codes.shape[0])
        of_scales = slice(start // FP8_TILE, -(-stop // FP8_TILE)) if fp8 else rows
        extra = codes.extra
        if extra is not None and self.format.name != "nvfp4":  # whose extra is of the whole matrix
            extra = extra[rows]
        return Codes(codes.codes[rows], codes.scales[of_scales], extra)


# Of a part: the number of its tensor among a target's sources, its rows there, and whether those are columns.
# None where they are mixed.
Found = dict[str, tuple[int, slice, bool] | None]


def trace(
    target: Target,
    layout: Layout,
    shape: torch.Size,
    *,
    config: Any,
    source: Source,
    known: dict[Any, Found],
) -> dict[str, PartSource]:
    """The matrices that a target makes. ``shape``: of the parameter, all experts.

    ``known``: what earlier calls for the same model found, so that layers alike are traced once.
    """
    leaf = target.name.rpartition(".")[2]
    infos = {name: source.tensors[name] for name in target.tensors}
    plain = all(info.format is None for info in infos.values())
    why = next((info.inexact for info in infos.values() if info.inexact), "")
    if plain and (why or not is_expertwise(target)):
        return {part: _inexact(why or "it is not quantised") for part in PARTS[leaf]}
    if not is_expertwise(target):
        return {part: _inexact("its conversion mixes experts") for part in PARTS[leaf]}
    firsts = [names[0] for names in target.sources.values()]
    key = (id(target.converter), leaf, shape, *(infos[name].shape[-2:] for name in firsts))
    if key not in known:
        known[key] = _find(target, layout, shape, config=config, infos=infos)
    return {part: _part(target, found, infos) for part, found in known[key].items()}


def _find(
    target: Target, layout: Layout, shape: torch.Size, *, config: Any, infos: dict[str, TensorInfo]
) -> Found:
    firsts = [names[0] for names in target.sources.values()]
    start, bases = 0, {}
    for name in firsts:
        bases[name] = start
        start += _numel(infos[name])
    dtype = torch.int32 if start < 2**31 else torch.int64

    def read(name: str) -> Tensor:
        rows, columns = infos[name].shape[-2:]
        base = bases[name]
        return torch.arange(base, base + rows * columns, dtype=dtype).view(rows, columns)

    value = convert_expert(
        target, 0, shape, config, read=read, read_slice=lambda name: read(name).unsqueeze(0)
    )
    traced: Found = {}
    for part, matrix in layout.parts(target.name.rpartition(".")[2], value):
        first = int(matrix[0, 0])
        number = max(i for i, name in enumerate(firsts) if bases[name] <= first)
        name = firsts[number]
        found = _rows(matrix - bases[name], infos[name])
        traced[part] = None if found is None else (number, *found)
    return traced


def follow_orders(
    parts: dict[str, PartSource], count: int, source: Source, *, has_bias: bool
) -> dict[str, PartSource]:
    """The parts of a module of which some have columns by their groups: all of ``count`` experts take their
    inputs in an order of their own, and the rows of gate and up follow the columns of down."""
    matrices = {part: one for part, one in parts.items() if part in ("gate", "up", "down")}
    formats = [one.format for one in matrices.values() if one.format is not None]
    if len(formats) < len(matrices) or not any(fmt.ordered for fmt in formats):
        return parts
    assert isinstance(source, QuantisedCheckpoint)
    checkpoint = source

    def columns(part: str) -> Callable[[int], Tensor]:
        def of_expert(expert: int) -> Tensor:
            piece = matrices[part].piece(expert)
            order = checkpoint.order(piece.name, piece.index)
            k = checkpoint.tensors[piece.name].shape[-1]
            return torch.arange(k, dtype=torch.int32) if order is None else order

        return of_expert

    found = {part: columns(part) for part in matrices}
    why = "activation order (act-order) of experts with biases" if has_bias else ""
    gate, up = found.get("gate", found["up"]), found["up"]
    if not why and gate is not up and not all(torch.equal(gate(e), up(e)) for e in range(count)):
        why = "gate and up of an expert are in different activation orders"
    if why:
        return parts | {part: _inexact(why) for part in matrices}
    made = {}
    for part, one in matrices.items():
        assert one.format is not None
        down = found["down"] if part != "down" else None
        made[part] = replace(one, format=in_order(one.format), columns_of=found[part], rows_of=down)
    return parts | made


def of_source(source: Source, experts: str, parts: Iterable[str]) -> dict[str, PartSource]:
    """The parts of a module whose places the source knows itself."""

    def find(part: str) -> Callable[[int], Piece]:
        def piece(expert: int) -> Piece:
            found = source.pieces(experts, expert, part)
            if found is None:
                raise InputError(f"{source.folder}: {experts} lacks {part} of expert {expert}")
            return found

        return piece

    made = {}
    for part in parts:
        piece = find(part)
        first = piece(0)
        info = source.tensors[first.name]
        why = info.inexact or "it is not quantised"
        fmt = info.format
        if fmt is not None and not _keeps_tiles(fmt, first.rows, info.shape[-2]):
            fmt, why = None, f"its rows do not start at a multiple of {FP8_TILE}"
        made[part] = PartSource(piece, fmt, "" if fmt else why, turned=False, ggml=info.ggml if fmt else "")
    return made


def _part(target: Target, found: tuple[int, slice, bool] | None, infos: dict[str, TensorInfo]) -> PartSource:
    if found is None:
        return _inexact("its conversion mixes the columns of its rows")
    number, rows, turned = found
    names = list(target.sources.values())[number]
    name = names[0]
    formats = {infos[one].format for one in names}
    fmt = infos[name].format
    height = infos[name].shape[-1 if turned else -2]
    if len(formats) > 1:
        return _inexact("its experts are quantised in different formats")
    own = per_expert_sources(target)
    whole = None if rows == slice(0, height, 1) else rows

    def piece(expert: int) -> Piece:
        return Piece(names[expert], None, whole) if own else Piece(names[0], expert, whole)

    if fmt is None:
        why = infos[name].inexact
        return PartSource(piece, None, why or "it is not quantised", columns=None if why else turned)
    if turned != infos[name].transposed and fmt.name != "fp8":
        return _inexact("its rows are the columns of the checkpoint's matrix, across its groups")
    if not _keeps_tiles(fmt, rows, height):
        return _inexact(f"its rows do not start at a multiple of {FP8_TILE}")
    types = {infos[one].ggml for one in names}
    turned = turned != infos[name].transposed
    return PartSource(piece, fmt, turned=turned, ggml=types.pop() if len(types) == 1 and not turned else "")


def _keeps_tiles(fmt: Format, rows: slice | None, height: int) -> bool:
    """Whether the rows take whole tiles of fp8, which has scales by 128 rows."""
    if fmt.name != "fp8" or rows is None:
        return True
    start, stop, step = rows.indices(height)
    return step == 1 and start % FP8_TILE == 0 and (stop % FP8_TILE == 0 or stop == height)


def _rows(numbers: Tensor, info: TensorInfo) -> tuple[slice, bool] | None:
    """Which rows (or, with True, columns) of a tensor the rows of ``numbers`` are; None: they are mixed."""
    height, width = info.shape[-2:]
    columns = torch.arange(numbers.shape[1], dtype=numbers.dtype)
    heads = numbers[:, 0]
    straight = heads // width
    if numbers.shape[1] == width and torch.equal(numbers, straight[:, None] * width + columns):
        found = _steps(straight)
        return None if found is None else (found, False)
    if numbers.shape[1] == height and torch.equal(numbers, heads[:, None] + columns * width):
        found = _steps(heads)
        return None if found is None else (found, True)
    return None


def _steps(places: Tensor) -> slice | None:
    """Equal steps upwards as a slice."""
    first = int(places[0])
    step = int(places[1]) - first if len(places) > 1 else 1
    if step < 1 or not torch.equal(places, first + step * torch.arange(len(places), dtype=places.dtype)):
        return None
    return slice(first, int(places[-1]) + 1, step)


def _inexact(why: str) -> PartSource:
    def piece(expert: int) -> Piece:
        raise AssertionError(why)

    return PartSource(piece, None, why)


def _numel(info: TensorInfo) -> int:
    rows, columns = info.shape[-2:]
    return rows * columns
