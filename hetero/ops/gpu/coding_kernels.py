"""What Triton kernels ask of a format, by its number, when they are compiled for it: see ``codings``.

The compiler's functions may call nothing and read only what is plain.
"""

from __future__ import annotations

import triton

from hetero.formats import CODES
from hetero.ops.gpu.codings import CODINGS, FLOAT, MINIMA, OF_ROWS, SUPER_MINIMA, TILES, ZEROS

_UNIT_OF = {CODES[name]: one.unit for name, one in CODINGS.items()}
_LOW = {CODES[name]: one.planes[0] for name, one in CODINGS.items()}
_HIGH = {CODES[name]: one.planes[1] for name, one in CODINGS.items()}
_SCALE = {CODES[name]: one.scale for name, one in CODINGS.items()}
_BESIDE = {CODES[name]: one.beside for name, one in CODINGS.items()}
_ZERO = {CODES[name]: one.zero for name, one in CODINGS.items()}
_PARTS = {CODES[name]: one.parts for name, one in CODINGS.items()}
_FACTOR = {CODES[name]: one.factor for name, one in CODINGS.items()}
_SIZE = {CODES[name]: len(one.table) for name, one in CODINGS.items()}
_NUMBERS = {CODES[name]: one.numbers for name, one in CODINGS.items()}
_PICKS = {CODES[name]: one.picks for name, one in CODINGS.items()}
_LESSENED = {CODES[name]: one.lessened for name, one in CODINGS.items()}

_NEEDS_SUMS = {
    CODES[name]: one.zero != one.lessened or one.beside in (MINIMA, ZEROS, SUPER_MINIMA)
    for name, one in CODINGS.items()
}
_IS_FP8 = {CODES[name]: one.scale in (TILES, OF_ROWS) for name, one in CODINGS.items()}
_TAKES_VALUES = {CODES[name]: one.scale in (FLOAT, TILES, OF_ROWS) for name, one in CODINGS.items()}


@triton.constexpr_function
def unit_of(code):
    return _UNIT_OF[code]


@triton.constexpr_function
def low_bits(code):
    return _LOW[code]


@triton.constexpr_function
def high_bits(code):
    return _HIGH[code]


@triton.constexpr_function
def scale_kind(code):
    return _SCALE[code]


@triton.constexpr_function
def beside_kind(code):
    return _BESIDE[code]


@triton.constexpr_function
def zero_of(code):
    return _ZERO[code]


@triton.constexpr_function
def parts_of(code):
    return _PARTS[code]


@triton.constexpr_function
def factor_of(code):
    return _FACTOR[code]


@triton.constexpr_function
def table_size(code):
    return _SIZE[code]


@triton.constexpr_function
def takes_values(code):
    """Whether activations are values, not codes: of floats and of fp8."""
    return _TAKES_VALUES[code]


@triton.constexpr_function
def is_fp8(code):
    return _IS_FP8[code]


@triton.constexpr_function
def numbers_of(code, half):
    return _NUMBERS[code][half]


@triton.constexpr_function
def bytes_of(code, half):
    return _PICKS[code][half]


@triton.constexpr_function
def picks_of(code, word):
    """Half of ``bytes_of``, as int32."""
    bits = (_PICKS[code][word // 2] >> (32 * (word % 2))) & 0xFFFFFFFF
    return bits - (1 << 32) if bits >> 31 else bits


@triton.constexpr_function
def needs_sums(code):
    """Whether sums of activations count as well as products."""
    return _NEEDS_SUMS[code]


@triton.constexpr_function
def lessened_by(code):
    return _LESSENED[code]
