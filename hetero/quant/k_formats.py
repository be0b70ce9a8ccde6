"""The formats that only keep the values of checkpoints, in torch: shapes, checks, layout and decoding.

What ``hetero.quant.pack`` does for them; the layout is described in cpu_ext/kernels.h. Shapes: G groups of k,
S of 256 k. ``scales`` and ``extra`` are

- fp8_row: float32 [n, 1]; E4M3 code * s
- int8a: float16 [n, G] each, the extra minima: code * s + m
- int4z, int8z: float16 [n, G]; extra uint8 [n, G], zeros: (code - zero) * s
- iq4_nl: float16 [n, G]: table[code] * s
- q4_k, q5_k, q2_k: uint8 [n, G, 2] (scale, minimum); extra float16 [n, S, 2] (d, dmin):
  (d * sc) * code - dmin * m
- q3_k, q6_k: int8 as uint8 [n, G]; extra float16 [n, S, 1]: (d * sc) * (code - 8), of q6_k (code - 128)
- iq4_xs: int8 as uint8 [n, G]; the other IQ types: uint8 [n, G]; extra float16 [n, S, 1]:
  (d * factor * sc) * table[code], see ``iq_tables``
"""

from __future__ import annotations

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import BLOCK_ROWS, SUPER_GROUP, Format
from hetero.quant.iq_tables import FACTORS, TABLES, UNUSED
from hetero.quant.small_floats import check_e4m3, from_e4m3

Shape = tuple[int, ...]

# Lowest and highest code, and the code of the number zero.
_RANGES = {
    "int8a": (0, 255, 0),
    "int4z": (0, 15, 0),
    "int8z": (0, 255, 0),
    "q4_k": (0, 15, 0),
    "q5_k": (0, 31, 0),
    "q2_k": (0, 3, 0),
    "q3_k": (4, 11, 8),
    "q6_k": (96, 159, 128),
    "fp8_row": (0, 254, 0),  # E4M3, of which 127 is no number either
}
_STORED_LESS = {"q3_k": 4, "q6_k": 96}  # packed codes are unsigned 3 and 6 bits
MOST_SCALE = 63
"""Largest integer scale or minimum: 6 bits, so that products with fp16 and a code are exact in float32. Those
with a sign reach down to -128, which is exact too. Of q6_k any int8 is: its codes have 5 bits and -32."""


def by_row(fmt: Format) -> bool:
    """Whether a whole row shares a float32 scale."""
    return fmt.name == "fp8_row"


def has_minimum(fmt: Format) -> bool:
    """Whether a group has an integer minimum beside its integer scale."""
    return fmt.super_scales == 2


def signed_scales(fmt: Format) -> bool:
    """Whether integer scales are int8 in the bytes of uint8."""
    return fmt.name in {"q3_k", "q6_k", "iq4_xs"}


def code_range(fmt: Format) -> tuple[int, int]:
    """Lowest and highest code of a format without a table."""
    return _RANGES[fmt.name][:2]


def zero_code(fmt: Format) -> int:
    """What padding holds, as it is stored."""
    return _RANGES[fmt.name][2] - _STORED_LESS.get(fmt.name, 0) if fmt.name in _RANGES else 0


