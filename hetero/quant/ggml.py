"""Matrices of GGUF files as codes of the packed formats, without a change of any value, and as floats."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hetero import _cpu, cpu
from hetero.core import InputError
from hetero.formats import Format
from hetero.quant.ggml_types import Bytes, GgmlType, checked_bytes, ggml_type, ggml_types, tables
from hetero.quant.pack import Codes, code_shapes, code_types

__all__ = ["GgmlType", "ggml_codes", "ggml_floats", "ggml_format", "ggml_type", "ggml_types"]


def ggml_format(type_name: str) -> Format | None:
    """The packed format that keeps the values of a type exactly; None for F32, F16 and BF16.

    Raises InputError for a type that cannot be read.
    """
    return ggml_type(type_name).format


def ggml_codes(type_name: str, data: Bytes, n: int, k: int) -> Codes:
    """The quantised values of a matrix [n, k] as ``pack_codes`` takes them for ``ggml_format(type_name)``.

    ``data``: the bytes of its blocks, row after row. Works on the pool's threads without the GIL. Raises
    InputError for a plain or unknown type, another number of bytes, or a scale that is NaN or infinite.
    """
    kind = ggml_type(type_name)
    if kind.format is None:
        raise InputError(f"{kind.name} is not quantised: it has no codes")
    raw = checked_bytes(kind, data, n, k)
    scale_shape, extra_shape = code_shapes(kind.format, n, k)
    scale_type, extra_type = code_types(kind.format)
    codes = torch.empty(n, k, dtype=torch.uint8)
    scales = torch.empty(scale_shape, dtype=scale_type)
    extra = torch.empty(extra_shape or 0, dtype=extra_type)
    whole_matrix = kind.name == "NVFP4"  # whose scale the file has elsewhere, if at all
    cpu.threads()  # the pool has them from now on
    finite = _cpu.ggml.codes(
        type=kind.number,
        data=raw,
        n=n,
        k=k,
        **tables(kind),
        codes=codes.view(-1).numpy(),
        scales=_bytes(scales),
        extra=_bytes(extra[:0] if whole_matrix else extra),
    )
    if not finite:
        raise InputError(f"{kind.name}: a scale is NaN or infinite")
    if whole_matrix:
        extra.fill_(1.0)
    return Codes(codes, scales, None if extra_shape is None else extra)


def ggml_floats(type_name: str, data: Bytes, n: int, k: int) -> Tensor:
    """The values of a matrix [n, k] as float32, the same bits as ``gguf.quants.dequantize`` gives.

    Works on the pool's threads without the GIL. Raises InputError for an unknown type or another number of
    bytes; scales that are not numbers give values that are none.
    """
    kind = ggml_type(type_name)
    raw = checked_bytes(kind, data, n, k)
    out = torch.empty(n, k, dtype=torch.float32)
    cpu.threads()  # the pool has them from now on
    _cpu.ggml.floats(type=kind.number, data=raw, n=n, k=k, **tables(kind), out=out.view(-1).numpy())
    return out


def _bytes(part: Tensor) -> Any:
    """A contiguous tensor's memory as a numpy array of bytes."""
    return part.view(-1).view(torch.uint8).numpy()
