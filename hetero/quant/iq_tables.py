"""Values of the IQ types of GGUF: for each a table of at most 16 signed integers and a power of two.

A weight of these types is d * factor * sc * table[code], with d the fp16 scale of 256 weights and sc an
integer of their group. That follows from the definitions that ``gguf.quants`` decodes by:

- iq4_nl, iq4_xs: 16 values that are no grid. iq4_nl has an fp16 scale a group and no d; iq4_xs has sc from
  -32 to 31, its stored 6 bits less 32.
- iq3_s: the entries of the grid are the odd numbers 1 to 15, each with a sign; d * (1 + 2 s): sc = 2 s + 1.
- iq3_xxs: entries 4, 12 ... 44, 52 and 62 with a sign; d * (0.5 + s) * 0.5 = d / 4 * (2 s + 1). The entries
  are even, so that the table holds their halves and the factor is 1/2.
- iq2_xxs, iq2_xs, iq2_s: entries 8, 25, 43 with a sign; d * (0.5 + s) * 0.25 = d / 8 * (2 s + 1).
- iq1_s, iq1_m: entries -1, 0, 1, to which 1/8 is added or from which it is taken, alike for a group of 8;
  d * (2 s + 1). The table holds eight times the sum, the factor is 1/8.

Where the type stores signs apart, bit 3 of a code is the sign (of the addend for iq1_s and iq1_m) and bits 0
to 2 are the place of the entry in the type's ``grid_map``; codes without an entry (``UNUSED``) do not occur.
All products of d, factor, sc and an entry are exact in float32. cpu_ext/codes.h has the same tables.
"""

from __future__ import annotations

UNUSED = -128
"""Stands in a table where no code leads."""


def _signed(*magnitudes: int) -> tuple[int, ...]:
    rest = (UNUSED,) * (8 - len(magnitudes))
    return (*magnitudes, *rest, *(-m for m in magnitudes), *rest)


_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_IQ2 = _signed(8, 25, 43)
_NONE = (UNUSED,) * 5
_IQ1 = (-7, 1, 9, *_NONE, -9, -1, 7, *_NONE)

TABLES: dict[str, tuple[int, ...]] = {
    "iq4_nl": _IQ4,
    "iq4_xs": _IQ4,
    "iq3_xxs": _signed(2, 6, 10, 14, 18, 22, 26, 31),
    "iq3_s": _signed(1, 3, 5, 7, 9, 11, 13, 15),
    "iq2_xxs": _IQ2,
    "iq2_xs": _IQ2,
    "iq2_s": _IQ2,
    "iq1_s": _IQ1,
    "iq1_m": _IQ1,
}
"""Number of each of the 16 codes by type."""

FACTORS: dict[str, float] = {
    "iq4_nl": 1.0,
    "iq4_xs": 1.0,
    "iq3_xxs": 0.5,
    "iq3_s": 1.0,
    "iq2_xxs": 0.125,
    "iq2_xs": 0.125,
    "iq2_s": 0.125,
    "iq1_s": 0.125,
    "iq1_m": 0.125,
}
"""Power of two that the numbers of a table count."""
