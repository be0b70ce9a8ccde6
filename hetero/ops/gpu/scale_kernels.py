"""Parts of Triton kernels that know how scales are stored, and the numbers of single weights of any format.

Many rows: single weights become numbers, which tensor cores multiply. ``code_kernels`` has what few rows use.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu import coding_kernels as of
from hetero.ops.gpu import codings

ROWS = tl.constexpr(16)
UNIT, SUPER_GROUP = tl.constexpr(codings.UNIT), tl.constexpr(256)
HALF, OF_ROWS, E8M0, E4M3, UNSIGNED, SIGNED = (
    tl.constexpr(kind)
    for kind in (
        codings.HALF,
        codings.OF_ROWS,
        codings.E8M0,
        codings.E4M3,
        codings.UNSIGNED,
        codings.SIGNED,
    )
)
MINIMA, ZEROS, MATRIX, SUPER_ALONE, SUPER_MINIMA = (
    tl.constexpr(kind)
    for kind in (codings.MINIMA, codings.ZEROS, codings.MATRIX, codings.SUPER, codings.SUPER_MINIMA)
)


@triton.jit
def beside_at(K: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr):
    """Where in a block the scales end."""
    each: tl.constexpr = 2 if of.scale_kind(FORMAT) == HALF or of.scale_kind(FORMAT) == UNSIGNED else 1
    return SCALES_AT + K // GROUP * ROWS * each


@triton.jit
def e4m3_half(byte):
    """The number of an E4M3 code, int32, times 2^-8, as fp16."""
    return (((byte & 128) << 8) | ((byte & 127) << 7)).to(tl.int16).to(tl.float16, bitcast=True)


@triton.jit
def four_e4m3(word, ASM: tl.constexpr):
    """The numbers of the four E4M3 codes of a word in units of ``e4m3_unit``, as float32. ASM here is the
    compute capability times ten: from 8.9 on there are instructions for it."""
    if ASM >= 89:
        numbers = tl.inline_asm_elementwise(
            """{
            .reg .b16 l, h;
            .reg .b32 a, b;
            mov.b32 {l, h}, $4;
            cvt.rn.f16x2.e4m3x2 a, l;
            cvt.rn.f16x2.e4m3x2 b, h;
            mov.b32 {l, h}, a;
            cvt.f32.f16 $0, l;
            cvt.f32.f16 $1, h;
            mov.b32 {l, h}, b;
            cvt.f32.f16 $2, l;
            cvt.f32.f16 $3, h;
            }""",
            "=f,=f,=f,=f,r", [word], dtype=(tl.float32, tl.float32, tl.float32, tl.float32), is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        numbers = ()
        for i in tl.static_range(4):
            numbers = numbers + (e4m3_half(word >> (8 * i)).to(tl.float32),)
    return numbers


@triton.jit
def fp8_scale(block, step, here, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr):
    """Float32 scales of some steps of 4 inputs: [STEPS, 1], or [STEPS, 16] where each row has one."""
    scales = (block + SCALES_AT).to(tl.pointer_type(tl.float32))
    if of.scale_kind(FORMAT) == OF_ROWS:
        scale = tl.load(scales + step * 0 + tl.arange(0, ROWS)[None, :], here, 0.0)
    else:
        scale = tl.load(scales + step * 4 // GROUP, here, 0.0)
    return scale


@triton.constexpr_function
def e4m3_unit(asm):
    """What ``four_e4m3`` leaves of a number's size to its scale."""
    return 1.0 if asm >= 89 else 256.0


