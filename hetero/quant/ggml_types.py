"""Block types of GGUF files: their sizes, the packed format that keeps each, the tables of their decoders.

The decoders are in cpu_ext/ggml.cpp; ``hetero.quant.ggml`` calls them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import gguf
import numpy as np
import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import Format, parse_format
from hetero.quant.iq_tables import FACTORS, TABLES, UNUSED

PLAIN = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Types without blocks."""

_FORMATS = {
    "Q4_0": "int4 g32",
    "Q4_1": "int4a g32",
    "Q5_0": "int8 g32",
    "Q5_1": "int8a g32",
    "Q8_0": "int8 g32",
    "MXFP4": "mxfp4",
    "NVFP4": "nvfp4",
    "TQ1_0": "int4 g128",
    "TQ2_0": "int4 g128",
    "IQ4_NL": "iq4_nl",
    **{name: name.lower() for name in ("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_XXS", "IQ3_S")},
    **{name: name.lower() for name in ("IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ1_S", "IQ1_M")},
}
_NO_FILE_TYPES = ("Q8_1", "Q8_K")  # ggml has them for activations alone

Bytes = bytes | bytearray | memoryview | np.ndarray[Any, Any] | Tensor
"""The bytes of a matrix, one after the other: of numpy and torch uint8, on the CPU and contiguous."""


@dataclass(frozen=True, slots=True)
class GgmlType:
    """A type of a file: ``values`` values in ``bytes`` bytes."""

    name: str
    number: int
    values: int
    bytes: int
    format: Format | None  # that keeps its values; None: a plain type

    @property
    def bits_per_weight(self) -> float:
        """Bits of a value in the file."""
        return 8 * self.bytes / self.values

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of k values. Raises InputError where these are no whole blocks."""
        if k < 1 or k % self.values:
            raise InputError(f"{self.name} has blocks of {self.values} values: a row of {k} is impossible")
        return k // self.values * self.bytes


@cache
def ggml_types() -> dict[str, GgmlType]:
    """Every type that can be read, by its name in files' tools ("Q4_K")."""
    types = {}
    for name in (*PLAIN, *_FORMATS):
        number = gguf.GGMLQuantizationType[name]
        values, size = gguf.GGML_QUANT_SIZES[number]
        kept = parse_format(_FORMATS[name]) if name in _FORMATS else None
        types[name] = GgmlType(name, int(number), values, size, kept)
    return types


def ggml_type(name: str) -> GgmlType:
    """A type by its name. Raises InputError, with the valid names, for any other."""
    found = ggml_types().get(name)
    if found is None:
        why = " (of activations, not of files)" if name in _NO_FILE_TYPES else ""
        raise InputError(f"cannot read ggml type '{name}'{why}; readable: {', '.join(ggml_types())}")
    return found


def checked_bytes(kind: GgmlType, data: Bytes, n: int, k: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``data`` of a matrix [n, k] as uint8 [bytes], not copied.

    Raises InputError where it is not uint8 and contiguous, or of another size than the matrix.
    """
    if isinstance(data, Tensor):
        if data.dtype != torch.uint8 or data.device.type != "cpu" or not data.is_contiguous():
            raise InputError(f"{kind.name}: data must be contiguous torch.uint8 on the CPU")
        raw = data.detach().numpy().reshape(-1)
    elif isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise InputError(f"{kind.name}: data must be contiguous uint8, not {data.dtype}")
        raw = data.reshape(-1)
    else:
        raw = np.frombuffer(data, np.uint8)
    expected = n * kind.row_bytes(k)
    if n < 1 or raw.nbytes != expected:
        raise InputError(
            f"{kind.name} [{n}, {k}] takes {expected} bytes ({n} rows of {k // kind.values} blocks of "
            f"{kind.bytes} bytes), not {raw.nbytes}"
        )
    return raw


@cache
def tables(kind: GgmlType) -> dict[str, np.ndarray[Any, Any] | None]:
    """The tables that the extension's decoder of a type takes, by name; see cpu_ext/ggml.h.

    The grids are made from those of the ``gguf`` package rather than copied into this project: they are the
    package's data, which is what defines the types, and a copy could only differ from it by mistake.
    """
    if kind.format is None:
        return {"grid": None, "numbers": None}
    quants, numbers = getattr(gguf.quants, kind.name), None
    if kind.name in ("MXFP4", "NVFP4"):
        numbers = np.array(quants.kvalues, np.float32)
    elif kind.format.name in TABLES:
        known = [number if number != UNUSED else 0 for number in TABLES[kind.format.name]]
        numbers = np.array(known, np.float32) * np.float32(FACTORS[kind.format.name])
    if quants.grid_hex is None:
        return {"grid": None, "numbers": numbers}
    quants.init_grid()
    entries = quants.grid.reshape(quants.grid_shape)
    places = np.searchsorted(np.array(quants.grid_map, np.float32), entries).astype(np.uint8)
    eight = np.zeros((len(entries), 8), np.uint8)
    eight[:, : places.shape[1]] = places
    return {"grid": eight.view("<u8").reshape(-1), "numbers": numbers}
