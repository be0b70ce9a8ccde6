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
def project_packed(
    packed, q, qs, bias, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr,
    AHEAD: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of rows that ``expert_kernels.quantise_rows`` made; program (16 outputs, COUNT rows)."""
    block = tl.program_id(0)
    start = packed + block.to(tl.int64) * BLOCK_BYTES
    if AHEAD and ASM:
        _fetch_ahead(start, BLOCK_BYTES)
    per_step: tl.constexpr = 8 if FORMAT == INT4 else 4
    steps: tl.constexpr = K // per_step
    row = (tl.program_id(1) * COUNT + tl.arange(0, COUNT))[:, None, None]
    lane = tl.arange(0, ROWS)[None, None, :]
    words = start.to(tl.pointer_type(tl.int32))
    halves = (start + SCALES_AT).to(tl.pointer_type(tl.float16))
    total = tl.zeros((COUNT, STEPS, ROWS), tl.float32)
    for first in range(0, steps, STEPS):
        step = (first + tl.arange(0, STEPS))[None, :, None]
        here = step < steps
        live = here & (row < rows)
        word = tl.load(words + step * ROWS + lane, here, 0)
        weight_scale = tl.load(halves + step * per_step // GROUP * ROWS + lane, here, 0.0).to(tl.float32)
        act_scale = tl.load(qs + row * (K // ACT_GROUP) + step * per_step // ACT_GROUP, live, 0.0)
        codes = q + row * (K // 4)
        if FORMAT == INT4:
            low = tl.load(codes + 2 * step, live, 0)
            high = tl.load(codes + 2 * step + 1, live, 0)
            ones = tl.full(low.shape, ONES, tl.int32)
            zero = 8 * (_dot4(ones, low, ASM) + _dot4(ones, high, ASM))
            dot = _dot4(word & LOW_NIBBLES, low, ASM) + _dot4((word >> 4) & LOW_NIBBLES, high, ASM) - zero
        else:
            code = tl.load(codes + step, live, 0)
            dot = _dot4(word, code, ASM) - 128 * _dot4(tl.full(code.shape, ONES, tl.int32), code, ASM)
        total += dot.to(tl.float32) * (weight_scale * act_scale)
    y = tl.sum(total, 1)
    row, at = (tl.program_id(1) * COUNT + tl.arange(0, COUNT))[:, None], block * ROWS + tl.arange(0, ROWS)
    if HAS_BIAS:
        y += tl.load(bias + at, at < N, 0.0).to(tl.float32)[None, :]
    tl.store(out + row * N + at[None, :], y.to(out.dtype.element_ty), (row < rows) & (at < N)[None, :])


@triton.jit
def project_plain(
    weight, x, bias, out, rows, stride,
    K: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, OUTPUTS: tl.constexpr,
    DEPTH: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of values x, whose rows are ``stride`` apart, by ``weight`` [N, K]; program (OUTPUTS,
    COUNT rows)."""
    row = (tl.program_id(1) * COUNT + tl.arange(0, COUNT))[:, None, None]
    output = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    known = (output < N)[None, :, None]
    line = weight + output.to(tl.int64)[None, :, None] * K
    total = tl.zeros((COUNT, OUTPUTS, DEPTH), tl.float32)
    for first in range(0, K, DEPTH):
        at = (first + tl.arange(0, DEPTH))[None, None, :]
        w = tl.load(line + at, known & (at < K), 0.0).to(tl.float32)
        total += w * tl.load(x + row * stride + at, (row < rows) & (at < K), 0.0).to(tl.float32)
    y = tl.sum(total, 2)
    row = (tl.program_id(1) * COUNT + tl.arange(0, COUNT))[:, None]
    if HAS_BIAS:
        y += tl.load(bias + output, output < N, 0.0).to(tl.float32)[None, :]
    tl.store(
        out + row * N + output[None, :], y.to(out.dtype.element_ty), (row < rows) & (output < N)[None, :]
    )


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
