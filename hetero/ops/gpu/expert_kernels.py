"""Triton kernels of routed experts, on the packed layout of the CPU (cpu_ext/kernels.h).

An expert is an address: of GPU memory, or of pinned host memory that the GPU reads in place. The same bytes
serve both, and the CPU. As on the CPU, activations are int8 in groups of 32, and the dot of a group is an
exact integer; only the order of the float32 sums differs (contract 11 of the design).

Sizes are constants of a model, so they are compiled in. Of a packed matrix: K inputs with their padding, N
outputs, BLOCK_BYTES of 16 outputs, whose scales begin SCALES_AT bytes in, GROUP inputs to a scale.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu.ahead_kernels import ASKS, ask, ask_each
from hetero.ops.gpu.code_kernels import ONES, dot4, fetched, weighed
from hetero.ops.gpu.coding_kernels import is_fp8, takes_values, unit_of
from hetero.ops.gpu.overlap_kernels import await_last, let_next
from hetero.ops.gpu.scale_kernels import ROWS, UNIT, e4m3_unit, four_e4m3, fp8_scale

ACT_GROUP = tl.constexpr(32)
# Below it a group of activations counts as zeros, as in the extension.
TINY = tl.constexpr(2.0**-100)
# Added and taken away again, it rounds a float32 below 2^22 to the nearest integer, ties to even.
ROUNDER = tl.constexpr(12582912.0)
LOW_NIBBLES = tl.constexpr(0x0F0F0F0F)

BF16, INT8, INT4 = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
SILU, GELU, GELU_TANH, RELU, RELU2 = (tl.constexpr(kind) for kind in range(5))


@triton.jit
def coded(value):
    """(codes int8 [groups, 32], scales float32 [groups]) of float32 values, as the extension's ``QuantFn``
    makes them."""
    size = tl.abs(value)
    # A NaN passes through the sum, though not through every maximum.
    bad = tl.sum(size * 0.0, 1) != 0.0
    amax = tl.max(tl.where(size < float("inf"), size, 0.0), 1)
    zero = bad | (amax < TINY)
    inverse = tl.div_rn(tl.full(amax.shape, 127.0, tl.float32), tl.where(zero, 1.0, amax))
    clean = tl.where(zero[:, None], 0.0, value)
    # Rounded before the sum, as on the CPU: one instruction for both would see on which side of a tie the
    # product is, and half of the largest activation is nearly one.
    ratio = tl.fma(clean, tl.broadcast_to(inverse[:, None], clean.shape), tl.zeros(clean.shape, tl.float32))
    code = (ratio + ROUNDER) - ROUNDER
    known = tl.div_rn(tl.where(amax < TINY, 0.0, amax), tl.full(amax.shape, 127.0, tl.float32))
    return code.to(tl.int8), tl.where(bad, float("nan"), known)


@triton.jit
def quantise_rows(x, q, scale, k, k_pad, stride, GROUPS: tl.constexpr, PDL: tl.constexpr):
    """x [T, k], whose rows are ``stride`` apart, to q int8 [T, k_pad], zeros beyond k, and scale float32 [T,
    k_pad / 32]; program (row, GROUPS groups)."""
    let_next(PDL)
    await_last(PDL)
    row = tl.program_id(0)
    group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
    code, known = coded(tl.load(x + row * stride + at, mask=at < k, other=0.0).to(tl.float32))
    here = group < k_pad // ACT_GROUP
    tl.store(q + row * k_pad + at, code, mask=here[:, None])
    tl.store(scale + row * (k_pad // ACT_GROUP) + group, known, mask=here)


@triton.jit
def quantise_pairs(
    base, x, addresses, q, scale, slots, stride,
    INPUTS: tl.constexpr, K: tl.constexpr, ORDER_AT: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """As ``quantise_rows`` of float32 x [T, INPUTS] for every pair that has an address: its token's values in
    the order of its expert, int32 [INPUTS] at byte ORDER_AT of it. q [pairs, K], scale [pairs, K / 32];
    program (pair, GROUPS groups)."""
    pair = tl.program_id(0)
    expert = tl.load(addresses + pair)
    if expert != 0:
        group = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
        at = group[:, None] * ACT_GROUP + tl.arange(0, ACT_GROUP)[None, :]
        order = _at(base, expert).to(tl.pointer_type(tl.int32)) + ORDER_AT // 4
        column = tl.load(order + at, at < INPUTS, 0)
        code, known = coded(tl.load(x + pair // slots * stride + column, at < INPUTS, 0.0))
        tl.store(q + pair.to(tl.int64) * K + at, code, at < K)
        tl.store(scale + pair * (K // ACT_GROUP) + group, known, group < K // ACT_GROUP)


@triton.jit
def _at(base, address):
    """A pointer to bytes from an address that is a multiple of 64. Of a pointer that is made of a number the
    compiler would not know that, and would load 4 bytes at a time."""
    return base + tl.multiple_of(address - base.to(tl.int64), 64)


@triton.jit
def step_dot(word, codes, step, here, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """int32 [STEPS, 16]: the products of the words of some steps and codes, of which ``codes`` + 4 * step
    bytes (int4: 8 * step) are a step's."""
    if FORMAT == INT4:
        low = tl.load(codes + 2 * step, here, 0)
        high = tl.load(codes + 2 * step + 1, here, 0)
        ones = tl.full(low.shape, ONES, tl.int32)
        zero = 8 * (dot4(ones, low, 0, ASM) + dot4(ones, high, 0, ASM))
        dot = dot4(word & LOW_NIBBLES, low, 0, ASM) + dot4((word >> 4) & LOW_NIBBLES, high, 0, ASM) - zero
    else:
        code = tl.load(codes + step, here, 0)
        dot = dot4(word, code, 0, ASM) - 128 * dot4(tl.full(code.shape, ONES, tl.int32), code, 0, ASM)
    return dot


