"""compressed-tensors: integers packed into int32 words, plain int8, FP8, and the packed FP4 formats.

Which of them a matrix is shows in its tensors; the configuration's groups are what they must agree with.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.model.quantised.base import Finder, words
from hetero.model.quantised.floats import Fp8Matrix, Mxfp4Matrix
from hetero.model.quantised.integers import IntegerMatrix, Integers, order_together
from hetero.model.quantised.modelopt import add_nvfp4
from hetero.model.source import Checkpoint
from hetero.quant.fields import turned

FORMATS = (
    "pack-quantized",
    "int-quantized",
    "float-quantized",
    "naive-quantized",
    "nvfp4-pack-quantized",
    "mxfp4-pack-quantized",
    "mixed-precision",
)
_SCALES = ("F32", "BF16", "F16")
_SIDES = (
    ".weight_packed",
    ".weight_scale",
    ".weight_zero_point",
    ".weight_shape",
    ".weight_g_idx",
    ".weight_global_scale",
)


@dataclass(frozen=True, slots=True)
class _Scheme:
    """What a group of the configuration says of weights."""

    kind: str  # int or float
    bits: int
    symmetric: bool
    strategy: str
    group: int | None
    block: tuple[int, int] | None


class PackedMatrix(IntegerMatrix):
    """``stored``: weight_packed [n, k * bits / 32], weight_scale [n, groups], then those named in ``extras``:
    weight_zero_point [n * bits / 32, groups], weight_g_idx [k], weight_shape. Codes are offset by half."""

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: Sequence[str],
        shape: tuple[int, int],
        *,
        bits: int,
        group: int,
        symmetric: bool,
    ) -> None:
        super().__init__(raw, name, stored, shape, bits=bits, group=group, symmetric=symmetric)
        self.at = {one.rpartition("weight_")[2]: number for number, one in enumerate(stored)}

    def integers(self, index: int | None) -> Integers:
        codes = words(self.part(0, index), self.bits)[:, : self.k]
        zeros = None
        if "zero_point" in self.at:
            packed = self.part(self.at["zero_point"], index)
            zeros = turned(packed, self.bits)[:, : self.n].T.contiguous()
        return Integers(codes.contiguous(), _columns(self.part(1, index)), zeros, self.groups_of(index))

    def groups_of(self, index: int | None) -> Tensor | None:
        return self.part(self.at["g_idx"], index).long() if "g_idx" in self.at else None


class Int8Matrix(IntegerMatrix):
    """``stored``: weight I8 [n, k], weight_scale [n, groups] or of one element, weight_zero_point alike."""

    def integers(self, index: int | None) -> Integers:
        codes = (self.part(0, index).view(torch.uint8)) ^ 0x80
        zeros = None
        if len(self.stored) > 2:
            zeros = _columns(self.part(2, index)).to(torch.int8).view(torch.uint8) ^ 0x80
            zeros = zeros.expand(self.n, -1)
        return Integers(codes, _columns(self.part(1, index)).expand(self.n, -1), zeros)


def _columns(values: Tensor) -> Tensor:
    """[n, groups]; a scale of the whole matrix as [1, 1]."""
    return values if values.ndim == 2 else values.reshape(-1, 1)


def find(found: Finder, config: Mapping[str, Any]) -> None:
    fmt = config.get("format")
    if fmt not in FORMATS:
        raise InputError(
            f"{found.where}: compressed-tensors 'format' is {fmt!r}; hetero reads {', '.join(FORMATS)}"
        )
    sparse = config.get("sparsity_config")
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise InputError(
            f"{found.where}: compressed-tensors with sparsity {sparse.get('format')!r} is not read"
        )
    if config.get("transform_config"):
        raise InputError(f"{found.where}: compressed-tensors with 'transform_config' is not read")
    schemes, activations = _schemes(found, config)
    packed = [_packed(found, name, schemes) for name in found.ending(".weight_packed", ("I32",))]
    order_together([matrix for matrix in packed if "g_idx" in matrix.at])
    for name in found.ending(".weight_packed", ("U8",)):
        _fp4(found, name)
    for name in found.ending(".weight", ("I8",)):
        _int8(found, name, schemes)
    for name in found.ending(".weight", ("F8_E4M3",)):
        _fp8(found, name, schemes)
    found.drop(
        r"\.(?:input_scale|input_zero_point|input_global_scale|output_scale|[kvq]_scale|weight_observer\S*)"
    )
    if activations:
        found.notes.append(
            "the checkpoint's quantisation of activations is not used: activations stay as they are"
        )
    found.refuse_left(_SIDES, "compressed-tensors weight")


def _schemes(found: Finder, config: Mapping[str, Any]) -> tuple[list[_Scheme], bool]:
    """The groups of the configuration, and whether any of them quantises activations."""
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise InputError(
            f"{found.where}: compressed-tensors needs 'config_groups' in its quantization_config"
        )
    schemes, activations = [], False
    for label, one in groups.items():
        weights = one.get("weights") if isinstance(one, Mapping) else None
        if not isinstance(weights, Mapping):
            raise InputError(f"{found.where}: group {label!r} of 'config_groups' says nothing of weights")
        activations |= bool(one.get("input_activations"))
        bits = weights.get("num_bits", 8)
        if not isinstance(bits, int):
            raise InputError(
                f"{found.where}: 'num_bits' of group {label!r} is {bits!r}; expected a number of bits"
            )
        schemes.append(
            _Scheme(
                kind=str(weights.get("type", "int")),
                bits=bits,
                symmetric=bool(weights.get("symmetric", True)),
                strategy=str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor")),
                group=weights.get("group_size"),
                block=_block(found, label, weights.get("block_structure")),
            )
        )
    return schemes, activations


def _block(found: Finder, label: Any, block: Any) -> tuple[int, int] | None:
    """Rows and columns that share a scale, of a list or of text such as 128x128."""
    if not block:
        return None
    try:
        rows, columns = map(int, block.split("x") if isinstance(block, str) else block)
    except (TypeError, ValueError):
        rows = columns = 0
    if rows < 1 or columns < 1:
        raise InputError(
            f"{found.where}: 'block_structure' of group {label!r} is {block!r}; expected sizes, [128, 128]"
        )
    return rows, columns


def _agree(found: Finder, name: str, schemes: Sequence[_Scheme], fits: Any, what: str) -> _Scheme:
    for scheme in schemes:
        if fits(scheme):
            return scheme
    raise InputError(
        f"{found.info(name).file}: tensor {name} is {what}, which no group of 'config_groups' in "
        f"{found.where} says: config and tensors disagree"
    )


def _group(found: Finder, name: str, n: int, k: int, scale: str) -> int:
    """Columns of a group, by the shape of the scales. InputError where they do not divide k."""
    shape = found.info(scale).shape
    if shape in ((), (1,), (1, 1)) or shape == (n, 1):
        return k
    if len(shape) != 2 or shape[0] != n or not shape[1] or k % shape[1]:
        raise InputError(
            f"{found.info(scale).file}: tensor {scale} of shape {list(shape)} does not divide {name} of "
            f"shape {[n, k]} into equal groups of columns"
        )
    return k // shape[1]


def _integer(
    found: Finder, name: str, schemes: Sequence[_Scheme], *, bits: int, group: int, k: int
) -> _Scheme:
    def fits(scheme: _Scheme) -> bool:
        size = k if scheme.group in (None, -1) else scheme.group
        return scheme.kind == "int" and scheme.bits == bits and size == group

    return _agree(found, name, schemes, fits, f"{bits} bits in groups of {group} columns")


def _packed(found: Finder, name: str, schemes: Sequence[_Scheme]) -> PackedMatrix:
    packed, scale, zero, shape_name, order = (f"{name}{side}" for side in _SIDES[:5])
    info = found.info(packed)
    found.companion(packed, scale, _SCALES)
    found.companion(packed, shape_name, ("I64", "I32"))
    shape = [int(size) for size in found.raw.read(shape_name).flatten()]
    if len(shape) != 2 or len(info.shape) != 2 or info.shape[0] != shape[0]:
        raise InputError(f"{info.file}: tensor {packed} of shape {list(info.shape)} is no matrix {shape}")
    n, k = shape
    bits = next((bits for bits in (4, 8) if info.shape[1] == -(-k * bits // 32)), None)
    if bits is None:
        raise InputError(
            f"{info.file}: tensor {packed} of shape {list(info.shape)} holds {shape} in neither 4 nor 8 "
            "bits, which are what hetero reads"
        )
    group = _group(found, packed, n, k, scale)
    scheme = _integer(found, packed, schemes, bits=bits, group=group, k=k)
    stored = [packed, scale, shape_name]
    if found.has(zero):
        found.companion(packed, zero, ("I32",))
        found.expect(zero, (-(-n * bits // 32), k // group), packed)
        stored.append(zero)
    if scheme.symmetric == found.has(zero):
        raise InputError(
            f"{info.file}: tensor {packed} {'has' if found.has(zero) else 'lacks'} {zero}, though "
            f"{found.where} says 'symmetric' {str(scheme.symmetric).lower()}: config and tensors disagree"
        )
    if found.has(order):
        found.companion(packed, order, ("I32", "I64"))
        found.expect(order, (k,), packed)
        stored.append(order)
    matrix = PackedMatrix(
        found.raw, f"{name}.weight", stored, (n, k), bits=bits, group=group, symmetric=not found.has(zero)
    )
    found.add(matrix)
    return matrix


def _int8(found: Finder, name: str, schemes: Sequence[_Scheme]) -> None:
    weight, scale, zero = f"{name}.weight", f"{name}.weight_scale", f"{name}.weight_zero_point"
    info = found.info(weight)
    scales = found.companion(weight, scale, _SCALES)
    if len(info.shape) != 2:
        raise InputError(f"{info.file}: tensor {weight} of shape {list(info.shape)} is no matrix")
    n, k = info.shape
    group = _group(found, weight, n, k, scale)
    _integer(found, weight, schemes, bits=8, group=group, k=k)
    stored = [weight, scale]
    if found.has(zero):
        found.companion(weight, zero, ("I8",))
        found.expect(zero, scales.shape, weight)
        stored.append(zero)
    symmetric = not found.has(zero)
    found.add(Int8Matrix(found.raw, weight, stored, (n, k), bits=8, group=group, symmetric=symmetric))


def _fp8(found: Finder, name: str, schemes: Sequence[_Scheme]) -> None:
    weight, scale = f"{name}.weight", f"{name}.weight_scale"
    info = found.info(weight)
    shape = found.companion(weight, scale, _SCALES).shape
    if len(info.shape) != 2:
        raise InputError(f"{info.file}: tensor {weight} of shape {list(info.shape)} is no matrix")
    n, k = info.shape

    def tile_of(scheme: _Scheme) -> tuple[int, int] | None:
        if scheme.kind != "float" or scheme.bits != 8:
            return None
        if scheme.strategy == "block" and scheme.block is not None:
            rows, columns = scheme.block
            return scheme.block if shape == (-(-n // rows), -(-k // columns)) else None
        if scheme.strategy == "channel":
            return (1, k) if shape in ((n, 1), (n,)) else None
        if scheme.strategy == "tensor":
            return (n, k) if shape in ((), (1,), (1, 1)) else None
        return None

    what = f"FP8 with scales of shape {list(shape)}"
    tile = tile_of(_agree(found, weight, schemes, tile_of, what))
    assert tile is not None
    found.add(Fp8Matrix(found.raw, weight, (weight, scale), (n, k), tile=tile))


def _fp4(found: Finder, name: str) -> None:
    packed, scale, whole = f"{name}.weight_packed", f"{name}.weight_scale", f"{name}.weight_global_scale"
    info = found.info(packed)
    scales = found.companion(packed, scale, ("F8_E4M3", "U8", "F8_E8M0"))
    if scales.dtype == "F8_E4M3":
        found.companion(packed, whole, ("F32",))
        stored = (packed, scale, whole)
        add_nvfp4(found, f"{name}.weight", stored, info.shape, divides=True)
        return
    if len(info.shape) != 2 or info.shape[1] % 16:
        raise InputError(
            f"{info.file}: tensor {packed} of shape {list(info.shape)} is not in groups of 32: "
            "expected [n, k / 2]"
        )
    n, k = info.shape[0], info.shape[1] * 2
    found.expect(scale, (n, k // 32), packed)
    found.add(Mxfp4Matrix(found.raw, f"{name}.weight", (packed, scale), (n, k)))
