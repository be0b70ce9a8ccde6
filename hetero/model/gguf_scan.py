"""A strict scan of one GGUF file: metadata and where each tensor lies, in the order of the file.

Everything that metadata and tensor infos can tell is checked against the file's size before a weight is
read. Nothing is mapped, so a file that is too short is a message and never a SIGBUS, and no count is believed
before the file is known to be large enough for it.
"""

from __future__ import annotations

import math
import os
import stat
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from gguf.constants import (
    GGML_QUANT_SIZES,
    GGUF_DEFAULT_ALIGNMENT,
    GGUF_MAGIC,
    GGMLQuantizationType,
    GGUFValueType,
    Keys,
)

from hetero.core import InputError

FLOAT_TYPES = ("F32", "F16", "BF16", "F64")
BLOCK_TYPES = (
    *("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"),
    *("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "IQ3_S", "IQ4_NL", "IQ4_XS"),
    *("MXFP4", "NVFP4", "TQ1_0", "TQ2_0"),
)
SUPPORTED_TYPES = (*FLOAT_TYPES, *BLOCK_TYPES)

# Numbers that files of the past have, and that the format has given up.
_REMOVED = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8"}
_REMOVED |= {36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8", 38: "IQ4_NL_8_8"}

_VERSIONS = (2, 3)
_MAGIC = GGUF_MAGIC.to_bytes(4, "little")
_OLD_MAGICS = (b"lmgg", b"fmgg", b"tjgg", b"algg")  # of the formats before GGUF, as they stand in a file
_MAX_DIMS = 4
_MAX_NAME = 1024
# Metadata and tensor infos together: the largest vocabularies take tens of megabytes.
_MAX_HEADER = 256 << 20
_WINDOW = 1 << 20
_MIN_PAIR = 8 + 4 + 1  # the shortest entry: the length of a key, a type, a byte
_MIN_INFO = 8 + 4 + 8 + 4 + 8  # of a tensor: the length of a name, one dimension, a type, an offset

_SCALARS = {
    GGUFValueType.UINT8: "u1",
    GGUFValueType.INT8: "i1",
    GGUFValueType.UINT16: "<u2",
    GGUFValueType.INT16: "<i2",
    GGUFValueType.UINT32: "<u4",
    GGUFValueType.INT32: "<i4",
    GGUFValueType.FLOAT32: "<f4",
    GGUFValueType.BOOL: "u1",
    GGUFValueType.UINT64: "<u8",
    GGUFValueType.INT64: "<i8",
    GGUFValueType.FLOAT64: "<f8",
}

# bool, int, float, str, list[str], or a numpy array of numbers or bools.
Value: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor of a file: [rows, columns] as torch has it, the fastest dimension last."""

    name: str
    type_name: str  # of SUPPORTED_TYPES
    shape: tuple[int, ...]
    file: Path
    start: int  # of its bytes in the file
    nbytes: int


@dataclass(slots=True)
class Scanned:
    """What one file holds."""

    path: Path
    metadata: dict[str, Value] = field(default_factory=dict)
    tensors: dict[str, GgufTensor] = field(default_factory=dict)


def scan_one(path: Path) -> Scanned:
    """Scan one file. Raises InputError for whatever is wrong with it."""
    try:
        # A pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise InputError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read: {getattr(error, 'strerror', None) or error}") from None
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode):
            raise InputError(f"{path}: not a file")
        return _read(path, _Reader(path, descriptor, status.st_size))
    finally:
        os.close(descriptor)


class _Reader:
    """The bytes of a file from its start, in order, by ``pread`` of windows."""

    def __init__(self, path: Path, descriptor: int, size: int) -> None:
        self.path = path
        self.size = size
        self._descriptor = descriptor
        self._window = b""
        self._at = 0  # of the next byte, in the window
        self._start = 0  # of the window, in the file

    @property
    def position(self) -> int:
        return self._start + self._at

    @property
    def left(self) -> int:
        return self.size - self.position

    def take(self, count: int) -> bytes:
        """The next ``count`` bytes. Raises InputError where the file has fewer."""
        if len(self._window) - self._at < count:
            self._fill(count)
        at = self._at
        self._at = at + count
        return self._window[at : at + count]

    def number(self, form: str, count: int) -> int:
        return int(struct.unpack(form, self.take(count))[0])

    def u32(self) -> int:
        return self.number("<I", 4)

    def u64(self) -> int:
        return self.number("<Q", 8)

    def text(self, what: str, most: int | None = None) -> str:
        """A string: its length in 8 bytes, then UTF-8."""
        length = self.u64()
        if most is not None and length > most:
            raise InputError(f"{self.path}: {what} of {length} bytes; at most {most} are possible")
        raw = self.take(length)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            raise InputError(f"{self.path}: {what} is not valid UTF-8: {raw[:40]!r}") from None

    def peek(self, start: int, count: int) -> bytes:
        """Bytes anywhere in the file, fewer at its end."""
        return self._pread(count, start)

    def _fill(self, count: int) -> None:
        start = self.position
        if start + count > _MAX_HEADER and start + count <= self.size:
            raise InputError(f"{self.path}: metadata of more than {_MAX_HEADER} bytes")
        if start + count > self.size:
            raise InputError(
                f"{self.path}: truncated: its header is at least {start + count} bytes long, "
                f"but the file has {self.size}"
            )
        kept = self._window[self._at :]
        more = max(count - len(kept), min(_WINDOW, self.size - start - len(kept)))
        window = kept + self._pread(more, start + len(kept))
        if len(window) < count:
            raise InputError(f"{self.path}: became shorter while it was read")
        self._window, self._start, self._at = window, start, 0

    def _pread(self, count: int, start: int) -> bytes:
        try:
            return os.pread(self._descriptor, count, start)
        except OSError as error:
            raise InputError(f"{self.path}: cannot be read: {error.strerror}") from None


def _read(path: Path, reader: _Reader) -> Scanned:
    magic = reader.peek(0, 4)
    if magic != _MAGIC:
        old = " (a format from before GGUF: convert the model again)" if magic in _OLD_MAGICS else ""
        raise InputError(f"{path}: not a GGUF file: begins with {magic!r}{old}, expected {_MAGIC!r}")
    reader.take(4)
    _check_version(path, reader.u32())
    tensor_count, pair_count = reader.u64(), reader.u64()
    for count, least, what in (
        (tensor_count, _MIN_INFO, "tensors"),
        (pair_count, _MIN_PAIR, "metadata entries"),
    ):
        if count * least > reader.left:
            raise InputError(
                f"{path}: says that it has {count} {what}, which takes {count * least} bytes at least, but "
                f"the file has {reader.size}: truncated, or damaged"
            )
    scanned = Scanned(path)
    for _ in range(pair_count):
        key = reader.text("a metadata key", _MAX_NAME)
        if key in scanned.metadata:
            raise InputError(f"{path}: metadata {key} is there twice")
        scanned.metadata[key] = _value(path, key, reader)
    infos = _tensor_infos(path, reader, tensor_count)
    _place(scanned, infos, reader)
    return scanned


def _check_version(path: Path, version: int) -> None:
    if version in _VERSIONS:
        return
    if version == 1:
        raise InputError(
            f"{path}: GGUF version 1, which no current program reads; versions 2 and 3 are read: "
            "convert the model again"
        )
    if int.from_bytes(version.to_bytes(4, "little"), "big") in _VERSIONS:
        raise InputError(
            f"{path}: a big-endian GGUF file; little-endian ones are read: convert the model again"
        )
    raise InputError(f"{path}: GGUF version {version}; versions 2 and 3 are read")


def _value(path: Path, key: str, reader: _Reader) -> Value:
    kind = _value_type(path, key, reader.u32())
    if kind == GGUFValueType.STRING:
        return reader.text(f"metadata {key}")
    if kind != GGUFValueType.ARRAY:
        return _numbers(reader, kind, 1)[0].item()
    kind = _value_type(path, key, reader.u32())
    count = reader.u64()
    if kind == GGUFValueType.ARRAY:
        raise InputError(f"{path}: metadata {key} is an array of arrays, which nothing uses")
    least = 8 if kind == GGUFValueType.STRING else np.dtype(_SCALARS[kind]).itemsize
    if count * least > reader.left:
        raise InputError(
            f"{path}: metadata {key} has {count} elements, which takes {count * least} bytes at least, but "
            f"the file has {reader.left} after it: truncated, or damaged"
        )
    if kind == GGUFValueType.STRING:
        return [reader.text(f"an element of metadata {key}") for _ in range(count)]
    return _numbers(reader, kind, count)


def _value_type(path: Path, key: str, number: int) -> GGUFValueType:
    try:
        return GGUFValueType(number)
    except ValueError:
        raise InputError(f"{path}: metadata {key} has the unknown type {number}") from None


def _numbers(reader: _Reader, kind: GGUFValueType, count: int) -> np.ndarray[Any, Any]:
    dtype = np.dtype(_SCALARS[kind])
    values = np.frombuffer(reader.take(count * dtype.itemsize), dtype)
    return values != 0 if kind == GGUFValueType.BOOL else values


@dataclass(frozen=True, slots=True)
class _Info:
    name: str
    type_name: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def _tensor_infos(path: Path, reader: _Reader, count: int) -> list[_Info]:
    infos: list[_Info] = []
    names: set[str] = set()
    for _ in range(count):
        name = reader.text("a tensor's name", _MAX_NAME)
        if name in names:
            raise InputError(f"{path}: tensor {name} is there twice")
        names.add(name)
        dims = reader.u32()
        if not 1 <= dims <= _MAX_DIMS:
            raise InputError(
                f"{path}: tensor {name} has {dims} dimensions; from 1 to {_MAX_DIMS} are possible"
            )
        shape = tuple(reader.u64() for _ in range(dims))[::-1]
        if 0 in shape:
            raise InputError(f"{path}: tensor {name} of shape {list(shape)} has no elements")
        type_name = _type_name(path, name, reader.u32())
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType[type_name]]
        if shape[-1] % block:
            raise InputError(
                f"{path}: tensor {name} of type {type_name} has rows of {shape[-1]} values, "
                f"which is no multiple of the type's {block}"
            )
        infos.append(_Info(name, type_name, shape, reader.u64(), math.prod(shape) // block * size))
    return infos


def _type_name(path: Path, name: str, number: int) -> str:
    try:
        type_name = str(GGMLQuantizationType(number).name)
    except ValueError:
        type_name = _REMOVED.get(number, "unknown")
    if type_name not in SUPPORTED_TYPES:
        raise InputError(
            f"{path}: tensor {name} has type {number} ({type_name}), which is not supported; supported: "
            f"{', '.join(SUPPORTED_TYPES)}"
        )
    return type_name


def _place(scanned: Scanned, infos: list[_Info], reader: _Reader) -> None:
    """Check that the tensors lie in the file, aligned and apart."""
    path = scanned.path
    alignment = scanned.metadata.get(Keys.General.ALIGNMENT, GGUF_DEFAULT_ALIGNMENT)
    if isinstance(alignment, bool) or not isinstance(alignment, int) or not _is_power_of_two(alignment):
        raise InputError(
            f"{path}: metadata {Keys.General.ALIGNMENT} is {alignment!r}, must be a power of two"
        )
    base = -(-reader.position // alignment) * alignment
    end, last = 0, ""
    for info in sorted(infos, key=lambda info: info.offset):
        if info.offset % alignment:
            raise InputError(
                f"{path}: tensor {info.name} starts at {info.offset}, which is no multiple of the "
                f"alignment {alignment}"
            )
        if info.offset < end:
            raise InputError(f"{path}: tensors {last} and {info.name} overlap")
        end, last = info.offset + info.nbytes, info.name
    if infos and base + end > reader.size:
        raise InputError(
            f"{path}: truncated: its tensors end at byte {base + end} ({last} is the last), but the file has "
            f"{reader.size} bytes"
        )
    _check_tail(path, reader, base + end if infos else reader.position, alignment)
    for info in infos:
        start = base + info.offset
        scanned.tensors[info.name] = GgufTensor(
            info.name, info.type_name, info.shape, path, start, info.nbytes
        )


def _is_power_of_two(value: int) -> bool:
    return value > 0 and value & (value - 1) == 0


def _check_tail(path: Path, reader: _Reader, end: int, alignment: int) -> None:
    """Another file's header after the last tensor: parts of a split that were put together as they are."""
    for start in _tails(end, alignment):
        if start < reader.size and reader.peek(start, 4) == _MAGIC:
            raise InputError(
                f"{path}: another GGUF file begins at byte {start}: the parts of a split file cannot be "
                "concatenated; give the first of the separate parts, or merge them with llama-gguf-split"
            )


def _tails(end: int, alignment: int) -> Iterator[int]:
    yield end
    padded = -(-end // alignment) * alignment
    if padded != end:
        yield padded
