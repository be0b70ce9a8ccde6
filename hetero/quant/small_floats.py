"""The formats of small floats in torch: E2M1 and E4M3 codes, and the scales of mxfp4, nvfp4 and fp8.

mxfp4 as in the OCP Microscaling Formats (MX) specification 1.0, section 6.3: the shared exponent is that of
the largest magnitude less that of the largest element, numbers are rounded to nearest even and saturate.
nvfp4 has two levels: the matrix is scaled by amax / (6 * 448), each group by its amax / 6 rounded to E4M3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import FP8_TILE, Format

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Numbers of the codes 0 to 7; 8 to 15 are their negatives."""

MOST_E4M3, MOST_E2M1 = 448.0, 6.0
TINY_AMAX = 2.0**-100
"""Blocks of fp8 and matrices of nvfp4 whose largest magnitude is below this become zeros."""

MOST_SCALE = 2.0**119
"""Largest float32 scale of codes that are small floats: the kernels multiply it by 256."""

_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)  # the second of each pair of codes is the even one


def to_e4m3(x: Tensor) -> Tensor:
    """Nearest E4M3 codes (uint8), ties to even, saturating; ``x`` float32 without NaN."""
    return x.clamp(-MOST_E4M3, MOST_E4M3).to(torch.float8_e4m3fn).view(torch.uint8)


def from_e4m3(codes: Tensor) -> Tensor:
    """Float32 numbers of E4M3 codes (uint8)."""
    return codes.view(torch.float8_e4m3fn).float()


def check_e4m3(fmt: Format, codes: Tensor, scales: Tensor) -> None:
    """Raises InputError for a code that is no number, and a scale that kernels cannot take."""
    if bool(((codes & 0x7F) == 0x7F).any()):
        raise InputError(f"a code is NaN (0x7f or 0xff) for {fmt}")
    if not bool((scales.abs() <= MOST_SCALE).all()):
        raise InputError(f"a scale is not finite or too large for {fmt}")


def to_e2m1(x: Tensor) -> Tensor:
    """Nearest E2M1 codes (uint8, 0 to 15), ties to the even code, saturating at 6; zero has no sign."""
    magnitude = x.abs()
    code = torch.zeros(x.shape, dtype=torch.uint8)
    for i, midpoint in enumerate(_MIDPOINTS):
        code += magnitude >= midpoint if i % 2 else magnitude > midpoint
    return torch.where((x < 0) & (code > 0), code + 8, code)


def from_e2m1(codes: Tensor) -> Tensor:
    """Float32 numbers of E2M1 codes (uint8)."""
    numbers = torch.tensor([*E2M1, *(-x for x in E2M1)])
    return numbers[codes.long()]


def from_e8m0(scales: Tensor) -> Tensor:
    """Float32 powers of two of E8M0 scales (uint8, not 255)."""
    return torch.ldexp(torch.ones(scales.shape, dtype=torch.float64), scales.int() - 127).float()


def quantise_fp8(w: Tensor) -> tuple[Tensor, Tensor]:
    """E4M3 codes uint8 [n, k] and scales float32 [ceil(n / 128), ceil(k / 128)] of float32 ``w`` [n, k]."""
    n, k = w.shape
    rows, cols = -(-n // FP8_TILE), -(-k // FP8_TILE)
    full = torch.zeros(rows * FP8_TILE, cols * FP8_TILE)
    full[:n, :k] = w
    amax = full.view(rows, FP8_TILE, cols, FP8_TILE).abs().amax((1, 3))
    scales = torch.where(amax < TINY_AMAX, 0.0, amax / MOST_E4M3)
    inverse = torch.where(scales == 0, 0.0, 1.0 / scales)
    return to_e4m3(w * spread_tiles(inverse, n, k)), scales


def quantise_mxfp4(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor]:
    """E2M1 codes uint8 [n, k] and E8M0 scales uint8 [n, ceil(k / 32)]. A group of zeros gets the scale 1."""
    amax = group_amax(w, fmt.group)
    exponent = amax.view(torch.int32) >> 23
    scales = torch.where(amax == 0, 127, (exponent - 2).clamp(min=0)).to(torch.uint8)
    inverse = from_e8m0(254 - scales)
    return to_e2m1(w * spread(inverse, fmt.group, w.shape[1])), scales


def quantise_nvfp4(w: Tensor, fmt: Format) -> tuple[Tensor, Tensor, Tensor]:
    """E2M1 codes uint8 [n, k], E4M3 scales uint8 [n, ceil(k / 16)], the matrix's scale float32 [1]."""
    amax = group_amax(w, fmt.group)
    whole = amax.max()
    matrix = torch.where(whole < TINY_AMAX, 0.0, whole / (MOST_E4M3 * MOST_E2M1))
    scales = to_e4m3(torch.where(matrix == 0, 0.0, amax / MOST_E2M1 / matrix))
    value = from_e4m3(scales) * matrix
    inverse = torch.where(value == 0, 0.0, 1.0 / value)
    return to_e2m1(w * spread(inverse, fmt.group, w.shape[1])), scales, matrix.reshape(1)


def group_amax(w: Tensor, group: int) -> Tensor:
    """Largest magnitude of each group: float32 [n, ceil(k / group)]."""
    padded = torch.nn.functional.pad(w, (0, -w.shape[1] % group))
    return padded.view(w.shape[0], -1, group).abs().amax(2)


def spread(scales: Tensor, group: int, k: int) -> Tensor:
    """One value of each group as [n, k]."""
    return scales.repeat_interleave(group, 1)[:, :k]


def spread_tiles(scales: Tensor, n: int, k: int) -> Tensor:
    """One value of each 128 x 128 as [n, k]."""
    return scales.repeat_interleave(FP8_TILE, 0).repeat_interleave(FP8_TILE, 1)[:n, :k]
