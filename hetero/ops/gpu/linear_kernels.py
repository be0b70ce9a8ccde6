"""Triton kernels of linear layers: packed as experts are (cpu_ext/kernels.h), or as torch has them.

Few rows: each program reads its weights once for all of them. TWIN: run by the interpreter, which cuts off
where a GPU rounds to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import ACT_GROUP, INT4, LOW_NIBBLES, ONES, ROWS, _dot4
from hetero.ops.gpu.grouped_kernels import _decoded


@triton.jit
def _fetch_ahead(start, BYTES: tl.constexpr):
    """Ask for BYTES, a multiple of 16, from the address ``start`` on to be brought into the L2 cache, by one
    thread of a program: so much may be on its way that no registers could hold it."""
    tl.inline_asm_elementwise(
        """{
        .reg .pred first;
        .reg .u32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 first, thread, 0;
        @first cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r", [start.to(tl.int64), BYTES], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _step_dot(word, codes, step, here, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """int32 [STEPS, 16]: the products of the words of some steps and a row's codes."""
    if FORMAT == INT4:
        low = tl.load(codes + 2 * step, here, 0)
        high = tl.load(codes + 2 * step + 1, here, 0)
        ones = tl.full(low.shape, ONES, tl.int32)
        zero = 8 * (_dot4(ones, low, ASM) + _dot4(ones, high, ASM))
        return _dot4(word & LOW_NIBBLES, low, ASM) + _dot4((word >> 4) & LOW_NIBBLES, high, ASM) - zero
    code = tl.load(codes + step, here, 0)
    return _dot4(word, code, ASM) - 128 * _dot4(tl.full(code.shape, ONES, tl.int32), code, ASM)


@triton.jit
def project_packed(
    packed, q, qs, bias, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr,
    TILES: tl.constexpr, AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of rows that ``expert_kernels.quantise_rows`` made; program (16 outputs, COUNT rows).

    TILES of STEPS of the block are on their way at once; AHEAD: all of it to the cache.
    """
    block = tl.program_id(0)
    start = packed + block.to(tl.int64) * BLOCK_BYTES
    if AHEAD and ASM:
        _fetch_ahead(start, BLOCK_BYTES)
    per_step: tl.constexpr = 8 if FORMAT == INT4 else 4
    steps: tl.constexpr = K // per_step
    first_row = tl.program_id(1) * COUNT
    lane = tl.arange(0, ROWS)[None, :]
    words = start.to(tl.pointer_type(tl.int32))
    halves = (start + SCALES_AT).to(tl.pointer_type(tl.float16))
    totals = ()
    for _ in tl.static_range(COUNT):
        totals = totals + (tl.zeros((STEPS, ROWS), tl.float32),)
    for begin in range(0, steps, STEPS * TILES):
        tiles, scales = (), ()
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            tiles = tiles + (tl.load(words + step * ROWS + lane, step < steps, 0),)
            at = halves + step * per_step // GROUP * ROWS + lane
            scales = scales + (tl.load(at, step < steps, 0.0),)
        # Loads are not put off beyond it.
        tl.debug_barrier()
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            scale = scales[tile].to(tl.float32)
            sums = ()
            for i in tl.static_range(COUNT):
                row = tl.minimum(first_row + i, rows - 1)
                dot = _step_dot(tiles[tile], q + row * (K // 4), step, step < steps, FORMAT, ASM)
                at = qs + row * (K // ACT_GROUP) + step * per_step // ACT_GROUP
                sums = sums + (totals[i] + dot.to(tl.float32) * (scale * tl.load(at, step < steps, 0.0)),)
            totals = sums
    at = block * ROWS + tl.arange(0, ROWS)
    for i in tl.static_range(COUNT):
        y = tl.sum(totals[i], 0)
        if HAS_BIAS:
            y += tl.load(bias + at, at < N, 0.0).to(tl.float32)
        here = (at < N) & (at * 0 + first_row + i < rows)
        tl.store(out + (first_row + i) * N + at, y.to(out.dtype.element_ty), here)


@triton.jit
def project_plain(
    weight, x, bias, out, rows, stride,
    K: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of values x, whose rows are ``stride`` apart, by ``weight`` [N, K]; program (OUTPUTS,
    COUNT rows). TILES of DEPTH inputs are on their way at once; with DEPTH 256 times the number of warps
    every thread has its own inputs, of all outputs."""
    first_row = tl.program_id(1) * COUNT
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = (output < N)[:, None]
    line = weight + output.to(tl.int64)[:, None] * K
    totals = ()
    for _ in tl.static_range(COUNT):
        totals = totals + (tl.zeros((OUTPUTS, DEPTH), tl.float32),)
    for begin in range(0, K, DEPTH * TILES):
        tiles = ()
        for tile in tl.static_range(TILES):
            at = (begin + tile * DEPTH + tl.arange(0, DEPTH))[None, :]
            tiles = tiles + (tl.load(line + at, known & (at < K), 0.0),)
        # Loads are not put off beyond it.
        tl.debug_barrier()
        for tile in tl.static_range(TILES):
            at = (begin + tile * DEPTH + tl.arange(0, DEPTH))[None, :]
            w = tiles[tile].to(tl.float32)
            sums = ()
            for i in tl.static_range(COUNT):
                row = tl.minimum(first_row + i, rows - 1)
                sums = sums + (totals[i] + w * tl.load(x + row * stride + at, at < K, 0.0).to(tl.float32),)
            totals = sums
    for i in tl.static_range(COUNT):
        y = tl.sum(totals[i], 1)
        if HAS_BIAS:
            y += tl.load(bias + output, output < N, 0.0).to(tl.float32)
        here = (output < N) & (output * 0 + first_row + i < rows)
        tl.store(out + (first_row + i) * N + output, y.to(out.dtype.element_ty), here)


@triton.jit
def unpacked(
    packed, first, rows, out, columns,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, BLOCKS: tl.constexpr, DEPTH: tl.constexpr, TWIN: tl.constexpr,
):  # fmt: skip
    """out bf16 [rows, columns]: the weights of ``rows`` outputs from block ``first`` on; program (BLOCKS,
    DEPTH)."""
    chunk, depth = tl.program_id(0) * BLOCKS, tl.program_id(1) * DEPTH
    blocks = (N + ROWS - 1) // ROWS - first - chunk
    start = packed + (first + chunk).to(tl.int64) * BLOCK_BYTES
    w = _decoded(start, blocks, depth, K, BLOCK_BYTES, GROUP, SCALES_AT, FORMAT, BLOCKS, DEPTH, TWIN)
    column = depth + tl.arange(0, DEPTH)
    row = chunk * ROWS + tl.arange(0, ROWS * BLOCKS)
    target = out + row[None, :].to(tl.int64) * columns + column[:, None]
    tl.store(target, w, (row < rows)[None, :] & (column < columns)[:, None])
