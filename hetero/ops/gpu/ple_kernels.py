"""Triton kernel of a decode step of n-gram embeddings that are added to residual streams, as
``Qwen4ExpTextPLELayer`` of transformers does it, behind its projections."""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.mix_kernels import block_output


@triton.jit
def _normed(x, weight, at, here, eps, HIDDEN: tl.constexpr, NORM_OFFSET: tl.constexpr):
    scale = NORM_OFFSET + tl.load(weight + at, here, 0.0).to(tl.float32)
    return x * tl.rsqrt(tl.sum(x * x) / HIDDEN + eps) * scale


@triton.jit
def add_ngrams(
    projected, stride, streams, block_out, shared, gate_of_shared, gate_stride, inject, key_norm, query_norm,
    conv_norm, conv, ring, tokens, recent, slots, positions, eps, scale,
    COUNT: tl.constexpr, HIDDEN: tl.constexpr, WIDTH: tl.constexpr, TAPS: tl.constexpr,
    DILATION: tl.constexpr, RECENT: tl.constexpr, HAS_OUT: tl.constexpr, HAS_SHARED: tl.constexpr,
    HAS_GATE: tl.constexpr, NORM_OFFSET: tl.constexpr,
):  # fmt: skip
    """Program (stream, row), all of it changed in place.

    ``projected`` [T, stride], of which the first (COUNT + 1) * HIDDEN count: a key for every stream, then the
    value; ``streams`` [T, COUNT, HIDDEN]: where HAS_OUT first the last block's output
    (``mix_kernels.block_output``) is added, times ``inject`` float32 [T, COUNT]; then the value, times a gate
    of key and stream, and the causal convolution of that. Norm weights [COUNT * HIDDEN], to which NORM_OFFSET
    is added; ``conv`` [TAPS, COUNT * HIDDEN]; ``ring`` [slots, (TAPS - 1) * DILATION + 1, COUNT * HIDDEN]:
    inputs of the convolution, each at its position modulo the second size; ``tokens`` int64 [T] are kept
    likewise in ``recent`` int64 [slots, RECENT]. ``scale``: of the products of key and stream.
    """
    stream, row = tl.program_id(0), tl.program_id(1)
    slot = tl.load(slots + row)
    if slot >= 0:
        position = tl.load(positions + row)
        if stream == 0:
            tl.store(recent + slot * RECENT + position % RECENT, tl.load(tokens + row))
        at = tl.arange(0, WIDTH)
        here = at < HIDDEN
        channels: tl.constexpr = COUNT * HIDDEN
        channel = stream * HIDDEN + at
        x = tl.load(streams + row * channels + channel, here, 0.0).to(tl.float32)
        if HAS_OUT:
            y = block_output(
                block_out, shared, gate_of_shared, gate_stride, row, at, here, HIDDEN, HAS_SHARED, HAS_GATE
            )
            x += y * tl.load(inject + row * COUNT + stream)
            x = x.to(streams.dtype.element_ty).to(tl.float32)
        key = tl.load(projected + row * stride + channel, here, 0.0).to(tl.float32)
        key = _normed(key, key_norm, channel, here, eps, HIDDEN, NORM_OFFSET)
        query = _normed(x, query_norm, channel, here, eps, HIDDEN, NORM_OFFSET)
        gate = tl.sum(key * query) * scale
        root = tl.sqrt(tl.maximum(tl.abs(gate), 1e-6))
        gate = tl.where(gate > 0, root, tl.where(gate < 0, -root, 0.0))
        value = tl.load(projected + row * stride + channels + at, here, 0.0).to(tl.float32)
        value = value * tl.sigmoid(gate)
        mine = _normed(value, conv_norm, channel, here, eps, HIDDEN, NORM_OFFSET).to(ring.dtype.element_ty)
        size: tl.constexpr = (TAPS - 1) * DILATION + 1
        past = ring + slot * (size * channels)
        tl.store(past + (position % size) * channels + channel, mine, here)
        last = tl.load(conv + (TAPS - 1) * channels + channel, here, 0.0).to(tl.float32)
        total = mine.to(tl.float32) * last
        for tap in tl.static_range(TAPS - 1):
            before = position - (TAPS - 1 - tap) * DILATION
            known = at < tl.where(before >= 0, HIDDEN, 0)
            # A negative number's remainder is negative, but then nothing is read.
            old = tl.load(past + (before % size) * channels + channel, known, 0.0).to(tl.float32)
            total += old * tl.load(conv + tap * channels + channel, here, 0.0).to(tl.float32)
        out = x + value + total * tl.sigmoid(total)
        tl.store(streams + row * channels + channel, out.to(streams.dtype.element_ty), here)
