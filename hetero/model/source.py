"""Where a model's tensors come from: ``Source``, and ``Checkpoint``, a folder of safetensors files.

Only headers are read when a checkpoint is opened, and they are checked against their files before any weight
is read. Tensors are read into memory of their own: a map would count the whole checkpoint in the process's
resident memory, beside the packed weights.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import torch

from hetero import jsonfile
from hetero.core import InputError
from hetero.formats import Format
from hetero.model.ahead import Files
from hetero.quant.pack import Codes

INDEX = "model.safetensors.index.json"

# The format's own limit of a header, so that a file of another kind is not read whole.
_MAX_HEADER = 100_000_000
_MAX_DIMENSIONS = 64

_DTYPES: dict[str, torch.dtype] = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
WEIGHT_DTYPES = ("F32", "F16", "BF16")


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One tensor of a source, not read yet."""

    shape: tuple[int, ...]
    dtype: str  # of what ``read`` gives, as safetensors spells it: "BF16"
    file: Path
    start: int  # of its bytes in the file
    nbytes: int  # in the file
    # The packed format that keeps its quantised values exactly; None for a plain tensor, and for a quantised
    # one whose values no format keeps.
    format: Format | None = None
    # Whether the quantised matrix is stored as [n, k] where the tensor is [..., k, n].
    transposed: bool = False
    # Why a quantised tensor has no format, for the message where its values shall be kept.
    inexact: str = ""
    # The GGUF type of its blocks, which ``Source.blocks`` gives; "" for a tensor that has none.
    ggml: str = ""

    @property
    def is_weight(self) -> bool:
        """Whether the dtype is one that weights can be loaded from."""
        return self.dtype in WEIGHT_DTYPES


@dataclass(frozen=True, slots=True)
class Piece:
    """Where one part of one expert stands in a source."""

    name: str  # of a tensor
    index: int | None  # of the expert along dimension 0; None where the tensor is the expert's own
    # Those of the matrix [n, k] that belong to the part; None: all.
    rows: slice | None = None


@dataclass(frozen=True, slots=True)
class StoredRows:
    """The rows of a matrix [n, k], which stand one after the other in a file, each whole."""

    file: Path
    start: int
    rows: int  # n
    row_bytes: int
    kind: str  # what a row is made of: "F32", "F16", "BF16", or a GGUF type of blocks


class Source(Protocol):
    """Tensors of one model. Faults of its files are an InputError that names file and tensor.

    ``folder`` is what the user gave: a folder, or a file. ``tensors`` has the logical tensors, by the names
    that a plain checkpoint of the model on the Hub gives them: a quantised matrix is one tensor, ``weight``,
    without its scales.
    """

    folder: Path
    tensors: dict[str, TensorInfo]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as stored."""

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor on the CPU; a quantised one as the floats that it stands for."""

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Element ``index`` along dimension 0, that dimension kept: [1, ...]. Reads nothing else."""

    def codes(self, name: str, index: int | None = None) -> Codes:
        """The quantised values of a matrix [n, k] in the tensor's ``format``, as ``pack_codes`` takes them.

        ``index``: the expert of a tensor [E, n, k]. InputError where the tensor has no format.
        """

    def blocks(self, name: str, index: int | None = None) -> torch.Tensor:
        """The bytes of the same matrix as they are in the file, uint8 [n, bytes of a row].

        For a tensor that has a ``ggml`` type; InputError for another.
        """

    def rows(self, name: str) -> StoredRows | None:
        """Where the rows of a tensor stand that can be read one by one; None where they do not: it is no
        matrix, or its values are made of several tensors, or in another order."""

    def pieces(self, experts: str, expert: int, part: str) -> Piece | None:
        """Where ``part`` ("gate", "down_bias", ...) of an expert stands, its matrix as [n, k].

        ``experts``: dotted name of the experts module in the model's tree. None where transformers'
        conversion says it, which is so for checkpoints with the Hub's names. A source says it for all parts
        of all experts of a module, or for none; expert 0 stands for all.
        """

    def close(self) -> None:
        """Close the files. A later read opens them again."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


