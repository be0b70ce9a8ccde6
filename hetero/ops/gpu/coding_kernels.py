"""What Triton kernels ask of a format, by its number, when they are compiled for it: see ``codings``.

The compiler's functions may call nothing and read only what is plain.
"""

from __future__ import annotations

import triton

from hetero.formats import CODES
from hetero.ops.gpu.codings import BY_UNITS, CODINGS, FLOAT, MINIMA, OF_ROWS, SUPER_MINIMA, TILES, UNIT, ZEROS

_ALL = {CODES[name]: one for name, one in CODINGS.items()}
_ALL |= {code: CODINGS[name]._replace(unit=UNIT) for name, code in BY_UNITS.items()}

_UNIT_OF = {code: one.unit for code, one in _ALL.items()}
_LOW = {code: one.planes[0] for code, one in _ALL.items()}
_HIGH = {code: one.planes[1] for code, one in _ALL.items()}
_SCALE = {code: one.scale for code, one in _ALL.items()}
_BESIDE = {code: one.beside for code, one in _ALL.items()}
_ZERO = {code: one.zero for code, one in _ALL.items()}
_PARTS = {code: one.parts for code, one in _ALL.items()}
_FACTOR = {code: one.factor for code, one in _ALL.items()}
_SIZE = {code: len(one.table) for code, one in _ALL.items()}
_NUMBERS = {code: one.numbers for code, one in _ALL.items()}
_PICKS = {code: one.picks for code, one in _ALL.items()}
_LESSENED = {code: one.lessened for code, one in _ALL.items()}

_NEEDS_SUMS = {
    code: one.zero != one.lessened or one.beside in (MINIMA, ZEROS, SUPER_MINIMA)
    for code, one in _ALL.items()
}
_IS_FP8 = {code: one.scale in (TILES, OF_ROWS) for code, one in _ALL.items()}
_TAKES_VALUES = {code: one.scale in (FLOAT, TILES, OF_ROWS) for code, one in _ALL.items()}


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
