"""Triton kernels of hyper-connections for many rows, around matrix products; ``mix_kernels`` has those of a
decode step."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def add_and_norm(
    streams, block_out, inject, norm_weight, normed, eps,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, HAS_OUT: tl.constexpr,
):  # fmt: skip
    """Program (row, stream). ``streams`` [T, COUNT, HIDDEN]: changed in place where HAS_OUT, by the last
    block's output ``block_out`` [T, HIDDEN] times ``inject`` float32 [T, COUNT]. ``normed`` like them: each
    stream by its own root mean square, times 1 + ``norm_weight`` [COUNT * HIDDEN]."""
    row, stream = tl.program_id(0).to(tl.int64), tl.program_id(1)
    at = tl.arange(0, WIDTH)
    here = at < HIDDEN
    place = (row * COUNT + stream) * HIDDEN + at
    x = tl.load(streams + place, here, 0.0).to(tl.float32)
    if HAS_OUT:
        y = tl.load(block_out + row * HIDDEN + at, here, 0.0).to(tl.float32)
        x += y * tl.load(inject + row * COUNT + stream)
        kept = x.to(streams.dtype.element_ty)
        tl.store(streams + place, kept, here)
        x = kept.to(tl.float32)
    weight = 1.0 + tl.load(norm_weight + stream * HIDDEN + at, here, 0.0).to(tl.float32)
    y = x * tl.rsqrt(tl.sum(x * x) / HIDDEN + eps) * weight
    tl.store(normed + place, y.to(normed.dtype.element_ty), here)


@triton.jit
def weigh(normed, up, out, COUNT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr):
    """Program (row): out [T, HIDDEN], the mean of the streams ``normed`` [T, COUNT, HIDDEN], each times the
    sigmoid of ``up``, of the same shape."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, WIDTH)
    here = at < HIDDEN
    total = tl.zeros((WIDTH,), tl.float32)
    for stream in tl.static_range(COUNT):
        place = (row * COUNT + stream) * HIDDEN + at
        weight = tl.sigmoid(tl.load(up + place, here, 0.0).to(tl.float32))
        total += weight * tl.load(normed + place, here, 0.0).to(tl.float32)
    tl.store(out + row * HIDDEN + at, (total / COUNT).to(out.dtype.element_ty), here)
