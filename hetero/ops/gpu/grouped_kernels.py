"""Triton kernels of routed experts for many rows: pairs sorted by expert, decoded weights on tensor cores.

Each expert's packed blocks (cpu_ext/kernels.h) are decoded to bf16 once for a tile of rows. As in the
extension's class for many rows, activations are bf16 and sums float32. Sizes as in ``expert_kernels``; TWIN:
run by the interpreter, which can neither multiply bf16 nor round to it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import BF16, INT4, INT8, ROWS, _act, _at, combined
from hetero.ops.gpu.scale_kernels import decoded

# Numbers that differ from launch to launch: a kernel is not compiled anew for those that divide by 16.
_RUNNING = ("from_", "to", "tile_from")


@triton.jit
def _product(a, b, total, TWIN: tl.constexpr):
    """Adds a product of bf16 matrices."""
    if TWIN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    return tl.dot(a, b, total)


@triton.jit
def _to_bf16(value, TWIN: tl.constexpr):
    """Rounds to nearest, ties to even."""
    if TWIN:
        bits = value.to(tl.int32, bitcast=True)
        value = ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)
    return value.to(tl.bfloat16)


@triton.jit
def _decoded(
    block, blocks, first,
    K: tl.constexpr, STRIDE: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr,
    BLOCKS: tl.constexpr, DEPTH: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """bf16 [DEPTH, 16 * BLOCKS]: inputs from ``first`` on of BLOCKS blocks, which are STRIDE bytes apart;
    those from number ``blocks`` on are zeros."""
    k = (first + tl.arange(0, DEPTH))[:, None]
    column = tl.arange(0, ROWS * BLOCKS)[None, :]
    start = column // ROWS * STRIDE
    row = column % ROWS
    here = (k < K) & (column // ROWS < blocks)
    if FORMAT == BF16:
        at = (block + start + k // 2 * 64 + row * 4 + k % 2 * 2).to(tl.pointer_type(tl.bfloat16))
        value = tl.load(at, here, 0.0)
    elif FORMAT != INT8 and FORMAT != INT4:  # noqa: PLR1714
        value = _to_bf16(decoded(block + start, k, row, here, K, GROUP, SCALES_AT, FORMAT), TWIN)
    else:
        if FORMAT == INT4:
            byte = tl.load(block + start + k // 8 * 64 + row * 4 + k % 4, here, 0).to(tl.int32) & 255
            code = ((byte >> (k % 8 // 4 * 4)) & 15) - 8
        else:
            code = tl.load(block + start + k // 4 * 64 + row * 4 + k % 4, here, 0).to(tl.int32) & 255
            code -= 128
        half = (block + start + SCALES_AT + (k // GROUP * ROWS + row) * 2).to(tl.pointer_type(tl.float16))
        value = _to_bf16(code.to(tl.float32) * tl.load(half, here, 0.0).to(tl.float32), TWIN)
    return value


@triton.jit(do_not_specialize=_RUNNING)
def gate_up_rows(
    base, x, order, tiles, addresses, h, slots, from_, tile_from, alpha, gate_max, up_limit, act_max,
    up_offset,
    INPUTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr, BIAS_AT: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr,
    HAS_GATE: tl.constexpr, HAS_BIAS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr,
    DEPTH: tl.constexpr, TWIN: tl.constexpr, ORDER_AT: tl.constexpr,
):  # fmt: skip
    """h bf16 [rows, N], in the sorted order from row ``from_`` on; program (BLOCKS blocks of outputs, tile of
    rows, ``tile_from`` being the first).

    ``x`` bf16 [T, INPUTS]; ``order`` int32 [pairs]: pairs by expert; ``tiles`` int32 [tiles, 2]: first and
    last + 1 of the sorted rows of a tile, all of one expert, equal where the tile is empty; ``addresses``
    int64 [tiles]. ORDER_AT: where an expert has the order of its inputs, if not 0.
    """
    chunk, tile = tl.program_id(0), tl.program_id(1) + tile_from
    begin, end = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    expert = tl.load(addresses + tile)
    if begin < end and expert != 0:
        place = begin + tl.arange(0, TILE)
        live = place < end
        token = tl.load(order + place, live, 0) // slots
        stride: tl.constexpr = 2 * BLOCK_BYTES if HAS_GATE else BLOCK_BYTES
        block = _at(base, expert + (chunk * BLOCKS).to(tl.int64) * stride)
        blocks = (N + ROWS - 1) // ROWS - chunk * BLOCKS
        one = tl.zeros((TILE, ROWS * BLOCKS), tl.float32)
        up = tl.zeros((TILE, ROWS * BLOCKS), tl.float32)
        for first in range(0, K, DEPTH):
            at = first + tl.arange(0, DEPTH)
            here = live[:, None] & (at < INPUTS)[None, :]
            if ORDER_AT != 0:
                order = _at(base, expert).to(tl.pointer_type(tl.int32)) + ORDER_AT // 4
                at = tl.load(order + at, at < INPUTS, 0)
            rows = tl.load(x + token[:, None].to(tl.int64) * INPUTS + at[None, :], here, 0.0)
            w = _decoded(block, blocks, first, K, stride, GROUP, SCALES_AT, FORMAT, BLOCKS, DEPTH, TWIN)
            one = _product(rows, w, one, TWIN)
            if HAS_GATE:
                second = block + BLOCK_BYTES
                w = _decoded(second, blocks, first, K, stride, GROUP, SCALES_AT, FORMAT, BLOCKS, DEPTH, TWIN)
                up = _product(rows, w, up, TWIN)
        out = chunk * BLOCKS * ROWS + tl.arange(0, ROWS * BLOCKS)
        wide = out < N
        bias = _at(base, expert).to(tl.pointer_type(tl.float32)) + BIAS_AT // 4
        if HAS_BIAS:
            one += tl.load(bias + out, wide, 0.0)[None, :]
        if HAS_GATE:
            if HAS_BIAS:
                up += tl.load(bias + N + out, wide, 0.0)[None, :]
            value = combined(one, up, alpha, gate_max, up_limit, act_max, up_offset, KIND)
        else:
            value = _act(one, alpha, KIND)
        target = h + (place - from_)[:, None].to(tl.int64) * N + out[None, :]
        tl.store(target, _to_bf16(value, TWIN), live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=_RUNNING)
def down_rows(
    base, h, order, tiles, addresses, weights, y, from_, tile_from,
    INPUTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr, BEGIN: tl.constexpr, BIAS_AT: tl.constexpr, FORMAT: tl.constexpr,
    HAS_BIAS: tl.constexpr, TILE: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """y float32 [rows, N], in the sorted order from row ``from_`` on: each pair's weighted output; programs
    as those of ``gate_up_rows``."""
    chunk, tile = tl.program_id(0), tl.program_id(1) + tile_from
    begin, end = tl.load(tiles + 2 * tile), tl.load(tiles + 2 * tile + 1)
    expert = tl.load(addresses + tile)
    if begin < end and expert != 0:
        place = begin + tl.arange(0, TILE)
        live = place < end
        pair = tl.load(order + place, live, 0)
        block = _at(base, expert + BEGIN + (chunk * BLOCKS).to(tl.int64) * BLOCK_BYTES)
        blocks = (N + ROWS - 1) // ROWS - chunk * BLOCKS
        total = tl.zeros((TILE, ROWS * BLOCKS), tl.float32)
        for first in range(0, K, DEPTH):
            at = first + tl.arange(0, DEPTH)
            here = live[:, None] & (at < INPUTS)[None, :]
            rows = tl.load(h + (place - from_)[:, None].to(tl.int64) * INPUTS + at[None, :], here, 0.0)
            w = _decoded(block, blocks, first, K, BLOCK_BYTES, GROUP, SCALES_AT, FORMAT, BLOCKS, DEPTH, TWIN)
            total = _product(rows, w, total, TWIN)
        out = chunk * BLOCKS * ROWS + tl.arange(0, ROWS * BLOCKS)
        wide = out < N
        if HAS_BIAS:
            bias = _at(base, expert).to(tl.pointer_type(tl.float32)) + BIAS_AT // 4
            total += tl.load(bias + out, wide, 0.0)[None, :]
        total *= tl.load(weights + pair, live, 0.0)[:, None]
        target = y + (place - from_)[:, None].to(tl.int64) * N + out[None, :]
        tl.store(target, total, live[:, None] & wide[None, :])


@triton.jit(do_not_specialize=_RUNNING)
def combine(y, places, out, slots, from_, to, N: tl.constexpr, WIDTH: tl.constexpr, FIRST: tl.constexpr):
    """out float32 [T, N]: the sum of what stands in y [to - from_, N] of each token's pairs, in the order of
    slots, added to what out has unless FIRST; program (token, WIDTH columns). ``places`` int32 [T, slots]:
    the sorted row of each pair."""
    token = tl.program_id(0)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    here = column < N
    target = out + token.to(tl.int64) * N + column
    total = tl.zeros((WIDTH,), tl.float32)
    if not FIRST:
        total = tl.load(target, here, 0.0)
    for slot in range(slots):
        place = tl.load(places + token * slots + slot)
        if (place >= from_) & (place < to):
            row = y + (place - from_).to(tl.int64) * N
            total += tl.load(row + column, here, 0.0)
    tl.store(target, total, here)
