"""A checkpoint whose matrices are quantised, seen as one with plain tensors.

A scheme's module finds its matrices by the names and shapes of the files (``Finder``) and says how one is
decoded (``Matrix``). ``QuantisedCheckpoint`` is the source that the loader reads: each quantised matrix is
one logical tensor, its scales and zero points are gone from the names.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import Format
from hetero.model.source import Checkpoint, Closing, Piece, StoredRows, TensorInfo
from hetero.quant.fields import nibbles
from hetero.quant.pack import Codes

REQUANTISE = "set --set experts=int8 (or another format) to have its experts quantised anew"


class InexactError(InputError):
    """Quantised values that their packed format cannot hold to the bit."""


class Matrix(ABC):
    """A quantised matrix [n, k], or a stack of them [E, n, k], in the tensors of a checkpoint.

    ``name`` is the logical tensor's, ``stored`` the tensors that make it, the codes first. ``format`` keeps
    its values exactly; where none does, it is None and ``inexact`` says why. ``transposed``: the logical
    tensor is [..., k, n].
    """

    transposed = False

    def __init__(
        self,
        raw: Checkpoint,
        name: str,
        stored: Sequence[str],
        shape: tuple[int, int],
        count: int | None = None,
    ) -> None:
        self.raw = raw
        self.name = name
        self.stored = tuple(stored)
        self.n, self.k = shape
        self.count = count
        self.format: Format | None = None
        self.inexact = ""

    @property
    def file(self) -> str:
        """Where the codes stand, for messages."""
        return str(self.raw.tensors[self.stored[0]].file)

    def info(self) -> TensorInfo:
        """The logical tensor."""
        infos = [self.raw.tensors[name] for name in self.stored]
        shape = (self.k, self.n) if self.transposed else (self.n, self.k)
        return TensorInfo(
            shape=shape if self.count is None else (self.count, *shape),
            dtype="F32",
            file=infos[0].file,
            start=infos[0].start,
            nbytes=sum(info.nbytes for info in infos),
            format=self.format,
            transposed=self.transposed,
            inexact=self.inexact,
        )

    def part(self, number: int, index: int | None) -> Tensor:
        """Tensor ``number`` of ``stored``, or its element ``index`` where the matrix is one of a stack."""
        name = self.stored[number]
        return self.raw.read(name) if index is None else self.raw.read_slice(name, index)[0]

    @abstractmethod
    def floats(self, index: int | None) -> Tensor:
        """Float32 [n, k]: each value computed from its code and scale in float32."""

    def check(self, index: int | None) -> None:  # noqa: B027  most schemes have nothing that could be inexact
        """InexactError as ``codes`` raises it, found by the scales alone."""

    def order(self, index: int | None) -> Tensor | None:
        """The order int32 [k] that ``codes`` puts the columns in; None: as they stand."""
        return None

    @abstractmethod
    def codes(self, index: int | None) -> Codes:
        """The same values in ``format``. InexactError where one of its scales is none that the format has."""


class Finder:
    """What a scheme finds in the names of a checkpoint."""

    def __init__(self, raw: Checkpoint, where: str) -> None:
        self.raw = raw
        self.where = where  # of the configuration, for messages
        self.matrices: dict[str, Matrix] = {}
        self.taken: set[str] = set()
        self.notes: list[str] = []

    def ending(self, suffix: str, dtypes: Sequence[str] = ()) -> list[str]:
        """Names of tensors that end so, without the ending."""
        return [
            name.removesuffix(suffix)
            for name, info in self.raw.tensors.items()
            if name.endswith(suffix) and (not dtypes or info.dtype in dtypes)
        ]

    def has(self, name: str) -> bool:
        return name in self.raw.tensors

    def info(self, name: str) -> TensorInfo:
        return self.raw.tensors[name]

    def companion(self, of: str, name: str, dtypes: Sequence[str]) -> TensorInfo:
        """A tensor that another one needs. Raises InputError where it is absent or of another dtype."""
        if name not in self.raw.tensors:
            raise InputError(f"{self.info(of).file}: tensor {of} is quantised, but its {name} is absent")
        info = self.info(name)
        if info.dtype not in dtypes:
            raise InputError(
                f"{info.file}: tensor {name} has dtype {info.dtype}; expected {' or '.join(dtypes)}"
            )
        return info

    def matrix(self, name: str) -> tuple[int, int]:
        """The shape of a tensor of two dimensions. Raises InputError for another one."""
        info = self.info(name)
        if len(info.shape) != 2:
            raise InputError(
                f"{info.file}: tensor {name} of shape {list(info.shape)} is no matrix of two dimensions"
            )
        return info.shape[0], info.shape[1]

    def expect(self, name: str, shape: tuple[int, ...], of: str) -> None:
        """Raises InputError where a companion's shape does not fit."""
        info = self.info(name)
        if info.shape != shape:
            raise InputError(
                f"{info.file}: tensor {name} has shape {list(info.shape)}; {of} needs {list(shape)}"
            )

    def add(self, matrix: Matrix) -> None:
        if matrix.name in self.raw.tensors and matrix.name not in matrix.stored:
            raise InputError(
                f"{matrix.file}: {matrix.name} is there twice: plain, and quantised as {matrix.stored[0]}"
            )
        self.matrices[matrix.name] = matrix
        self.taken |= set(matrix.stored)

    def drop(self, pattern: str) -> int:
        """Leave out the tensors whose names match at the end: scales of activations. Their number."""
        found = re.compile(f"(?:{pattern})$")
        dropped = {name for name in self.raw.tensors if name not in self.taken and found.search(name)}
        self.taken |= dropped
        return len(dropped)

    def refuse_left(self, suffixes: Iterable[str], what: str) -> None:
        """InputError for tensors that only go with a quantised matrix and have none."""
        endings = tuple(suffixes)
        for name, info in self.raw.tensors.items():
            if name not in self.taken and name.endswith(endings):
                raise InputError(f"{info.file}: tensor {name} belongs to no {what}")

    def finish(self, method: str) -> QuantisedCheckpoint:
        if not self.matrices:
            raise InputError(
                f"{self.where}: says that the checkpoint is quantised with {method}, "
                "but none of its tensors is: config and tensors disagree"
            )
        return QuantisedCheckpoint(self.raw, self.matrices, self.taken, self.notes)


