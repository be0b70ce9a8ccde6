"""Triton kernels of hyper-connections: several residual streams that a block reads as a mix and writes back
to.

As ``Qwen4ExpTextGatedResidual`` of transformers has them, for a decode step: ``norm_streams``, ``project``
and ``mix`` make a block's input, and ``norm_streams`` of the next block adds this one's output first.
Arithmetic is float32.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def block_output(
    block_out, shared, gate, gate_stride, row, at, here,
    HIDDEN: tl.constexpr, HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """float32: a row of ``block_out`` [T, HIDDEN], plus where HAS_SHARED one of ``shared``, which where
    HAS_GATE counts the sigmoid of ``gate`` [T], ``gate_stride`` apart."""
    y = tl.load(block_out + row * HIDDEN + at, here, 0.0).to(tl.float32)
    if HAS_SHARED:
        more = tl.load(shared + row * HIDDEN + at, here, 0.0).to(tl.float32)
        if HAS_GATE:
            more *= tl.sigmoid(tl.load(gate + row * gate_stride).to(tl.float32))
        y += more
    return y


@triton.jit
def norm_streams(
    streams, block_out, shared, gate, gate_stride, inject, norm_weight, normed, eps,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, HAS_OUT: tl.constexpr,
    HAS_SHARED: tl.constexpr, HAS_GATE: tl.constexpr,
):  # fmt: skip
    """Program (stream, row). ``streams`` [T, COUNT, HIDDEN]: changed in place where HAS_OUT, by the last
    block's output (``block_output``) times ``inject`` float32 [T, COUNT]. ``normed`` float32 like them: each
    stream by its own root mean square, times 1 + ``norm_weight`` [COUNT * HIDDEN]."""
    stream, row = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    here = at < HIDDEN
    place = (row * COUNT + stream) * HIDDEN + at
    x = tl.load(streams + place, here, 0.0).to(tl.float32)
    if HAS_OUT:
        y = block_output(block_out, shared, gate, gate_stride, row, at, here, HIDDEN, HAS_SHARED, HAS_GATE)
        x += y * tl.load(inject + row * COUNT + stream)
        tl.store(streams + place, x.to(streams.dtype.element_ty), here)
    weight = 1.0 + tl.load(norm_weight + stream * HIDDEN + at, here, 0.0).to(tl.float32)
    tl.store(normed + place, x * tl.rsqrt(tl.sum(x * x) / HIDDEN + eps) * weight, here)


@triton.jit
def project(
    normed, weight, low, inject,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (ROWS outputs, row): of ``weight`` [RANK + COUNT, COUNT * HIDDEN], the down projection and
    below it the injection's: ``low`` float32 [T, RANK], after silu, and ``inject`` float32 [T, COUNT], twice
    the sigmoid."""
    row = tl.program_id(1)
    out = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    width: tl.constexpr = COUNT * HIDDEN
    total = tl.zeros((ROWS, DEPTH), tl.float32)
    for first in range(0, width, DEPTH):
        at = first + tl.arange(0, DEPTH)
        here = (out < RANK + COUNT)[:, None] & (at < width)[None, :]
        w = tl.load(weight + out[:, None] * width + at[None, :], here, 0.0).to(tl.float32)
        total += w * tl.load(normed + row * width + at, at < width, 0.0)[None, :]
    y = tl.sum(total, 1) / COUNT
    tl.store(low + row * RANK + out, y * tl.sigmoid(y), out < RANK)
    tl.store(inject + row * COUNT + out - RANK, 2.0 * tl.sigmoid(y), (out >= RANK) & (out < RANK + COUNT))


@triton.jit
def mix(
    normed, low, weight, out,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, RANK: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Program (ROWS outputs, row): out [T, HIDDEN], the streams' mean, each weighed by the sigmoid of the up
    projection ``weight`` [COUNT * HIDDEN, RANK]."""
    row = tl.program_id(1)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    here = at < HIDDEN
    y = tl.zeros((ROWS,), tl.float32)
    for stream in tl.static_range(COUNT):
        total = tl.zeros((ROWS, DEPTH), tl.float32)
        line = stream * HIDDEN + at
        for first in range(0, RANK, DEPTH):
            k = first + tl.arange(0, DEPTH)
            known = here[:, None] & (k < RANK)[None, :]
            w = tl.load(weight + line[:, None] * RANK + k[None, :], known, 0.0).to(tl.float32)
            total += w * tl.load(low + row * RANK + k, k < RANK, 0.0)[None, :]
        value = tl.load(normed + row * (COUNT * HIDDEN) + line, here, 0.0)
        y += tl.sigmoid(tl.sum(total, 1)) * value
    tl.store(out + row * HIDDEN + at, (y / COUNT).to(out.dtype.element_ty), here)
