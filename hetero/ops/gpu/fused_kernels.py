"""Triton kernels that make the rows of a projection out of what the step before it left: one kernel each.

A row is written as ``expert_kernels.quantise_rows`` does (QUANTISED), or as values. Arithmetic is float32;
a value that is kept is rounded to its dtype before it is quantised, so that its rows are those that
``plain_rows`` makes of it. Strides are in elements, of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import ACT_GROUP, _act, coded
from hetero.ops.gpu.overlap_kernels import await_last, let_next


@triton.jit
def _store_codes(value, q, scales, row, group, K_PAD: tl.constexpr):
    """Rows of groups [GROUPS, 32] that begin at number ``group`` [GROUPS]."""
    code, scale = coded(value)
    here = group < K_PAD // ACT_GROUP
    at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
    tl.store(q + row * K_PAD + at, code, mask=here[:, None])
    tl.store(scales + row * (K_PAD // ACT_GROUP) + group, scale, mask=here)


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def summed(
    x, at, here, row, add, add_stride, shared, shared_stride, gate, gate_stride,
    HAS_ADD: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """x plus what a block gave: ``add`` and ``shared`` [T, k], the latter times the sigmoid of ``gate``
    [T]."""
    if HAS_ADD:
        x += tl.load(add + row * add_stride + at, here, 0.0).to(tl.float32)
    if HAS_SHARED:
        y = tl.load(shared + row * shared_stride + at, here, 0.0).to(tl.float32)
        if HAS_GATE:
            y = y * _sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        x += y
    return x


@triton.jit
def norm_rows(
    x, add, shared, gate, weight, residual, normed, q, scales, eps, offset,
    x_stride, add_stride, shared_stride, gate_stride,
    K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr, HAS_ADD: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (row). ``residual`` and ``normed`` [T, K], contiguous; GROUPS of 32 as a power of two."""
    let_next(PDL)
    row = tl.program_id(0)
    group = tl.arange(0, GROUPS)
    at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
    here = at < K
    scale = offset + tl.load(weight + at, here, 0.0).to(tl.float32)
    await_last(PDL)
    value = tl.load(x + row * x_stride + at, here, 0.0).to(tl.float32)
    if HAS_ADD or HAS_SHARED:
        value = summed(
            value, at, here, row, add, add_stride, shared, shared_stride, gate, gate_stride,
            HAS_ADD, HAS_SHARED, HAS_GATE,
        )  # fmt: skip
        kept = value.to(residual.dtype.element_ty)
        tl.store(residual + row * K + at, kept, here)
        value = kept.to(tl.float32)
    size = tl.sum(tl.sum(value * value, 1), 0) / K
    value = (value * tl.rsqrt(size + eps) * scale).to(normed.dtype.element_ty)
    tl.store(normed + row * K + at, value, here)
    if QUANTISED:
        _store_codes(tl.where(here, value.to(tl.float32), 0.0), q, scales, row, group, K_PAD)


@triton.jit
def swiglu_rows(
    gate_up, values, q, scales, stride,
    K: tl.constexpr, K_PAD: tl.constexpr, GROUPS: tl.constexpr, KIND: tl.constexpr, QUANTISED: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (row, GROUPS groups). ``gate_up`` [T, 2 * K]: gates, then what they act on."""
    let_next(PDL)
    await_last(PDL)
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
    here = at < K
    gate = tl.load(gate_up + row * stride + at, here, 0.0).to(tl.float32)
    value = _act(gate, 1.0, KIND) * tl.load(gate_up + row * stride + K + at, here, 0.0).to(tl.float32)
    if QUANTISED:
        _store_codes(value, q, scales, row, group, K_PAD)
    else:
        tl.store(values + row * K + at, value.to(values.dtype.element_ty), here)


@triton.jit
def gated_rows(
    y, gate, weight, values, q, scales, eps, y_stride, gate_stride, head_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, WIDTH: tl.constexpr, K_PAD: tl.constexpr, NORM: tl.constexpr,
    SILU: tl.constexpr, QUANTISED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (head, or the row's padding after them; row): ``y`` [T, HEADS, DIM], normed over DIM where
    NORM, times the sigmoid of ``gate`` [T, HEADS, DIM] (SILU: its silu). QUANTISED: DIM is a multiple of
    32."""
    let_next(PDL)
    await_last(PDL)
    head, row = tl.program_id(0), tl.program_id(1)
    group = tl.arange(0, WIDTH // ACT_GROUP)
    at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
    here = (at < DIM) & (head * DIM + at < HEADS * DIM)
    value = tl.load(y + row * y_stride + head * DIM + at, here, 0.0).to(tl.float32)
    if NORM:
        scale = tl.load(weight + at, here, 0.0).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(tl.sum(value * value, 1), 0) / DIM + eps) * scale
    open = tl.load(gate + row * gate_stride + head * head_stride + at, here, 0.0).to(tl.float32)
    if SILU:
        value = value * open
    value = value * _sigmoid(open)
    if QUANTISED:
        code, scale = coded(value)
        mine = (group < DIM // ACT_GROUP) & (head * DIM + group * ACT_GROUP < K_PAD)
        tl.store(q + row * K_PAD + head * DIM + at, code, mine[:, None])
        tl.store(scales + row * (K_PAD // ACT_GROUP) + head * (DIM // ACT_GROUP) + group, scale, mine)
    else:
        tl.store(values + (row * HEADS + head) * DIM + at, value.to(values.dtype.element_ty), here)
