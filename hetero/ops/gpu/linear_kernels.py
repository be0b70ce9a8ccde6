"""Triton kernels of linear layers: packed as experts are (cpu_ext/kernels.h), or as torch has them.

Few rows: each program reads its weights once for all of them. TWIN: run by the interpreter, which cuts off
where a GPU rounds to bf16.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.ahead_kernels import ASKS, ask
from hetero.ops.gpu.expert_kernels import ACT_GROUP, INT4, ROWS, step_dot
from hetero.ops.gpu.grouped_kernels import _decoded
from hetero.ops.gpu.overlap_kernels import await_last, let_next
from hetero.ops.gpu.scale_kernels import e4m3_half, e4m3_unit, four_e4m3, fp8_scale


@triton.jit
def project_packed(
    packed, q, qs, bias, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, STEPS: tl.constexpr,
    TILES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of rows that ``expert_kernels.quantise_rows`` made; program (16 outputs, COUNT rows).

    TILES of STEPS of the block are on their way at once, the others come to the L2 cache meanwhile.
    """
    let_next(PDL)
    block = tl.program_id(0)
    start = packed + block.to(tl.int64) * BLOCK_BYTES
    per_step: tl.constexpr = 8 if FORMAT == INT4 else 4
    steps: tl.constexpr = K // per_step
    first_row = tl.program_id(1) * COUNT
    lane = tl.arange(0, ROWS)[None, :]
    words = start.to(tl.pointer_type(tl.int32))
    halves = (start + SCALES_AT).to(tl.pointer_type(tl.float16))
    first_bytes: tl.constexpr = STEPS * TILES * 64
    if ASM >= ASKS and steps > STEPS * TILES:  # what later rounds read
        ask(start.to(tl.int64) + first_bytes, BLOCK_BYTES - first_bytes)
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
        await_last(PDL)
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            scale = scales[tile].to(tl.float32)
            sums = ()
            for i in tl.static_range(COUNT):
                row = tl.minimum(first_row + i, rows - 1)
                dot = step_dot(tiles[tile], q + row * (K // 4), step, step < steps, FORMAT, ASM)
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
def project_fp8(
    packed, x, bias, out, rows, stride,
    INPUTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr,
    STEPS: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``project_packed`` of weights in E4M3 and values x [rows, INPUTS], whose rows are ``stride``
    apart."""
    let_next(PDL)
    start = packed + tl.program_id(0).to(tl.int64) * BLOCK_BYTES
    steps: tl.constexpr = K // 4
    first_row = tl.program_id(1) * COUNT
    words = start.to(tl.pointer_type(tl.int32)) + tl.arange(0, ROWS)[None, :]
    first_bytes: tl.constexpr = STEPS * TILES * 64
    if ASM >= ASKS and steps > STEPS * TILES:
        ask(start.to(tl.int64) + first_bytes, BLOCK_BYTES - first_bytes)
    totals = ()
    for _ in tl.static_range(COUNT):
        totals = totals + (tl.zeros((STEPS, ROWS), tl.float32),)
    for begin in range(0, steps, STEPS * TILES):
        tiles, scales = (), ()
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            tiles = tiles + (tl.load(words + step * ROWS, step < steps, 0),)
            scales = scales + (fp8_scale(start, step, step < steps, GROUP, SCALES_AT, FORMAT),)
        await_last(PDL)
        for tile in tl.static_range(TILES):
            at = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None] * 4
            numbers = four_e4m3(tiles[tile], ASM)
            scale = scales[tile] * e4m3_unit(ASM)
            sums = ()
            for i in tl.static_range(COUNT):
                line = x + tl.minimum(first_row + i, rows - 1) * stride + at
                y = tl.zeros((STEPS, ROWS), tl.float32)
                for j in tl.static_range(4):
                    y += numbers[j] * tl.load(line + j, at + j < INPUTS, 0.0).to(tl.float32)
                sums = sums + (totals[i] + y * scale,)
            totals = sums
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
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
    DEPTH: tl.constexpr, TILES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, N] of values x, whose rows are ``stride`` apart, by ``weight`` [N, K]; program (OUTPUTS,
    COUNT rows). TILES of DEPTH inputs are on their way at once; with DEPTH 256 times the number of warps
    every thread has its own inputs, of all outputs."""
    let_next(PDL)
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
        await_last(PDL)
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
def _signed(byte, ASM: tl.constexpr):
    """The numbers of int8 codes, which are 128 more."""
    if ASM:
        return tl.inline_asm_elementwise(
            "xor.b32 $0, $1, 0x80808080;", "=r,r", [byte], dtype=tl.int8, is_pure=True, pack=4
        )
    return (byte.to(tl.int32) ^ 128).to(tl.int8)


@triton.jit
def _nibbles(byte, HIGH: tl.constexpr, ASM: tl.constexpr):
    """The numbers of int4 codes, which are 8 more, in one half of bytes."""
    if ASM:
        if HIGH:
            byte = tl.inline_asm_elementwise(
                "shr.u32 $0, $1, 4;", "=r,r", [byte], dtype=tl.int8, is_pure=True, pack=4
            )
        # No byte borrows from the next one.
        return tl.inline_asm_elementwise(
            """{
            .reg .b32 t;
            lop3.b32 t, $1, 0x0f0f0f0f, 0x80808080, 0xea;
            sub.u32 t, t, 0x08080808;
            xor.b32 $0, t, 0x80808080;
            }""",
            "=r,r", [byte], dtype=tl.int8, is_pure=True, pack=4,
        )  # fmt: skip
    code = byte.to(tl.int32)
    return (((code >> 4) & 15 if HIGH else code & 15) - 8).to(tl.int8)


@triton.jit
def project_packed_rows(
    packed, q, qs, bias, out, rows,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, GROUPS: tl.constexpr,
    STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``project_packed``, on tensor cores: each group of 32 inputs is a product of its own, whose sums are
    exact; program (16 outputs, COUNT rows, 8 or 16). STAGES of GROUPS are on their way at once."""
    let_next(PDL)
    block, first_row = tl.program_id(0), tl.program_id(1) * COUNT
    start = packed + block.to(tl.int64) * BLOCK_BYTES
    if PDL:
        ask(start.to(tl.int64), BLOCK_BYTES)
    await_last(PDL)
    halves = (start + SCALES_AT).to(tl.pointer_type(tl.float16))
    groups: tl.constexpr = K // ACT_GROUP
    group_bytes: tl.constexpr = 256 if FORMAT == INT4 else 512
    each = tl.arange(0, GROUPS)
    row = first_row + tl.arange(0, COUNT)
    live = row < rows
    output = tl.arange(0, ROWS)
    total = tl.zeros((GROUPS, ROWS, COUNT), tl.float32)
    for begin in tl.range(0, groups, GROUPS, num_stages=STAGES):
        byte = tl.arange(0, GROUPS * group_bytes)
        packs = tl.load(start + begin * group_bytes + byte, byte // group_bytes < groups - begin, 0)
        group = begin + each
        at = halves + (group * ACT_GROUP // GROUP * ROWS)[:, None] + output[None, :]
        scale = tl.load(at, (group < groups)[:, None], 0.0).to(tl.float32)
        k = group[:, None, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :, None]
        known = (group < groups)[:, None, None] & live[None, None, :]
        codes = tl.load(q + row[None, None, :] * K + k, known, 0)
        at = qs + row[None, :] * groups + group[:, None]
        act_scale = tl.load(at, (group < groups)[:, None] & live[None, :], 0.0)
        if FORMAT == INT4:
            byte = tl.reshape(packs, [GROUPS, 4, ROWS, 4])
            both = tl.join(_nibbles(byte, False, ASM), _nibbles(byte, True, ASM))  # step, output, k, half
            w = tl.reshape(tl.permute(both, (0, 2, 1, 4, 3)), [GROUPS, ROWS, ACT_GROUP])
        else:
            byte = tl.reshape(_signed(packs, ASM), [GROUPS, 8, ROWS, 4])
            w = tl.reshape(tl.permute(byte, (0, 2, 1, 3)), [GROUPS, ROWS, ACT_GROUP])
        dot = tl.dot(w, codes, out_dtype=tl.int32).to(tl.float32)
        total += dot * (scale[:, :, None] * act_scale[:, None, :])
    y = tl.sum(total, 0)  # [16, COUNT]
    at = block * ROWS + output
    if HAS_BIAS:
        y += tl.load(bias + at, at < N, 0.0).to(tl.float32)[:, None]
    here = (at < N)[:, None] & live[None, :]
    tl.store(out + row[None, :] * N + at[:, None], y.to(out.dtype.element_ty), here)


@triton.jit
def project_fp8_rows(
    packed, x, bias, out, rows, stride,
    INPUTS: tl.constexpr, K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr,
    SCALES_AT: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr,
    PARTS: tl.constexpr, STAGES: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``project_fp8`` of bf16, which has every E4M3, on tensor cores: PARTS of GROUP inputs are products
    of their own, to which their scales are applied; program (16 outputs, COUNT rows, 8 or 16). STAGES of
    PARTS are on their way at once."""
    let_next(PDL)
    start = packed + tl.program_id(0).to(tl.int64) * BLOCK_BYTES
    if PDL:
        ask(start.to(tl.int64), BLOCK_BYTES)
    await_last(PDL)
    row = tl.program_id(1) * COUNT + tl.arange(0, COUNT)
    live = row < rows
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    parts: tl.constexpr = K // GROUP
    part_bytes: tl.constexpr = GROUP * ROWS
    scales = (start + SCALES_AT).to(tl.pointer_type(tl.float32))
    total = tl.zeros((PARTS, ROWS, COUNT), tl.float32)
    for begin in tl.range(0, parts, PARTS, num_stages=STAGES):
        byte = tl.arange(0, PARTS * part_bytes)
        codes = tl.load(start + begin * part_bytes + byte, byte // part_bytes < parts - begin, 0)
        part = begin + tl.arange(0, PARTS)
        scale = tl.load(scales + part, part < parts, 0.0) * e4m3_unit(ASM)
        k = part[:, None, None] * GROUP + tl.arange(0, GROUP)[None, :, None]
        value = tl.load(x + row[None, None, :] * stride + k, live[None, None, :] & (k < INPUTS), 0.0)
        if ASM >= 89:
            w = codes.to(tl.float8e4nv, bitcast=True).to(tl.float16)
        else:
            w = e4m3_half(codes.to(tl.int32))
        # By way of float32: there is a fast instruction for two of them.
        w = w.to(tl.float32)
        if ASM:
            w = w.to(tl.bfloat16)
        w = tl.permute(tl.reshape(w, [PARTS, GROUP // 4, ROWS, 4]), (0, 2, 1, 3))
        w = tl.reshape(w, [PARTS, ROWS, GROUP])
        dot = tl.dot(w, value) if ASM else tl.dot(w, value.to(tl.float32), input_precision="ieee")
        total += dot * scale[:, None, None]
    y = tl.sum(total, 0)
    if HAS_BIAS:
        y += tl.load(bias + output, output < N, 0.0).to(tl.float32)[:, None]
    here = (output < N)[:, None] & live[None, :]
    tl.store(out + row[None, :] * N + output[:, None], y.to(out.dtype.element_ty), here)


@triton.jit
def project_plain_rows(
    weight, x, bias, out, rows, stride,
    K: tl.constexpr, N: tl.constexpr, HAS_BIAS: tl.constexpr, COUNT: tl.constexpr, PARTS: tl.constexpr,
    STAGES: tl.constexpr, TWIN: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """As ``project_plain`` of bf16, on tensor cores: PARTS of 64 inputs are products of their own; program
    (16 outputs, COUNT rows, 8 or 16). STAGES of PARTS are on their way at once."""
    let_next(PDL)
    depth: tl.constexpr = 64
    if PDL and K % 8 == 0:
        begin_at = tl.program_id(0).to(tl.int64) * ROWS
        ask((weight + begin_at * K).to(tl.int64), (tl.minimum(N - begin_at, ROWS) * (2 * K)).to(tl.int32))
    await_last(PDL)
    first_row = tl.program_id(1) * COUNT
    row = first_row + tl.arange(0, COUNT)
    live = row < rows
    output = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    known = (output < N)[None, :, None]
    line = weight + output.to(tl.int64)[None, :, None] * K
    each = tl.arange(0, PARTS)[:, None, None] * depth
    total = tl.zeros((PARTS, ROWS, COUNT), tl.float32)
    for begin in tl.range(0, K, PARTS * depth, num_stages=STAGES):
        at = begin + each + tl.arange(0, depth)[None, None, :]
        w = tl.load(line + at, known & (at < K), 0.0)
        at = begin + each + tl.arange(0, depth)[None, :, None]
        value = tl.load(x + row[None, None, :] * stride + at, live[None, None, :] & (at < K), 0.0)
        if TWIN:
            total += tl.dot(w.to(tl.float32), value.to(tl.float32), input_precision="ieee")
        else:
            total += tl.dot(w, value)
    y = tl.sum(total, 0)
    if HAS_BIAS:
        y += tl.load(bias + output, output < N, 0.0).to(tl.float32)[:, None]
    here = (output < N)[:, None] & live[None, :]
    tl.store(out + row[None, :] * N + output[:, None], y.to(out.dtype.element_ty), here)


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