class Closing(ABC):
    """What a ``with`` closes at its end."""

    @abstractmethod
    def close(self) -> None:
        """Close the files. A later read opens them again."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Checkpoint(Closing):
    """The tensors of a model folder, by the names that the files give them.

    ``tensors`` maps names to TensorInfo. Every fault of the files is an InputError: a missing shard, an index
    that names an absent tensor, a truncated file, the same tensor in two files.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.tensors: dict[str, TensorInfo] = {}
        self._files = Files()
        files, index = _find_files(self.folder)
        for file in files:
            for name, info in read_header(file).items():
                if name in self.tensors:
                    raise InputError(f"tensor {name} is in two files: {self.tensors[name].file} and {file}")
                self.tensors[name] = info
        for name, shard in index.items():
            if name not in self.tensors:
                raise InputError(f"{self.folder / INDEX}: tensor {name} is not in {shard}, as it says")

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> torch.Tensor:
        """A whole tensor, on the CPU, in the file's dtype."""
        info = self._info(name)
        return self._read(name, info, info.start, info.shape)

    def read_slice(self, name: str, index: int) -> torch.Tensor:
        """Element ``index`` along dimension 0, that dimension kept: [1, ...]. Reads nothing else."""
        info = self._info(name)
        if not info.shape or not 0 <= index < info.shape[0]:
            raise InputError(f"tensor {name} of shape {list(info.shape)} has no slice {index}")
        step = info.nbytes // info.shape[0]
        return self._read(name, info, info.start + index * step, (1, *info.shape[1:]))

    def codes(self, name: str, index: int | None = None) -> Codes:
        """Plain tensors have none: raises InputError."""
        raise InputError(f"{self._info(name).file}: tensor {name} is not quantised")

    def blocks(self, name: str, index: int | None = None) -> torch.Tensor:
        """Tensors of safetensors have none: raises InputError."""
        raise InputError(f"{self._info(name).file}: tensor {name} is not in blocks of a GGUF type")

    def rows(self, name: str) -> StoredRows | None:
        """Of every matrix of floats."""
        info = self._info(name)
        if len(info.shape) != 2 or not info.is_weight or not info.shape[0]:
            return None
        return StoredRows(info.file, info.start, info.shape[0], info.nbytes // info.shape[0], info.dtype)

    def pieces(self, experts: str, expert: int, part: str) -> Piece | None:
        """None: transformers' conversions say where experts stand."""
        return None

    def close(self) -> None:
        """Close the files. A later read opens them again."""
        self._files.close()

    def _info(self, name: str) -> TensorInfo:
        if name not in self.tensors:
            raise InputError(f"{self.folder} has no tensor {name}")
        return self.tensors[name]

    def _read(self, name: str, info: TensorInfo, start: int, shape: tuple[int, ...]) -> torch.Tensor:
        dtype = _DTYPES.get(info.dtype)
        if dtype is None:
            raise InputError(unsupported_dtype(name, info))
        raw = self._files.read(info.file, start, math.prod(shape) * dtype.itemsize, dtype.itemsize)
        return raw.view(dtype).reshape(shape)


def unsupported_dtype(name: str, info: TensorInfo) -> str:
    """The message for a tensor that weights cannot be loaded from."""
    return (
        f"{info.file}: tensor {name} has dtype {info.dtype}; weights may be {', '.join(WEIGHT_DTYPES)}. "
        "A quantised checkpoint has a 'quantization_config' in its config.json"
    )


def _find_files(folder: Path) -> tuple[list[Path], dict[str, str]]:
    """The safetensors files of a folder, and tensor name -> file name where there is an index."""
    if not folder.is_dir():
        raise InputError(f"{folder}: no such folder" if not folder.exists() else f"{folder}: not a folder")
    if (folder / "model.safetensors").is_file():  # before an index, as transformers has it
        return [folder / "model.safetensors"], {}
    if (folder / INDEX).is_file():
        return _read_index(folder)
    files = sorted(folder.glob("*.safetensors"))
    if files:
        return files, {}
    for pattern, kind in (("*.bin", "PyTorch .bin"), ("*.pt", "PyTorch .pt"), ("*.pth", "PyTorch .pth")):
        if any(folder.glob(pattern)):
            raise InputError(
                f"{folder} holds {kind} weights only; hetero reads safetensors: convert it first"
            )
    raise InputError(f"{folder} holds no weights: expected model.safetensors, or shards with {INDEX}")


def _read_index(folder: Path) -> tuple[list[Path], dict[str, str]]:
    path = folder / INDEX
    try:
        data = jsonfile.parse(path.read_bytes())
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read as JSON: {error}") from None
    index = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(index, dict) or not all(isinstance(shard, str) for shard in index.values()):
        raise InputError(f"{path}: expected a 'weight_map' from tensor names to file names")
    for shard in index.values():
        if not is_file_name(shard):
            raise InputError(f"{path}: {shard[:200]!r} is not the name of a file beside it")
    files = [folder / shard for shard in sorted(set(index.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise InputError(
            f"{path} names {len(files)} shards, of which {len(missing)} are missing: {', '.join(missing[:5])}"
        )
    return files, index


def is_file_name(text: str) -> bool:
    """Whether a text names a file of a folder, and nothing that lies elsewhere."""
    return (
        0 < len(text.encode("utf-8", "surrogatepass")) <= 255
        and text.isprintable()
        and "/" not in text
        and text not in (".", "..")
    )


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file holds. Raises InputError when header and file do not agree."""
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            start = stream.read(8)
            length = int.from_bytes(start, "little")
            if len(start) == 8 and 8 + length <= size and length <= _MAX_HEADER:
                raw = stream.read(length)
            elif len(start) < 8 or length <= _MAX_HEADER:
                expected = f"a header of {length} bytes" if len(start) == 8 else "at least 8 bytes"
                raise InputError(f"{file}: truncated: expected {expected}, but the file has {size} bytes")
            else:
                raise InputError(f"{file}: not a safetensors file")
    except OSError as error:
        raise InputError(f"{file}: cannot be read: {error.strerror}") from None
    try:
        header = jsonfile.parse(raw)
    except ValueError:
        raise InputError(f"{file}: not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise InputError(f"{file}: not a safetensors file: its header is not a JSON object")
    header.pop("__metadata__", None)
    base = 8 + length
    tensors = dict(_entries(file, header, base))
    _check_extent(file, tensors, base, size)
    return tensors


def _entries(file: Path, header: dict[str, Any], base: int) -> Iterator[tuple[str, TensorInfo]]:
    for name, entry in header.items():
        try:
            dtype = str(entry["dtype"])
            shape = tuple(int(size) for size in entry["shape"])
            begin, end = (int(offset) for offset in entry["data_offsets"])
        except (KeyError, TypeError, ValueError, OverflowError):
            raise InputError(f"{file}: the header's entry of tensor {name} is malformed") from None
        # Bounds first: the product of a hostile shape can take minutes.
        sizes = len(shape) <= _MAX_DIMENSIONS and all(0 <= size < 1 << 63 for size in shape)
        if not sizes or not 0 <= begin <= end < 1 << 63:
            raise InputError(f"{file}: the header's entry of tensor {name} is malformed")
        if dtype in _DTYPES and math.prod(shape) * _DTYPES[dtype].itemsize != end - begin:
            raise InputError(
                f"{file}: tensor {name}, {dtype} of shape {list(shape)}, cannot have {end - begin} bytes"
            )
        yield name, TensorInfo(shape, dtype, file, base + begin, end - begin)


def _check_extent(file: Path, tensors: dict[str, TensorInfo], base: int, size: int) -> None:
    """Tensors must cover the file without holes, overlaps or a tail."""
    end = base
    for name, info in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].nbytes)):
        if info.start != end:
            raise InputError(f"{file}: the bytes of tensor {name} do not follow those of the one before it")
        end += info.nbytes
    if end != size:
        what = "truncated" if size < end else "has bytes that no tensor owns"
        raise InputError(f"{file}: {what}: its header makes it {end} bytes, but the file has {size}")
