"""Packing in torch: the reference that the extension's packer (cpu_ext/pack*.cpp) reproduces to the bit.

The arithmetic is float32, one operation at a time, in a fixed order. The layout is described in
cpu_ext/kernels.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import BLOCK_ROWS, FIXED_GROUPS, FP8_TILE, Format, block_bytes, padded_k
from hetero.quant import k_formats, small_floats

INT4_DIVISORS = (-8.0, -8.5, -7.2, -8.2, -7.8, -8.9, -9.4)
"""Scales tried for int4: the signed maximum divided by each; a later one needs a smaller squared error."""

_HALF_MAX = 65504.0
_ZERO = {"int8": 128, "int4": 8}
_BYTE_CODES = ("int8", "fp8")


class Codes(NamedTuple):
    """Quantised weights: codes uint8 [n, k] with the scales and extras of ``pack_codes``."""

    codes: Tensor
    scales: Tensor
    extra: Tensor | None


def quantise(fmt: Format, weight: Tensor) -> Tensor:
    """Packs ``weight`` [n, k] (floating point) into uint8 [packed_bytes].

    Raises InputError where a weight is not finite, or it, its scale or its minimum is beyond a 16-bit float,
    and for a format that only keeps the values of checkpoints.
    """
    w = weight.detach().to("cpu", torch.float32)
    if not torch.isfinite(w).all():
        raise InputError(f"a weight is not finite: it cannot be stored as {fmt}")
    if not fmt.quantised:
        return _pack_floats(fmt, w)
    return pack_codes(fmt, *quantise_codes(fmt, w))


def quantise_codes(fmt: Format, weight: Tensor) -> Codes:
    """Codes, scales and extras of ``weight`` float32 [n, k], all finite, in a quantised format."""
    if fmt.kept_only:
        raise InputError(f"weights cannot be turned into {fmt}: it only keeps the values of checkpoints")
    if fmt.name == "fp8":
        return Codes(*small_floats.quantise_fp8(weight), None)
    if fmt.name == "mxfp4":
        return Codes(*small_floats.quantise_mxfp4(weight, fmt), None)
    if fmt.name == "nvfp4":
        return Codes(*small_floats.quantise_nvfp4(weight, fmt))
    k = weight.shape[1]
    pieces: list[Codes] = []
    for start in range(0, k, fmt.group):
        part = weight[:, start : start + fmt.group]
        pieces.append(_affine(part) if fmt.name == "int4a" else _symmetric(fmt, part))
    codes = torch.cat([p.codes for p in pieces], 1)
    scales = torch.stack([p.scales for p in pieces], 1)
    if fmt.name != "int4a":
        return Codes(codes, scales, None)
    return Codes(codes, scales, torch.stack([p.extra for p in pieces if p.extra is not None], 1))


def code_shapes(fmt: Format, n: int, k: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of the scales and of the extra (None: there is none) of a quantised matrix [n, k]."""
    if fmt.kept_only:
        return k_formats.shapes(fmt, n, k)
    groups = -(-k // fmt.group)
    if fmt.name == "fp8":
        return (-(-n // FP8_TILE), groups), None
    return (n, groups), (n, groups) if fmt.name == "int4a" else (1,) if fmt.name == "nvfp4" else None


def code_types(fmt: Format) -> tuple[torch.dtype, torch.dtype]:
    """Types of the scales and of the extra (of formats that have one), as they are stored."""
    if fmt.kept_only:
        return k_formats.dtypes(fmt)
    return _SCALE_TYPES.get(fmt.name, torch.float16), _EXTRA_TYPES.get(fmt.name, torch.float16)


def check_codes(
    fmt: Format, codes: Tensor, scales: Tensor, extra: Tensor | None, *, values: bool = True
) -> Codes:
    """The arguments of ``pack_codes`` as they are stored: E8M0 and E4M3 as uint8, a scalar extra as [1], all
    on the CPU and contiguous. Raises InputError where types, shapes or, with ``values``, codes or scales do
    not fit the format."""
    if not fmt.quantised:
        raise InputError(f"{fmt} has no codes")
    n, k = codes.shape
    scale_shape, extra_shape = code_shapes(fmt, n, k)
    if (extra is None) != (extra_shape is None):
        what = k_formats.extra_name(fmt) if fmt.kept_only else "minima"
        what = "a scale of the matrix" if fmt.name == "nvfp4" else what
        raise InputError(f"{fmt} {'needs' if extra is None else 'has no'} {what} beside its scales")
    if fmt.name == "nvfp4" and extra is not None and extra.numel() == 1:
        extra = extra.reshape(1)
    found = None if extra is None else tuple(extra.shape)
    if tuple(scales.shape) != scale_shape or found != extra_shape:
        beside = "" if extra_shape is None else f", the extra {list(extra_shape)}"
        raise InputError(
            f"scales of {fmt} for codes {[n, k]} must have the shape {list(scale_shape)}{beside}"
        )
    parts = [codes, scales] + ([] if extra is None else [extra])
    raw = [_as_bytes(part) for part in parts]
    wanted = [torch.uint8, *code_types(fmt)]
    if any(part.dtype != dtype for part, dtype in zip(raw, wanted, strict=False)):
        takes = f"codes of {wanted[0]} and scales of {wanted[1]}" + (f", {wanted[2]}" if extra_shape else "")
        raise InputError(f"{fmt} takes {takes}, not {[str(p.dtype) for p in parts]}")
    if values:
        _check_values(fmt, raw[0], raw[1], raw[2] if extra is not None else None)
    return Codes(raw[0], raw[1], raw[2] if extra is not None else None)


_SCALE_TYPES = {"fp8": torch.float32, "mxfp4": torch.uint8, "nvfp4": torch.uint8}
_EXTRA_TYPES = {"nvfp4": torch.float32}


def _as_bytes(part: Tensor) -> Tensor:
    part = part.detach().cpu().contiguous()
    eight_bits = part.dtype in (torch.float8_e4m3fn, torch.float8_e8m0fnu)
    return part.view(torch.uint8) if eight_bits else part


def _check_values(fmt: Format, codes: Tensor, scales: Tensor, extra: Tensor | None) -> None:
    def refuse(bad: Tensor, what: str) -> None:
        if bool(bad.any()):
            raise InputError(f"{what} for {fmt}")

    for part in (scales, extra):
        if part is not None and part.dtype == torch.float16:
            refuse(~torch.isfinite(part), "a scale or minimum is not finite")
    if fmt.kept_only:
        k_formats.check_values(fmt, codes, scales, extra)
    elif fmt.name == "fp8":
        small_floats.check_e4m3(fmt, codes, scales)
    elif fmt.name != "int8":
        refuse(codes > 15, "a code is above 15")
    if fmt.name == "mxfp4":
        refuse(scales == 255, "a scale is NaN (E8M0 255)")
    if fmt.name == "nvfp4" and extra is not None:
        refuse((scales & 0x7F) == 0x7F, "a scale is NaN (0x7f or 0xff)")
        beyond = ~(extra.abs() <= small_floats.MOST_SCALE)
        refuse(beyond, "the scale of the matrix is not finite or too large")


def pack_codes(fmt: Format, codes: Tensor, scales: Tensor, extra: Tensor | None = None) -> Tensor:
    """Packs values that are quantised already, changing none of them, into uint8 [packed_bytes].

    ``codes`` uint8 [n, k] (fp8 also as float8_e4m3fn) with
      int8          code = value + 128; scales float16 [n, ceil(k / group)]
      int4, int4a   0 to 15 (int4: value + 8); the same scales; int4a: ``extra`` float16 minima alike
      fp8           E4M3, no NaN; scales float32 [ceil(n / 128), ceil(k / 128)]
      mxfp4         E2M1, 0 to 15; scales E8M0 [n, ceil(k / 32)] as uint8 or float8_e8m0fnu
      nvfp4         E2M1; scales E4M3 [n, ceil(k / 16)] as uint8 or float8_e4m3fn; ``extra`` one float32
      others        see ``hetero.quant.k_formats``
    Raises InputError where types, shapes or codes do not fit the format.
    """
    codes, scales, extra = check_codes(fmt, codes, scales, extra)
    n, k = codes.shape
    k_pad = padded_k(fmt, k)
    n_pad = -(-n // BLOCK_ROWS) * BLOCK_ROWS
    count = n_pad // BLOCK_ROWS
    zero = k_formats.zero_code(fmt) if fmt.kept_only else _ZERO.get(fmt.name, 0)
    full = torch.full((n_pad, k_pad), zero, dtype=torch.uint8)
    full[:n, :k] = k_formats.stored_codes(fmt, codes)
    blocks = full.view(count, BLOCK_ROWS, k_pad)
    if fmt.kept_only:
        side = k_formats.side_bytes(fmt, scales, extra, k_pad)
        return _closed(fmt, k, torch.cat([k_formats.steps_of(fmt, blocks), side], 1))
    if fmt.name in _BYTE_CODES:
        steps = blocks.view(*blocks.shape[:2], k_pad // 4, 4)
    else:
        pairs = blocks.view(*blocks.shape[:2], k_pad // 8, 2, 4)
        steps = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    parts = [steps.transpose(1, 2).flatten(1)]
    if fmt.name == "fp8":
        of_block = torch.arange(count) * BLOCK_ROWS // FP8_TILE
        parts.append(scales[of_block].contiguous().view(torch.uint8))
    else:
        parts.append(_scale_bytes(fmt, scales, n_pad, k_pad // fmt.group))
    if fmt.name == "int4a" and extra is not None:
        parts.append(_scale_bytes(fmt, extra, n_pad, k_pad // fmt.group))
    elif extra is not None:
        parts.append(extra.view(torch.uint8).expand(count, 4))
    return _closed(fmt, k, torch.cat(parts, 1))


def dequantise(fmt: Format, packed: Tensor, n: int, k: int) -> Tensor:
    """The float32 [n, k] that ``packed`` (uint8, as ``quantise`` returns) stands for."""
    k_pad = padded_k(fmt, k)
    blocks = packed.view(-1, block_bytes(fmt, k))
    count = blocks.shape[0]
    if not fmt.quantised:
        dtype = torch.float32 if fmt.name == "f32" else torch.bfloat16
        per_step = 4 // dtype.itemsize
        values = blocks[:, : k_pad * BLOCK_ROWS * dtype.itemsize].contiguous().view(dtype)
        steps = values.view(count, k_pad // per_step, BLOCK_ROWS, per_step).transpose(1, 2)
        return steps.reshape(count * BLOCK_ROWS, k_pad)[:n, :k].float().contiguous()
    if fmt.kept_only:
        size = k_pad * fmt.code_bits * BLOCK_ROWS // 8
        codes = k_formats.codes_of(fmt, blocks[:, :size], k_pad)
        return k_formats.values(fmt, blocks, codes, size)[:n, :k].contiguous()
    per_step = 4 if fmt.name in _BYTE_CODES else 8
    size = k_pad // per_step * 64
    steps = blocks[:, :size].reshape(count, k_pad // per_step, BLOCK_ROWS, 4).transpose(1, 2)
    if per_step == 8:
        steps = torch.stack([steps & 15, steps >> 4], 3)
    codes = steps.reshape(count * BLOCK_ROWS, k_pad)
    groups = k_pad // fmt.group
    if fmt.name in FIXED_GROUPS:
        return _small_floats(fmt, blocks, codes, size)[:n, :k].contiguous()
    scales = _read_scales(blocks, size, groups)
    value = (codes.int() - _ZERO.get(fmt.name, 0)).float() * scales.repeat_interleave(fmt.group, 1)
    if fmt.name == "int4a":
        value = value + _read_scales(blocks, size + 32 * groups, groups).repeat_interleave(fmt.group, 1)
    return value[:n, :k].contiguous()


def _pack_floats(fmt: Format, w: Tensor) -> Tensor:
    n, k = w.shape
    k_pad, n_pad = padded_k(fmt, k), -(-n // BLOCK_ROWS) * BLOCK_ROWS
    full = torch.zeros(n_pad, k_pad, dtype=torch.float32 if fmt.name == "f32" else torch.bfloat16)
    full[:n, :k] = w
    if not torch.isfinite(full).all():
        raise InputError(f"a weight is too large for {fmt}")
    per_step = 4 // full.dtype.itemsize
    steps = full.view(n_pad // BLOCK_ROWS, BLOCK_ROWS, k_pad // per_step, per_step).transpose(1, 2)
    return _closed(fmt, k, steps.flatten(1).contiguous().view(torch.uint8))


def _closed(fmt: Format, k: int, blocks: Tensor) -> Tensor:
    """Blocks filled up with zeros to their full size, as one row of bytes."""
    full = torch.zeros(blocks.shape[0], block_bytes(fmt, k), dtype=torch.uint8)
    full[:, : blocks.shape[1]] = blocks
    return full.flatten()


def _small_floats(fmt: Format, blocks: Tensor, codes: Tensor, size: int) -> Tensor:
    """Float32 [n_pad, k_pad] of codes whose scales start at byte ``size`` of each block."""
    groups = codes.shape[1] // fmt.group
    if fmt.name == "fp8":
        scales = blocks[:, size : size + 4 * groups].contiguous().view(torch.float32)
        by_row = scales.repeat_interleave(BLOCK_ROWS, 0).repeat_interleave(fmt.group, 1)
        return small_floats.from_e4m3(codes) * by_row
    end = size + BLOCK_ROWS * groups
    raw = blocks[:, size:end].reshape(-1, groups, BLOCK_ROWS).transpose(1, 2).reshape(-1, groups)
    if fmt.name == "mxfp4":
        scale = small_floats.from_e8m0(raw)
    else:
        matrix = blocks[:, end : end + 4].contiguous().view(torch.float32)
        scale = small_floats.from_e4m3(raw) * matrix.repeat_interleave(BLOCK_ROWS, 0)
    return small_floats.from_e2m1(codes) * scale.repeat_interleave(fmt.group, 1)


def _scale_bytes(fmt: Format, scales: Tensor, n_pad: int, groups: int) -> Tensor:
    """Scales [n, ceil(k / group)] as bytes [blocks, ...] in the order of the blocks; those of padding are 0,
    of mxfp4 1."""
    full = torch.full((n_pad, groups), 127 if fmt.name == "mxfp4" else 0, dtype=scales.dtype)
    full[: scales.shape[0], : scales.shape[1]] = scales
    by_block = full.view(-1, BLOCK_ROWS, groups).transpose(1, 2)
    return by_block.flatten(1).contiguous().view(torch.uint8)


def _read_scales(blocks: Tensor, start: int, groups: int) -> Tensor:
    """Float32 [n_pad, groups] from the scales or minima that start at byte ``start`` of each block."""
    half = blocks[:, start : start + 32 * groups].contiguous().view(torch.float16)
    return half.view(-1, groups, BLOCK_ROWS).transpose(1, 2).reshape(-1, groups).float()


def _inverse(value: Tensor) -> Tensor:
    return torch.where(value == 0, value, 1.0 / value)


def _check_range(value: Tensor, what: str) -> None:
    if value.numel() and not bool((value.abs() <= _HALF_MAX).all()):
        raise InputError(
            f"{what} of {float(value.abs().max()):.4g} exceeds what an fp16 number holds (65504)"
        )


def _affine(part: Tensor) -> Codes:
    low, high = part.amin(1), part.amax(1)
    scale = (high - low) / 15.0
    _check_range(low, "a minimum")
    _check_range(scale, "a scale")
    half, minimum = scale.half(), (low + 0.0).half()  # no negative zero: which of two zeros is least is open
    scaled = (part - minimum.float()[:, None]) * _inverse(half.float())[:, None]
    return Codes(torch.round(scaled.clamp(0.0, 15.0)).to(torch.uint8), half, minimum)


def _symmetric(fmt: Format, part: Tensor) -> Codes:
    most = part.gather(1, part.abs().argmax(1, keepdim=True))[:, 0]
    if fmt.name == "int8":
        scale = most.abs() / 127.0
        _check_range(scale, "a scale")
        half = scale.half()
        code = torch.round((part * _inverse(half.float())[:, None]).clamp(-127.0, 127.0))
        return Codes((code + 128.0).to(torch.uint8), half, None)
    best = (most / INT4_DIVISORS[0] + 0.0).half()
    _check_range(most / INT4_DIVISORS[0], "a scale")
    best_error = _squared_error(part, best.float())
    for divisor in INT4_DIVISORS[1:]:
        scale = most / divisor + 0.0
        half = scale.half()
        error = _squared_error(part, half.float())
        better = (error < best_error) & (scale.abs() <= _HALF_MAX)
        best, best_error = torch.where(better, half, best), torch.where(better, error, best_error)
    code = torch.round((part * _inverse(best.float())[:, None]).clamp(-8.0, 7.0))
    return Codes((code + 8.0).to(torch.uint8), best, None)


def _squared_error(part: Tensor, scale: Tensor) -> Tensor:
    """Squared error of each row under its scale, summed in ascending k as the extension does."""
    code = torch.round((part * _inverse(scale)[:, None]).clamp(-8.0, 7.0))
    difference = part - code * scale[:, None]
    squares = difference * difference
    total = torch.zeros_like(scale)
    for i in range(part.shape[1]):
        total = total + squares[:, i]
    return total