class QuantisedCheckpoint(Closing):
    """A source of logical tensors over the files of a quantised checkpoint."""

    def __init__(
        self, raw: Checkpoint, matrices: dict[str, Matrix], taken: set[str], notes: Sequence[str] = ()
    ) -> None:
        self.folder = raw.folder
        self.notes = tuple(notes)
        self._raw = raw
        self._matrices = matrices
        self.tensors = {name: info for name, info in raw.tensors.items() if name not in taken}
        self.tensors |= {name: matrix.info() for name, matrix in matrices.items()}

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors, as stored."""
        return sum(info.nbytes for info in self.tensors.values())

    def read(self, name: str) -> Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._check(name)
            return self._raw.read(name)
        if matrix.count is None:
            return _turned(matrix, matrix.floats(None))
        out = torch.empty(self.tensors[name].shape)
        for index in range(matrix.count):
            out[index] = _turned(matrix, matrix.floats(index))
        return out

    def rows(self, name: str) -> StoredRows | None:
        """None of a quantised matrix, whose scales stand elsewhere."""
        self._check(name)
        return None if name in self._matrices else self._raw.rows(name)

    def read_slice(self, name: str, index: int) -> Tensor:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._check(name)
            return self._raw.read_slice(name, index)
        size = self.tensors[name].shape[0]
        if not 0 <= index < size:
            raise InputError(f"tensor {name} of shape {list(self.tensors[name].shape)} has no slice {index}")
        if matrix.count is None:
            return _turned(matrix, matrix.floats(None))[index : index + 1]
        return _turned(matrix, matrix.floats(index))[None]

    def codes(self, name: str, index: int | None = None) -> Codes:
        matrix = self._matrices.get(name)
        if matrix is None:
            self._check(name)
            return self._raw.codes(name, index)
        if matrix.format is None:
            raise InexactError(f"{matrix.file}: tensor {name}: {matrix.inexact}; {REQUANTISE}")
        return matrix.codes(index)

    def order(self, name: str, index: int | None = None) -> Tensor | None:
        """The order int32 [k] that ``codes`` puts the columns of a matrix in; None: as they stand."""
        matrix = self._matrices.get(name)
        return None if matrix is None else matrix.order(index)

    def check_codes(self, name: str, index: int | None = None) -> None:
        """Raises InexactError where ``codes`` would, by reading the scales alone."""
        matrix = self._matrices.get(name)
        if matrix is not None:
            matrix.check(index)

    def blocks(self, name: str, index: int | None = None) -> Tensor:
        return self._raw.blocks(name, index)

    def pieces(self, experts: str, expert: int, part: str) -> Piece | None:
        """None: the names are the Hub's."""
        return None

    def close(self) -> None:
        self._raw.close()

    def _check(self, name: str) -> None:
        if name not in self.tensors:
            raise InputError(f"{self.folder} has no tensor {name}")


def _turned(matrix: Matrix, values: Tensor) -> Tensor:
    return values.T.contiguous() if matrix.transposed else values


def exact_half(matrix: Matrix, scales: Tensor) -> Tensor:
    """The same scales as float16. Raises InexactError, with one of them, where a scale is no float16."""
    half = scales.to(torch.float16)
    wrong = half.to(torch.float64) != scales.to(torch.float64)
    if bool(wrong.any()):
        raise InexactError(
            f"{matrix.file}: tensor {matrix.name}: {int(wrong.sum())} of its scales, such as "
            f"{float(scales[wrong].flatten()[0])!r}, are no 16-bit float, so {matrix.format} cannot hold "
            f"its values exactly; {REQUANTISE}"
        )
    return half


def words(packed: Tensor, bits: int) -> Tensor:
    """Fields of 4 or 8 ``bits`` of int32 [..., m], lowest first: uint8 [..., m * 32 / bits]."""
    raw = packed.contiguous().view(torch.uint8)
    return nibbles(raw) if bits == 4 else raw