def shapes(fmt: Format, n: int, k: int) -> tuple[Shape, Shape | None]:
    """Shapes of the scales and of the extra."""
    groups, supers = -(-k // fmt.group), -(-k // SUPER_GROUP)
    if by_row(fmt):
        return (n, 1), None
    if fmt.super_scales:
        return (n, groups, 2) if has_minimum(fmt) else (n, groups), (n, supers, fmt.super_scales)
    return (n, groups), None if fmt.name == "iq4_nl" else (n, groups)


def dtypes(fmt: Format) -> tuple[torch.dtype, torch.dtype]:
    """Types of the scales and of the extra."""
    if fmt.super_scales:
        return torch.uint8, torch.float16
    if by_row(fmt):
        return torch.float32, torch.float32
    return torch.float16, torch.uint8 if fmt.name.endswith("z") else torch.float16


def extra_name(fmt: Format) -> str:
    """The extra in words."""
    if fmt.super_scales:
        return "fp16 scales per 256"
    return "zeros" if fmt.name.endswith("z") else "minima"


def check_values(fmt: Format, codes: Tensor, scales: Tensor, extra: Tensor | None) -> None:
    """Raises InputError for codes and scales that the format does not have."""
    if by_row(fmt):
        return check_e4m3(fmt, codes, scales)
    if fmt.name in TABLES:
        known = torch.tensor([number != UNUSED for number in TABLES[fmt.name]] + [False] * 240)
        if not bool(known[codes.long()].all()):
            raise InputError(f"a code for {fmt} is not one of its table")
    else:
        low, high, _ = _RANGES[fmt.name]
        if codes.numel() and not low <= int(codes.min()) <= int(codes.max()) <= high:
            raise InputError(f"a code is above {high} or below {low} for {fmt}")
    if fmt.super_scales and fmt.name != "q6_k":
        integers = scales.view(torch.int8) if signed_scales(fmt) else scales
        if integers.numel() and int(integers.max()) > MOST_SCALE:
            raise InputError(f"an integer scale is above {MOST_SCALE} for {fmt}")
    if fmt.name == "int4z" and extra is not None and extra.numel() and int(extra.max()) > 15:
        raise InputError(f"a zero is above 15 for {fmt}")


def steps_of(fmt: Format, codes: Tensor) -> Tensor:
    """Stored codes [blocks, 16, k_pad] as the bytes of their steps, uint8 [blocks, bytes]: in planes, see
    cpu_ext/kernels.h."""
    c = codes.view(*codes.shape[:2], -1, 8, 4)  # of 32 k: steps of 4
    planes: list[Tensor] = []
    for shift, bits, each in _planes(fmt):
        plane = torch.zeros_like(c[..., ::each, :])
        for s in range(each):
            plane |= (c[..., s::each, :] >> shift & (1 << bits) - 1) << bits * s
        planes.append(plane)
    # [blocks, 16, groups, steps, 4] -> [blocks, groups, steps, 16, 4]
    return torch.cat(planes, 3).permute(0, 2, 3, 1, 4).flatten(1)


def codes_of(fmt: Format, steps: Tensor, k_pad: int) -> Tensor:
    """The stored codes [n_pad, k_pad] of ``steps_of``."""
    raw = steps.reshape(steps.shape[0], k_pad // 32, -1, BLOCK_ROWS, 4).permute(0, 3, 1, 2, 4)
    codes = torch.zeros(*raw.shape[:3], 8, 4, dtype=torch.uint8)
    at = 0
    for shift, bits, each in _planes(fmt):
        plane = raw[..., at : at + 8 // each, :]
        for s in range(each):
            codes[..., s::each, :] |= (plane >> bits * s & (1 << bits) - 1) << shift
        at += 8 // each
    return codes.reshape(-1, k_pad)


def _planes(fmt: Format) -> list[tuple[int, int, int]]:
    """Lowest bit, bits, and how many steps of 4 k share a byte: of each plane."""
    low = fmt.code_bits if fmt.code_bits in (4, 8) else 4 if fmt.code_bits > 4 else 2
    high = fmt.code_bits - low
    return [(0, low, 8 // low)] + ([(low, high, 8 // high)] if high else [])


def stored_codes(fmt: Format, codes: Tensor) -> Tensor:
    """Codes as the packed blocks hold them; of a table of six numbers bits 0, 1 and 3 side by side."""
    if fmt.name.startswith(("iq2", "iq1")):
        return codes & 3 | codes >> 1 & 4
    return codes - _STORED_LESS.get(fmt.name, 0)


def side_bytes(fmt: Format, scales: Tensor, extra: Tensor | None, k_pad: int) -> Tensor:
    """What stands behind the codes: uint8 [blocks, bytes]."""
    parts = [_by_block(scales, 1 if by_row(fmt) else k_pad // fmt.group)]
    if extra is not None:
        parts.append(_by_block(extra, -(-k_pad // SUPER_GROUP) if fmt.super_scales else k_pad // fmt.group))
    return torch.cat(parts, 1)


def values(fmt: Format, blocks: Tensor, codes: Tensor, start: int) -> Tensor:
    """Float32 [n_pad, k_pad] of stored codes whose scales begin at byte ``start`` of each block."""
    k_pad = codes.shape[1]
    scale_type, extra_type = dtypes(fmt)
    if by_row(fmt):
        scales, _ = _from_blocks(blocks, start, 1, 1, scale_type)
        return from_e4m3(codes) * scales[..., 0]
    scales, start = _from_blocks(blocks, start, k_pad // fmt.group, 2 if has_minimum(fmt) else 1, scale_type)

    def spread(of_group: Tensor, size: int = fmt.group) -> Tensor:
        return of_group.repeat_interleave(size, 1)[:, :k_pad]

    if fmt.name in TABLES:
        table = torch.tensor(TABLES[fmt.name], dtype=torch.float32)
        number = table[
            (codes & 3 | (codes & 4) << 1 if fmt.name.startswith(("iq2", "iq1")) else codes).long()
        ]
    else:
        number = (codes.int() - zero_code(fmt)).float()
    if not fmt.super_scales:
        if fmt.name == "iq4_nl":
            return number * spread(scales[..., 0])
        extra, _ = _from_blocks(blocks, start, k_pad // fmt.group, 1, extra_type)
        if fmt.name.endswith("z"):
            return (number - spread(extra[..., 0]).float()) * spread(scales[..., 0])
        return number * spread(scales[..., 0]) + spread(extra[..., 0])
    supers, _ = _from_blocks(blocks, start, -(-k_pad // SUPER_GROUP), fmt.super_scales, extra_type)
    integers = scales.view(torch.int8) if signed_scales(fmt) else scales
    of_super = supers[..., 0] * FACTORS.get(fmt.name, 1.0)
    scale = spread(of_super, SUPER_GROUP) * spread(integers[..., 0]).float()
    if not has_minimum(fmt):
        return number * scale
    return number * scale - spread(supers[..., 1], SUPER_GROUP) * spread(integers[..., 1]).float()


def _by_block(of_rows: Tensor, count: int) -> Tensor:
    """[n, c] or [n, c, p] as bytes [blocks, ...] in the order [count][p][16 rows], zero for no row."""
    of_rows = of_rows.reshape(*of_rows.shape[:2], -1)
    n = of_rows.shape[0]
    full = torch.zeros(-(-n // BLOCK_ROWS) * BLOCK_ROWS, count, of_rows.shape[2], dtype=of_rows.dtype)
    full[:n, : of_rows.shape[1]] = of_rows
    by_block = full.view(-1, BLOCK_ROWS, *full.shape[1:]).permute(0, 2, 3, 1)
    return by_block.flatten(1).contiguous().view(torch.uint8)


def _from_blocks(blocks: Tensor, start: int, count: int, each: int, dtype: torch.dtype) -> tuple[Tensor, int]:
    """What ``_by_block`` made, as [n_pad, count, each], fp16 widened to float32; and where it ends."""
    end = start + count * each * BLOCK_ROWS * dtype.itemsize
    raw = blocks[:, start:end].contiguous().view(dtype).view(-1, count, each, BLOCK_ROWS)
    by_row = raw.permute(0, 3, 1, 2).reshape(-1, count, each)
    return by_row.float() if dtype == torch.float16 else by_row, end
