"""Runs single kernels of the extension and evaluates the same thing in float64."""

from __future__ import annotations

import numpy as np
import torch

from hetero._cpu import kernels
from hetero.core import ActKind
from hetero.formats import BLOCK_ROWS, FP8, Format, padded_k, parse_format, valid_formats
from hetero.quant import k_formats
from hetero.quant.iq_tables import TABLES as IQ_TABLES
from hetero.quant.iq_tables import UNUSED
from hetero.quant.pack import code_shapes, dequantise, pack_codes, quantise

GEMV, GEMM, BULK = 0, 1, 2
CLASSES = (GEMV, GEMM, BULK)
FORMATS = [parse_format(text) for text in valid_formats()]
KEPT = [parse_format(text) for text in valid_formats(kept_only=True)]
TABLES: list[str] = kernels.table_names()
KINDS = {kind: number for number, kind in enumerate(ActKind)}

Array = np.ndarray


class Matrix:
    """Packed weights and the float64 values that they decode to (by the torch reference)."""

    def __init__(self, fmt: Format, packed: torch.Tensor, n: int, k: int) -> None:
        self.format, self.n, self.k = fmt, n, k
        self.n_pad = -(-n // BLOCK_ROWS) * BLOCK_ROWS
        self.packed = packed.numpy()
        self.values = dequantise(fmt, packed, n, k).double().numpy()

    @classmethod
    def gaussian(cls, fmt: Format, n: int, k: int, generator: torch.Generator) -> Matrix:
        """Of a format that only keeps values: random codes with random scales."""
        if fmt.kept_only:
            scales, extra = random_scales(fmt, n, k, generator)
            return cls(fmt, pack_codes(fmt, random_codes(fmt, n, k, generator), scales, extra), n, k)
        return cls(fmt, quantise(fmt, torch.randn(n, k, generator=generator)), n, k)

    def run(self, table: str, row_class: int, x: Array) -> Array:
        """[rows, n_pad] of one kernel; the output is NaN before, and beyond both it must stay NaN."""
        rows, fmt = x.shape[0], self.format
        y = np.full((rows + 16, self.n_pad + 5), np.nan, np.float32)
        kernels.run_kernel(table, row_class, fmt.code, fmt.group, self.n, self.k, self.packed, x, y[:rows])
        beyond = np.isnan(y[rows:]).all() and np.isnan(y[:, self.n_pad :]).all()
        assert beyond, f"{table}: wrote beyond its rectangle"
        return y[:rows, : self.n_pad]

    def evaluate(self, x: Array) -> Array:
        """Float64 [rows, n] from the activations as the kernel sees them: quantised where the format is."""
        seen = quantised(x) if self.format.rounds_activations else x.astype(np.float64)
        return seen @ self.values.T


def quantised(x: Array) -> Array:
    """``x`` float32 [rows, k] after int8 in groups of 32, as float64; the definition of cpu_ext/kernels.h."""
    rows, k = x.shape
    k_pad = padded_k(Format("f32"), k)
    groups = np.zeros((rows, k_pad), np.float32)
    groups[:, :k] = x
    groups = groups.reshape(rows, k_pad // 32, 32)
    amax = np.abs(groups).max(-1, keepdims=True)
    safe = np.where(amax == 0, np.float32(1), amax)
    codes = np.rint(groups * (np.float32(127) / safe))
    values = codes.astype(np.float64) * (amax / np.float32(127)).astype(np.float64)
    return values.reshape(rows, k_pad)[:, :k]


def valid_codes(fmt: Format) -> list[int]:
    """Every code that stands for a number."""
    if fmt.name in FP8:
        return [code for code in range(256) if code & 0x7F != 0x7F]
    if fmt.name in IQ_TABLES:
        return [code for code, number in enumerate(IQ_TABLES[fmt.name]) if number != UNUSED]
    if fmt.kept_only:
        low, high = k_formats.code_range(fmt)
        return list(range(low, high + 1))
    return list(range(256 if fmt.name == "int8" else 16))


def random_codes(fmt: Format, n: int, k: int, generator: torch.Generator) -> torch.Tensor:
    codes = torch.tensor(valid_codes(fmt), dtype=torch.uint8)
    return codes[torch.randint(0, len(codes), (n, k), generator=generator)]


MOST_SCALE = 1.5
"""Largest scale that ``random_scales`` gives in fp16."""


def random_scales(
    fmt: Format, n: int, k: int, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Scales near one, and the extra where the format has one, as ``pack_codes`` takes them."""
    shape, extra = code_shapes(fmt, n, k)
    values = torch.rand(shape, generator=generator).add(0.5)
    if fmt.name == "fp8_row":
        return values, None
    if fmt.kept_only:
        return _kept_scales(fmt, shape, extra, generator)
    if fmt.name == "fp8":
        return values, None
    if fmt.name == "mxfp4":
        return torch.randint(120, 132, shape, generator=generator).to(torch.uint8), None
    if fmt.name == "nvfp4":
        return values.to(torch.float8_e4m3fn).view(torch.uint8), torch.tensor([0.37])
    return values.half(), None if extra is None else torch.randn(extra, generator=generator).half()


def _kept_scales(
    fmt: Format, shape: tuple[int, ...], extra: tuple[int, ...] | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Both signs where the format has them; minima and zeros about in the middle of the codes."""

    def integers(shape: tuple[int, ...], low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high + 1, shape, generator=generator).to(torch.int8).view(torch.uint8)

    def halves(shape: tuple[int, ...]) -> torch.Tensor:
        return torch.rand(shape, generator=generator).add(0.5).half()

    codes = valid_codes(fmt)
    if not fmt.super_scales:
        scales = halves(shape)
        if extra is None:
            return scales, None
        if fmt.name.endswith("z"):
            return scales, torch.randint(0, codes[-1] + 1, extra, generator=generator).to(torch.uint8)
        return scales, halves(extra) * -(codes[-1] // 2)
    scales = integers(shape, -64 if k_formats.signed_scales(fmt) else 1, 63)
    supers = halves(extra or ()) / 16
    if k_formats.has_minimum(fmt):
        supers[..., 1] *= codes[-1] / 2
    return scales, supers


def bits(a: Array) -> Array:
    return np.ascontiguousarray(a).view(np.uint32)


def relative(a: Array, b: Array) -> float:
    """Norm of the difference over that of b; of nothing but zeros, whether there is a difference."""
    return float(np.linalg.norm(a.astype(np.float64) - b) / (np.linalg.norm(b) or 1.0))