@triton.jit
def _weighed(parts, q, qs, unit, here, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Float32 [UNITS, 16]: the products of some units, by what ``_fetched`` gave of them, and a row, which
    begins at ``q`` and ``qs``."""
    if FORMAT == BF16:
        word = parts[0]
        even = (word << 16).to(tl.float32, bitcast=True)
        odd = (word & -65536).to(tl.float32, bitcast=True)
        y = even * tl.load(q + 2 * unit, here, 0.0).to(tl.float32)
        y += odd * tl.load(q + 2 * unit + 1, here, 0.0).to(tl.float32)
    elif is_fp8(FORMAT):
        word, scale = parts
        numbers = four_e4m3(word, ASM)
        y = tl.zeros(word.shape, tl.float32)
        pairs = q.to(tl.pointer_type(tl.int64)) + 2 * unit
        for i in tl.static_range(2):
            pair = tl.load(pairs + i, here, 0)
            y += numbers[2 * i] * pair.to(tl.int32).to(tl.float32, bitcast=True)
            y += numbers[2 * i + 1] * (pair >> 32).to(tl.int32).to(tl.float32, bitcast=True)
        y = y * (scale * e4m3_unit(ASM))
    elif unit_of(FORMAT) != UNIT:
        word, scale = parts
        act_scale = tl.load(qs + unit * unit_of(FORMAT) // ACT_GROUP, here, 0.0)
        y = step_dot(word, q, unit, here, FORMAT, ASM).to(tl.float32) * (scale.to(tl.float32) * act_scale)
    else:
        y = weighed(parts, q, qs, unit, here, FORMAT, ASM)
    return y


@triton.jit
def _fetched(
    block, unit, here, K: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """A tuple of what stands in some units of the block that begins at ``block``: tiles [UNITS, 16]."""
    row = tl.arange(0, ROWS)[None, :]
    if unit_of(FORMAT) == UNIT:
        parts = fetched(block, unit, here, K, GROUP, SCALES_AT, FORMAT)
    else:
        parts = (tl.load(block.to(tl.pointer_type(tl.int32)) + unit * ROWS + row, here, 0),)
        if is_fp8(FORMAT):
            parts = parts + (fp8_scale(block, unit, here, GROUP, SCALES_AT, FORMAT),)
        elif FORMAT != BF16:
            halves = (block + SCALES_AT).to(tl.pointer_type(tl.float16))
            scale = tl.load(halves + unit * unit_of(FORMAT) // GROUP * ROWS + row, here, 0.0)
            parts = parts + (scale,)
    return parts


@triton.jit
def _block_dot(
    block, q, qs,
    K: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr, STEPS: tl.constexpr,
    TILES: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Float32 [16]: the products of one row of activations and a packed block, whose first byte is ``block``.

    ``q``: the row as words of 4 codes (bf16, fp8: as values); ``qs``: its scales. TILES of STEPS of the block
    are on their way at once; a step has the inputs of a unit of the format.
    """
    steps: tl.constexpr = K // unit_of(FORMAT)
    total = tl.zeros((STEPS, ROWS), tl.float32)
    for begin in range(0, steps, STEPS * TILES):
        parts = ()
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            parts = parts + (_fetched(block, step, step < steps, K, GROUP, SCALES_AT, FORMAT),)
        # Loads are not put off beyond it.
        tl.debug_barrier()
        for tile in tl.static_range(TILES):
            step = (begin + tile * STEPS + tl.arange(0, STEPS))[:, None]
            total += _weighed(parts[tile], q, qs, step, step < steps, FORMAT, ASM)
    return tl.sum(total, 0)


@triton.jit
def _act(g, alpha, KIND: tl.constexpr):
    if KIND == SILU:
        return g / (1.0 + tl.exp(-alpha * g))
    if KIND == GELU:
        return 0.5 * g * (1.0 + tl.erf(g * 0.7071067811865476))
    if KIND == GELU_TANH:
        return g / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
    positive = tl.maximum(g, 0.0)
    if KIND == RELU:
        return positive
    if KIND == RELU2:
        return positive * positive
    return g


@triton.jit
def combined(gate, up, alpha, gate_max, up_limit, act_max, up_offset, KIND: tl.constexpr):
    """The activation of kernels.h. What is no number stays so, as minps keeps its second operand."""
    gate = tl.where(gate > gate_max, gate_max, gate)
    up = tl.minimum(tl.maximum(up, -up_limit), up_limit)
    acted = _act(gate, alpha, KIND)
    return tl.where(acted > act_max, act_max, acted) * (up + up_offset)


@triton.jit
def gate_up(
    base, q, qs, addresses, h, slots, alpha, gate_max, up_limit, act_max, up_offset,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    BIAS_AT: tl.constexpr, FORMAT: tl.constexpr, KIND: tl.constexpr, HAS_GATE: tl.constexpr,
    HAS_BIAS: tl.constexpr, STEPS: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr,
    NEAR: tl.constexpr,
):  # fmt: skip
    """h float32 [pairs, N]: the activated values of every (token, expert) pair; program (16 outputs, pair).

    ``base``: any pointer to bytes; ``addresses`` int64 [pairs]: of each pair's expert, 0 where the pair is
    not computed here: its h stays unwritten. An expert's float32 biases of gate (if any) and up begin at
    BIAS_AT. NEAR: all experts are in GPU memory, and may be asked for ahead.
    """
    block, pair = tl.program_id(0), tl.program_id(1)
    expert = tl.load(addresses + pair)
    if expert != 0:
        token = pair // slots
        x = q + token * (K if takes_values(FORMAT) else K // 4)
        xs = qs + token * (K // ACT_GROUP)
        mats: tl.constexpr = 2 if HAS_GATE else 1
        first = _at(base, expert + block.to(tl.int64) * (mats * BLOCK_BYTES))
        if NEAR and ASM >= ASKS and HAS_GATE:  # the second matrix comes nearer while the first one is used
            ask(first.to(tl.int64) + BLOCK_BYTES, BLOCK_BYTES)
        out = block * ROWS + tl.arange(0, ROWS)
        here = out < N
        bias = _at(base, expert).to(tl.pointer_type(tl.float32)) + BIAS_AT // 4
        one = _block_dot(first, x, xs, K, GROUP, SCALES_AT, FORMAT, STEPS, TILES, ASM)
        if HAS_BIAS:
            one += tl.load(bias + out, mask=here, other=0.0)
        if HAS_GATE:
            up = _block_dot(first + BLOCK_BYTES, x, xs, K, GROUP, SCALES_AT, FORMAT, STEPS, TILES, ASM)
            if HAS_BIAS:
                up += tl.load(bias + N + out, mask=here, other=0.0)
            value = combined(one, up, alpha, gate_max, up_limit, act_max, up_offset, KIND)
        else:
            value = _act(one, alpha, KIND)
        tl.store(h + pair.to(tl.int64) * N + out, value, mask=here)


@triton.jit
def down(
    base, q, qs, addresses, weights, out, slots,
    K: tl.constexpr, N: tl.constexpr, BLOCK_BYTES: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr,
    BEGIN: tl.constexpr, BIAS_AT: tl.constexpr, FORMAT: tl.constexpr, HAS_BIAS: tl.constexpr,
    STEPS: tl.constexpr, TILES: tl.constexpr, ASM: tl.constexpr, NEAR: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out float32 [T, N]: the weighted sum of a token's experts that have an address; program (16 outputs,
    token).

    The matrix begins at byte BEGIN of an expert. One program sums a token's pairs, whose steps stand one
    behind the other, so that the result is the same in every run. TILES of STEPS are on their way at once.
    """
    let_next(PDL)
    # Its weights may have come in the last kernels.
    await_last(PDL)
    block, token = tl.program_id(0), tl.program_id(1)
    steps: tl.constexpr = K // unit_of(FORMAT)
    pair = token * slots
    offset = BEGIN + block.to(tl.int64) * BLOCK_BYTES
    if NEAR and ASM >= ASKS:  # what later rounds read comes nearer
        each = tl.arange(0, 16)
        all_experts = tl.load(addresses + pair + each, each < slots, 0)
        ask_each(all_experts + offset, tl.where(all_experts != 0, BLOCK_BYTES, 0))
    total = tl.zeros((STEPS, ROWS), tl.float32)
    for begin in range(0, slots * steps, STEPS * TILES):
        parts = ()
        for tile in tl.static_range(TILES):
            place = begin + tile * STEPS + tl.arange(0, STEPS)
            expert = tl.load(addresses + pair + place // steps, place < slots * steps, 0)
            step, here = (place % steps)[:, None], (expert != 0)[:, None]
            from_base = tl.where(expert != 0, expert + offset - base.to(tl.int64), 0)
            start = base + tl.multiple_of(from_base, 64)[:, None]
            parts = parts + (_fetched(start, step, here, K, GROUP, SCALES_AT, FORMAT),)
        # Loads are not put off beyond it.
        tl.debug_barrier()
        for tile in tl.static_range(TILES):
            place = begin + tile * STEPS + tl.arange(0, STEPS)
            slot = place // steps
            expert = tl.load(addresses + pair + slot, place < slots * steps, 0)
            weight = tl.load(weights + pair + slot, expert != 0, 0.0)
            # The rows of pairs stand one behind the other as well.
            step = (pair * steps + place)[:, None]
            total += weight[:, None] * _weighed(parts[tile], q, qs, step, (expert != 0)[:, None], FORMAT, ASM)
    y = tl.sum(total, 0)
    rows = block * ROWS + tl.arange(0, ROWS)
    here = rows < N
    if HAS_BIAS:
        for slot in range(slots):
            expert = tl.load(addresses + pair + slot)
            if expert != 0:
                bias = _at(base, expert).to(tl.pointer_type(tl.float32)) + BIAS_AT // 4
                y += tl.load(weights + pair + slot) * tl.load(bias + rows, mask=here, other=0.0)
    tl.store(out + token.to(tl.int64) * N + rows, y, mask=here)
