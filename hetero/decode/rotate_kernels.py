"""Triton kernel that norms and rotates queries or keys of many tokens."""

from __future__ import annotations

import triton
import triton.language as tl


# Prompts of any length are read by the same kernel: none is compiled while somebody waits for a first token.
@triton.jit(do_not_specialize=("count", "start"))
def rotate(
    x, weight, inverse_frequencies, out, count, start, stride, head_stride, eps, rope_scale,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, ROTARY: tl.constexpr, ROWS: tl.constexpr,
    HAS_NORM: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """``out`` [count, HEADS, DIM] of ``x``, whose rows and heads are so far apart, the first row of which is
    at position ``start``; program (ROWS rows, head).

    HAS_NORM: by the root mean square, times NORM_OFFSET + ``weight`` [DIM]. Then the first ROTARY dimensions
    are rotated, ``inverse_frequencies`` float32 [ROTARY / 2]. WIDTH: DIM as a power of two.
    """
    head = tl.program_id(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, WIDTH)
    half: tl.constexpr = ROTARY // 2
    partner = tl.where(at < half, at + half, tl.where(at < ROTARY, at - half, at))
    here = (row < count)[:, None] & (at < DIM)[None, :]
    line = x + row.to(tl.int64)[:, None] * stride + head * head_stride
    value = tl.load(line + at[None, :], here, 0.0).to(tl.float32)
    other = tl.load(line + partner[None, :], here, 0.0).to(tl.float32)
    if HAS_NORM:
        size = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
        scale = NORM_OFFSET + tl.load(weight + at, at < DIM, 0.0).to(tl.float32)
        other_scale = NORM_OFFSET + tl.load(weight + partner, at < DIM, 0.0).to(tl.float32)
        value = value * size * scale[None, :]
        other = other * size * other_scale[None, :]
    frequency = tl.load(inverse_frequencies + at % half, at < ROTARY, 0.0)
    angle = (start + row).to(tl.float32)[:, None] * frequency[None, :]
    sine = tl.where(at < half, -1.0, 1.0)[None, :] * tl.sin(angle) * rope_scale
    turned = value * (tl.cos(angle) * rope_scale) + other * sine
    value = tl.where((at < ROTARY)[None, :], turned, value)
    target = out + (row.to(tl.int64)[:, None] * HEADS + head) * DIM + at[None, :]
    tl.store(target, value.to(out.dtype.element_ty), here)
