"""Triton kernels of linear layers in the packed layout of experts (cpu_ext/kernels.h). TWIN: run by the
interpreter, which cuts off where a GPU rounds to bf16."""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.expert_kernels import ACT_GROUP, BF16, ROWS, _block_dot
from hetero.ops.gpu.grouped_kernels import _decoded


@triton.jit
def few_rows(
    packed, q, qs, bias, out,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, STEPS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """out float32 [T, N] of quantised rows (``quantise_rows``); program (16 outputs, row)."""
    block, row = tl.program_id(0), tl.program_id(1)
    x = q + row * (K if FORMAT == BF16 else K // 4)
    start = packed + block.to(tl.int64) * BLOCK_BYTES
    y = _block_dot(start, x, qs + row * (K // ACT_GROUP), K, GROUP, SCALES_AT, FORMAT, STEPS, ASM)
    at = block * ROWS + tl.arange(0, ROWS)
    if HAS_BIAS:
        y += tl.load(bias + at, at < N, 0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * N + at, y, at < N)


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