@triton.jit
def e8m0(byte):
    """2^(byte - 127)."""
    return tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def decoded(
    block, k, row, here, K: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """Float32: the weights of inputs ``k`` of the rows ``row`` of the block at ``block``, which may be a
    pointer for each; 0 where not ``here``."""
    low: tl.constexpr = of.low_bits(FORMAT)
    high: tl.constexpr = of.high_bits(FORMAT)
    each: tl.constexpr = 8 // low
    unit, step = k // UNIT, k % UNIT // 4
    start = block + unit * ((low + high) * 64) + (row * 4 + k % 4)
    code = tl.load(start + step // each * 64, here, 0).to(tl.int32) & 255
    if low < 8:
        code = (code >> (step % each * low)) & ((1 << low) - 1)
    if high != 0:
        of_word: tl.constexpr = 8 // high
        above = tl.load(start + (low + step // of_word) * 64, here, 0).to(tl.int32) & 255
        code |= ((above >> (step % of_word * high)) & ((1 << high) - 1)) << low
    group = k // GROUP
    after = block + beside_at(K, GROUP, SCALES_AT, FORMAT)
    kind: tl.constexpr = of.scale_kind(FORMAT)
    if of.table_size(FORMAT) != 0:
        numbers = tl.full(code.shape, of.numbers_of(FORMAT, 0), tl.int64)
        if of.table_size(FORMAT) == 16:
            numbers = tl.where(code > 7, tl.full(code.shape, of.numbers_of(FORMAT, 1), tl.int64), numbers)
        code = (numbers >> (8 * (code & 7)).to(tl.int64)).to(tl.int8).to(tl.int32)
    if of.is_fp8(FORMAT):
        scales = (block + SCALES_AT).to(tl.pointer_type(tl.float32))
        scale = tl.load(scales + (row + group * 0 if kind == OF_ROWS else group + row * 0), here, 0.0)
        value = e4m3_half(code).to(tl.float32) * (scale * 256.0)
    elif kind == HALF:
        halves = (block + SCALES_AT).to(tl.pointer_type(tl.float16))
        scale = tl.load(halves + group * ROWS + row, here, 0.0).to(tl.float32)
        if of.beside_kind(FORMAT) == ZEROS:
            code -= tl.load(after.to(tl.pointer_type(tl.uint8)) + group * ROWS + row, here, 0).to(tl.int32)
        value = (code - of.zero_of(FORMAT)).to(tl.float32) * scale
        if of.beside_kind(FORMAT) == MINIMA:
            least = tl.load(after.to(tl.pointer_type(tl.float16)) + group * ROWS + row, here, 0.0)
            value += least.to(tl.float32)
    else:
        number = (code - of.zero_of(FORMAT)).to(tl.float32) * of.factor_of(FORMAT)
        bytes = (block + SCALES_AT).to(tl.pointer_type(tl.uint8))
        halves = after.to(tl.pointer_type(tl.float16))
        if kind == E8M0:
            value = number * e8m0(tl.load(bytes + group * ROWS + row, here, 0).to(tl.int32))
        elif kind == E4M3:
            byte = tl.load(bytes + group * ROWS + row, here, 0).to(tl.int32)
            whole = tl.load(after.to(tl.pointer_type(tl.float32)) + (k + row) * 0, here, 0.0)
            value = number * (e4m3_half(byte).to(tl.float32) * (whole * 256.0))
        elif kind == SIGNED:
            scale = tl.load(bytes.to(tl.pointer_type(tl.int8)) + group * ROWS + row, here, 0).to(tl.float32)
            whole = tl.load(halves + k // SUPER_GROUP * ROWS + row, here, 0.0).to(tl.float32)
            value = number * (whole * scale)
        else:
            scale = tl.load(bytes + group * (2 * ROWS) + row, here, 0).to(tl.float32)
            least = tl.load(bytes + (group * 2 + 1) * ROWS + row, here, 0).to(tl.float32)
            whole = tl.load(halves + k // SUPER_GROUP * (2 * ROWS) + row, here, 0.0).to(tl.float32)
            under = tl.load(halves + (k // SUPER_GROUP * 2 + 1) * ROWS + row, here, 0.0).to(tl.float32)
            value = number * (whole * scale) - under * least
    return value
