"""Parts of Triton kernels that read packed weights of any format (cpu_ext/kernels.h, ``codings``).

Few rows: a thread reads all words of 32 inputs of an output, a unit, and what scales them, and multiplies
them with int8 activations as the extension does: the dot of a unit, or of its halves, is an exact integer.
``scale_kernels`` has what many rows use.

ASM: compiled for a GPU; else the interpreter runs the same steps in Triton's own words.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hetero.ops.gpu import coding_kernels as of
from hetero.ops.gpu.scale_kernels import (
    E4M3,
    E8M0,
    HALF,
    MATRIX,
    MINIMA,
    ROWS,
    SIGNED,
    SUPER_ALONE,
    SUPER_GROUP,
    SUPER_MINIMA,
    UNIT,
    UNSIGNED,
    ZEROS,
    beside_at,
    e4m3_half,
    e8m0,
)

ONES = tl.constexpr(0x01010101)
_TOPS = tl.constexpr(0x88888888 - (1 << 32))


@triton.jit
def dot4(unsigned, signed, total, ASM: tl.constexpr):
    """``total`` and the four products of a word's unsigned bytes and another's signed ones."""
    if ASM:
        total = tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;", "=r,r,r,r", [unsigned, signed, total], dtype=tl.int32,
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        shift = 8 * tl.arange(0, 4)[None, None, :]
        byte = (signed[:, :, None] << (24 - shift)) >> 24
        total = total + tl.sum(((unsigned[:, :, None] >> shift) & 255) * byte, 2)
    return total


@triton.jit
def _signed_dot4(word, signed, total):
    """As ``dot4`` of signed bytes on both sides."""
    return tl.inline_asm_elementwise(
        "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [word, signed, total], dtype=tl.int32, is_pure=True,
        pack=1,
    )  # fmt: skip


@triton.jit
def _pick4(first, second, picks):
    """A word of four of the eight bytes of two words, by the four lowest nibbles of ``picks``: where one has
    its highest bit set, that byte's sign eight times."""
    return tl.inline_asm_elementwise(
        "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, picks], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _held(word):
    """A constant in a register of each thread. The assembler would put it into one of the warp, and copy it
    from there before every use; of what comes over from a lane to itself it cannot know that it is 0."""
    return tl.inline_asm_elementwise(
        """{
        .reg .b32 lane, same;
        mov.u32 lane, %laneid;
        shfl.sync.idx.b32 same, lane, lane, 31, 0xffffffff;
        xor.b32 lane, lane, same;
        xor.b32 $0, $1, lane;
        }""",
        "=r,r", [word], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _picked(half: tl.constexpr, picks, FORMAT: tl.constexpr):
    """What ``_pick4`` gives of each nibble of ``picks`` [UNITS, 16, 8], as a number."""
    byte = tl.full(picks.shape, of.bytes_of(FORMAT, half), tl.int64) >> (8 * (picks & 7)).to(tl.int64)
    byte = byte.to(tl.int8).to(tl.int32)
    return tl.where((picks & 8) != 0, byte >> 7, byte)


@triton.jit
def ordered(first, second, ASM: tl.constexpr):
    """Two words of activations, of 4 inputs each, in the order in which ``table_dot`` takes them."""
    if ASM:
        low, high = _pick4(first, second, 0x5140), _pick4(first, second, 0x7362)
    else:
        low = (first & 0xFF) | ((second & 0xFF) << 8) | ((first & 0xFF00) << 8) | ((second & 0xFF00) << 16)
        first, second = (first >> 16) & 0xFFFF, (second >> 16) & 0xFFFF
        high = (first & 0xFF) | ((second & 0xFF) << 8) | ((first & 0xFF00) << 8) | ((second & 0xFF00) << 16)
    return low, high


@triton.jit
def table_dot(picks, codes, total, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """``total`` and the products of the numbers of ``picks_of`` for the eight nibbles of a word and of the
    activations in two words."""
    if ASM:
        for half in tl.static_range(2):
            pick = picks >> (16 * half)
            number = _pick4(_held(of.picks_of(FORMAT, 0)), of.picks_of(FORMAT, 1), pick)
            total = _signed_dot4(number, codes[half], total)
            if of.table_size(FORMAT) == 16:
                number = _pick4(_held(of.picks_of(FORMAT, 2)), of.picks_of(FORMAT, 3), pick ^ _TOPS)
                total = _signed_dot4(number, codes[half], total)
    else:
        place = tl.arange(0, 8)[None, None, :]
        pick = (picks[:, :, None] >> (4 * place)) & 15
        number = _picked(0, pick, FORMAT)
        if of.table_size(FORMAT) == 16:
            number += _picked(1, pick ^ 8, FORMAT)
        code = tl.where(place < 4, codes[0][:, :, None], codes[1][:, :, None])
        total = total + tl.sum(number * ((code << (24 - 8 * (place & 3))) >> 24), 2)
    return total


@triton.jit
def fetched(
    block, unit, here, K: tl.constexpr, GROUP: tl.constexpr, SCALES_AT: tl.constexpr, FORMAT: tl.constexpr
):  # fmt: skip
    """What stands in some units of the block that begins at ``block``: words, scales, integer minima, and
    what is beside the scales, as tuples of tiles [UNITS, 16]."""
    row = tl.arange(0, ROWS)[None, :]
    count: tl.constexpr = of.low_bits(FORMAT) + of.high_bits(FORMAT)
    words, scales, least, beside = (), (), (), ()
    at = block.to(tl.pointer_type(tl.int32)) + unit * (count * ROWS) + row
    for i in tl.static_range(count):
        words = words + (tl.load(at + i * ROWS, here, 0),)
    group = unit * UNIT // GROUP  # of formats with one scale for a unit or more
    if of.scale_kind(FORMAT) == HALF:
        halves = (block + SCALES_AT).to(tl.pointer_type(tl.float16))
        scales = scales + (tl.load(halves + group * ROWS + row, here, 0.0),)
    elif of.scale_kind(FORMAT) == SIGNED:
        bytes = (block + SCALES_AT).to(tl.pointer_type(tl.int8)) + unit * (of.parts_of(FORMAT) * ROWS) + row
        for part in tl.static_range(of.parts_of(FORMAT)):
            scales = scales + (tl.load(bytes + part * ROWS, here, 0),)
    else:
        each: tl.constexpr = 2 if of.scale_kind(FORMAT) == UNSIGNED else 1
        stride: tl.constexpr = of.parts_of(FORMAT) * each * ROWS
        bytes = (block + SCALES_AT).to(tl.pointer_type(tl.uint8)) + unit * stride + row
        for part in tl.static_range(of.parts_of(FORMAT)):
            scales = scales + (tl.load(bytes + part * each * ROWS, here, 0),)
            if each == 2:
                least = least + (tl.load(bytes + (part * 2 + 1) * ROWS, here, 0),)
    after = block + beside_at(K, GROUP, SCALES_AT, FORMAT)
    if of.beside_kind(FORMAT) == MINIMA:
        halves = after.to(tl.pointer_type(tl.float16))
        beside = beside + (tl.load(halves + group * ROWS + row, here, 0.0),)
    elif of.beside_kind(FORMAT) == ZEROS:
        bytes = after.to(tl.pointer_type(tl.uint8))
        beside = beside + (tl.load(bytes + group * ROWS + row, here, 0),)
    elif of.beside_kind(FORMAT) == MATRIX:
        whole = after.to(tl.pointer_type(tl.float32)) + unit * 0
        beside = beside + (tl.load(whole, here, 0.0),)
    elif of.beside_kind(FORMAT) == SUPER_ALONE:
        halves = after.to(tl.pointer_type(tl.float16)) + unit * UNIT // SUPER_GROUP * ROWS + row
        beside = beside + (tl.load(halves, here, 0.0),)
    elif of.beside_kind(FORMAT) == SUPER_MINIMA:
        halves = after.to(tl.pointer_type(tl.float16)) + unit * UNIT // SUPER_GROUP * (2 * ROWS) + row
        beside = beside + (tl.load(halves, here, 0.0), tl.load(halves + ROWS, here, 0.0))
    return words, scales, least, beside


@triton.jit
def _codes_of(q, unit, here):
    """The eight words of activations of some units, as a tuple."""
    words = ()
    pairs = q.to(tl.pointer_type(tl.int64)) + unit * 4
    for i in tl.static_range(4):
        pair = tl.load(pairs + i, here, 0)
        words = words + (pair.to(tl.int32), (pair >> 32).to(tl.int32))
    return words


@triton.jit
def _lane(words, step: tl.constexpr, FORMAT: tl.constexpr):
    """The codes of step ``step`` of 4 inputs, as bytes of words, of a format whose codes are numbers."""
    low: tl.constexpr = of.low_bits(FORMAT)
    high: tl.constexpr = of.high_bits(FORMAT)
    each: tl.constexpr = 8 // low
    code = words[step // each]
    if low < 8:
        code = (code >> (low * (step % each))) & (ONES * ((1 << low) - 1))
    if high != 0:
        of_word: tl.constexpr = 8 // high
        shift: tl.constexpr = high * (step % of_word) - low
        above = words[low + step // of_word]
        moved = above >> shift if shift >= 0 else above << -shift
        code |= moved & (ONES * (((1 << high) - 1) << low))
    return code


@triton.jit
def _picks(words, pair: tl.constexpr, FORMAT: tl.constexpr):
    """Codes of a table for two steps of 4 inputs, as nibbles: ``pair`` i of formats of 4 bits is steps 2i and
    2i + 1, of those of 3 bits steps 4(i // 2) + i % 2 and two later."""
    if of.high_bits(FORMAT) == 0:
        code = words[pair]
    else:
        first: tl.constexpr = 4 * (pair // 2) + pair % 2
        code = (words[pair // 2] >> (2 * (pair % 2))) & 0x33333333
        above = words[2]
        code |= (above >> (first - 2) if first > 2 else above << (2 - first)) & 0x04040404
        code |= (above >> (first - 4) if first > 4 else above << (4 - first)) & 0x40404040
    return code


@triton.jit
def _add_pair(words, codes, dot, PAIR: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Adds two steps of 4 inputs of a format with a table."""
    first: tl.constexpr = 2 * PAIR if of.high_bits(FORMAT) == 0 else 4 * (PAIR // 2) + PAIR % 2
    second: tl.constexpr = first + 1 if of.high_bits(FORMAT) == 0 else first + 2
    code = ordered(codes[first], codes[second], ASM)
    return table_dot(_picks(words, PAIR, FORMAT), code, dot, FORMAT, ASM)


@triton.jit
def _add_place(
    words, codes, dot, PART: tl.constexpr, PLACE: tl.constexpr, FORMAT: tl.constexpr, ASM: tl.constexpr
):
    """Adds all steps of a unit, or a half of it, whose codes have the same place in a byte of the only plane:
    they stay there, and their sum is moved."""
    low: tl.constexpr = of.low_bits(FORMAT)
    count: tl.constexpr = low // of.parts_of(FORMAT)
    mask: tl.constexpr = _mask(low, PLACE)
    sum = tl.zeros(dot.shape, tl.int32)
    for i in tl.static_range(count):
        sum = dot4(words[PART * count + i] & mask, codes[(PART * count + i) * (8 // low) + PLACE], sum, ASM)
    return dot + (sum >> (low * PLACE))


@triton.jit
def _dots(words, codes, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """int32 [UNITS, 16] of a unit, or two of its halves: the products of numbers (of a table: those that are
    looked up, lessened; else with the format's zero not taken off) and codes."""
    parts: tl.constexpr = of.parts_of(FORMAT)
    low: tl.constexpr = of.low_bits(FORMAT)
    dots = ()
    for part in tl.static_range(parts):
        dot = tl.zeros(words[0].shape, tl.int32)
        if of.table_size(FORMAT) != 0:
            for i in tl.static_range(4 // parts):
                dot = _add_pair(words, codes, dot, part * (4 // parts) + i, FORMAT, ASM)
        elif of.high_bits(FORMAT) == 0 and low < 8:
            for place in tl.static_range(8 // low):
                dot = _add_place(words, codes, dot, part, place, FORMAT, ASM)
        else:
            for i in tl.static_range(8 // parts):
                number = _lane(words, part * (8 // parts) + i, FORMAT)
                dot = dot4(number, codes[part * (8 // parts) + i], dot, ASM)
        dots = dots + (dot,)
    return dots


@triton.constexpr_function
def _mask(low, place):
    mask = (((1 << low) - 1) << (low * place)) * 0x01010101
    return mask - (1 << 32) if mask >> 31 else mask


@triton.jit
def _sums(codes, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """int32 [UNITS, 1] of the unit or of each of its halves: the activations' codes."""
    sums = ()
    ones = tl.full(codes[0].shape, ONES, tl.int32)
    for part in tl.static_range(of.parts_of(FORMAT)):
        sum = tl.zeros(codes[0].shape, tl.int32)
        for i in tl.static_range(8 // of.parts_of(FORMAT)):
            sum = dot4(ones, codes[part * (8 // of.parts_of(FORMAT)) + i], sum, ASM)
        sums = sums + (sum,)
    return sums


@triton.jit
def weighed(parts, q, qs, unit, here, FORMAT: tl.constexpr, ASM: tl.constexpr):
    """Float32 [UNITS, 16]: the products of some units, by what ``fetched`` gave of them, and a row of int8
    codes, which begins at ``q`` and ``qs``."""
    words, scales, least, beside = parts
    codes = _codes_of(q, unit, here)
    act_scale = tl.load(qs + unit, here, 0.0)
    dots = _dots(words, codes, FORMAT, ASM)
    kind: tl.constexpr = of.beside_kind(FORMAT)
    zero: tl.constexpr = of.zero_of(FORMAT) - of.lessened_by(FORMAT)
    if of.needs_sums(FORMAT):
        sums = _sums(codes, FORMAT, ASM)
    if zero != 0:
        without = ()
        for part in tl.static_range(of.parts_of(FORMAT)):
            without = without + (dots[part] - zero * sums[part],)
        dots = without
    if of.scale_kind(FORMAT) == UNSIGNED:
        # Integers: their sums are exact.
        number = dots[0] * scales[0].to(tl.int32)
        under = sums[0] * least[0].to(tl.int32)
        if of.parts_of(FORMAT) == 2:
            number += dots[1] * scales[1].to(tl.int32)
            under += sums[1] * least[1].to(tl.int32)
        y = number.to(tl.float32) * beside[0].to(tl.float32)
        y -= under.to(tl.float32) * beside[1].to(tl.float32)
    elif of.scale_kind(FORMAT) == SIGNED:
        number = dots[0] * scales[0].to(tl.int32)
        if of.parts_of(FORMAT) == 2:
            number += dots[1] * scales[1].to(tl.int32)
        y = number.to(tl.float32) * beside[0].to(tl.float32)
    elif of.scale_kind(FORMAT) == E4M3:
        y = dots[0].to(tl.float32) * e4m3_half(scales[0].to(tl.int32)).to(tl.float32)
        y += dots[1].to(tl.float32) * e4m3_half(scales[1].to(tl.int32)).to(tl.float32)
        act_scale = act_scale * (beside[0] * 256.0)
    elif of.scale_kind(FORMAT) == E8M0:
        y = dots[0].to(tl.float32) * e8m0(scales[0].to(tl.int32))
    else:
        if kind == ZEROS:
            dots = (dots[0] - sums[0] * beside[0].to(tl.int32),)
        y = dots[0].to(tl.float32) * scales[0].to(tl.float32)
        if kind == MINIMA:
            y += sums[0].to(tl.float32) * beside[0].to(tl.float32)
    return y * (act_scale * of.factor_of(FORMAT))
