"""Packing in torch: the reference that the extension's packer (cpu_ext/pack.cpp) reproduces to the bit.

The arithmetic is float32, one operation at a time, in a fixed order. The layout is described in
cpu_ext/kernels.h.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from hetero.core import InputError
from hetero.formats import BLOCK_ROWS, Format, block_bytes, padded_k

INT4_DIVISORS = (-8.0, -8.5, -7.2, -8.2, -7.8, -8.9, -9.4)
"""Scales tried for int4: the signed maximum divided by each; a later one needs a smaller squared error."""

_HALF_MAX = 65504.0
_ZERO = {"int8": 128, "int4": 8, "int4a": 0}


class Codes(NamedTuple):
    """Quantised weights: codes uint8 [n, k], scales float16 [n, ceil(k / group)], minima alike for int4a."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None


def quantise(fmt: Format, weight: Tensor) -> Tensor:
    """Packs ``weight`` [n, k] (floating point) into uint8 [packed_bytes].

    Raises InputError where a weight is not finite, or it, its scale or its minimum is beyond a 16-bit float.
    """
    w = weight.detach().to("cpu", torch.float32)
    if not torch.isfinite(w).all():
        raise InputError(f"a weight is not finite: it cannot be stored as {fmt}")
    if not fmt.quantised:
        return _pack_floats(fmt, w)
    return pack_codes(fmt, *quantise_codes(fmt, w))


def quantise_codes(fmt: Format, weight: Tensor) -> Codes:
    """Codes, scales and minima of ``weight`` float32 [n, k], all finite, in a quantised format."""
    k = weight.shape[1]
    pieces: list[Codes] = []
    for start in range(0, k, fmt.group):
        part = weight[:, start : start + fmt.group]
        pieces.append(_affine(part) if fmt.name == "int4a" else _symmetric(fmt, part))
    codes = torch.cat([p.codes for p in pieces], 1)
    scales = torch.stack([p.scales for p in pieces], 1)
    if fmt.name != "int4a":
        return Codes(codes, scales, None)
    return Codes(codes, scales, torch.stack([p.minima for p in pieces if p.minima is not None], 1))


def pack_codes(fmt: Format, codes: Tensor, scales: Tensor, minima: Tensor | None = None) -> Tensor:
    """Packs values that are quantised already, changing none of them, into uint8 [packed_bytes].

    ``codes`` uint8 [n, k]: 0 to 15 (int4: value + 8), or value + 128 (int8). ``scales``, and for int4a
    ``minima``: float16 [n, ceil(k / group)]. Raises InputError where shapes or codes do not fit the format.
    """
    n, k = codes.shape
    k_pad = padded_k(fmt, k)
    shape = (n, k_pad // fmt.group) if fmt.quantised else ()
    if not fmt.quantised or (minima is None) == (fmt.name == "int4a"):
        raise InputError(f"{fmt} has {'no codes' if not fmt.quantised else 'other minima than given'}")
    if scales.shape != shape or (minima is not None and minima.shape != shape):
        raise InputError(f"scales and minima of {fmt} for codes {(n, k)} must have the shape {shape}")
    if fmt.name != "int8" and n and k and int(codes.max()) > 15:
        raise InputError(f"a code of {fmt} is above 15")
    n_pad = -(-n // BLOCK_ROWS) * BLOCK_ROWS
    full = torch.full((n_pad, k_pad), _ZERO[fmt.name], dtype=torch.uint8)
    full[:n, :k] = codes
    blocks = full.view(n_pad // BLOCK_ROWS, BLOCK_ROWS, k_pad)
    if fmt.name == "int8":
        steps = blocks.view(*blocks.shape[:2], k_pad // 4, 4)
    else:
        pairs = blocks.view(*blocks.shape[:2], k_pad // 8, 2, 4)
        steps = pairs[:, :, :, 0] | pairs[:, :, :, 1] << 4
    parts = [steps.transpose(1, 2).flatten(1), _scale_bytes(scales, n_pad)]
    if minima is not None:
        parts.append(_scale_bytes(minima, n_pad))
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
    per_step = 4 if fmt.name == "int8" else 8
    size = k_pad // per_step * 64
    steps = blocks[:, :size].reshape(count, k_pad // per_step, BLOCK_ROWS, 4).transpose(1, 2)
    if per_step == 8:
        steps = torch.stack([steps & 15, steps >> 4], 3)
    codes = steps.reshape(count * BLOCK_ROWS, k_pad)
    groups = k_pad // fmt.group
    scales = _read_scales(blocks, size, groups)
    value = (codes.int() - _ZERO[fmt.name]).float() * scales.repeat_interleave(fmt.group, 1)
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


def _scale_bytes(scales: Tensor, n_pad: int) -> Tensor:
    """Float16 [n, groups] as bytes [blocks, groups * 32] in the order of the blocks."""
    full = torch.zeros(n_pad, scales.shape[1], dtype=torch.float16)
    full[: scales.shape[0]] = scales
    by_block = full.view(-1, BLOCK_ROWS, scales.shape[1]).transpose(1, 2)
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
