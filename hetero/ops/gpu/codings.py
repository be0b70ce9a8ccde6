"""What the GPU's kernels must know of each packed format; cpu_ext/codes.h has the same for the CPU's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hetero.quant.iq_tables import FACTORS, TABLES, UNUSED
from hetero.quant.small_floats import E2M1

FLOAT, HALF, TILES, OF_ROWS, E8M0, E4M3, UNSIGNED, SIGNED = range(8)
"""How scales are stored: none; fp16; float32 of 128 x 128, or of each row; bytes of four kinds, the last two
integers that count the fp16 numbers of 256 k."""

NOTHING, MINIMA, ZEROS, MATRIX, SUPER, SUPER_MINIMA = range(6)
"""What stands behind the scales."""

UNIT = 32
"""Inputs whose words and scales a thread reads at once, of all formats but the oldest and fp8."""


class Coding(NamedTuple):
    """One format."""

    planes: tuple[int, int]
    """Bits of a code in the first and in the second plane."""
    scale: int
    beside: int = NOTHING
    zero: int = 0
    """The code of the number zero, unless there is a table."""
    table: tuple[int, ...] = ()
    """The number of each code, 16 or 8."""
    factor: float = 1.0
    """What a number counts."""
    parts: int = 1
    """Scales in 32 k."""
    unit: int = UNIT
    """Inputs of a word of 4 bytes, or of all words of ``UNIT`` inputs."""

    @property
    def lessened(self) -> int:
        """What ``picks`` take off every number: one, where half of a table has zeros beside negative ones."""
        return int(len(self.table) == 16 and min(self.table[8:]) < 0 <= max(self.table[8:]))

    @property
    def numbers(self) -> tuple[int, ...]:
        """8 codes' numbers each as 64 bits: signed bytes."""
        return _packed(self.table)

    @property
    def picks(self) -> tuple[int, ...]:
        """The same for instructions that look up 8 bytes by 3 bits and give, where the fourth bit is set, the
        byte's sign eight times.

        Of a table of 16, the first half is looked up by a code, the second by a code whose highest bit is
        turned round, and a number is the sum of what both give. So all bytes of one half have the sign, which
        adds -1 to the other half's numbers, and these are one more here.
        """
        halves = [[x - self.lessened for x in self.table[at : at + 8]] for at in range(0, len(self.table), 8)]
        if len(halves) == 2:
            first, second = (all(x < 0 for x in half) for half in halves)
            assert first != second, "one half of a table has the sign"
            halves = [[x + second for x in halves[0]], [x + first for x in halves[1]]]
            assert min(halves[first]) >= 0
        return _packed([x for half in halves for x in half])


def _packed(numbers: Sequence[int]) -> tuple[int, ...]:
    raw = np.array(numbers, dtype=np.int64).astype(np.int8)
    return tuple(raw.view(np.int64).tolist())


def _iq(name: str, low: int, high: int = 0, *, scale: int = SIGNED, parts: int = 1) -> Coding:
    numbers = tuple(0 if number == UNUSED else number for number in TABLES[name])
    if name.startswith(("iq2", "iq1")):  # of which bits 0, 1 and 3 of a code are stored
        numbers = numbers[:4] + numbers[8:12]
    beside = SUPER if scale == SIGNED else NOTHING
    return Coding((low, high), scale, beside, table=numbers, factor=FACTORS[name], parts=parts)


_DOUBLED = tuple(int(2 * x) for x in (*E2M1, *(-x for x in E2M1)))

CODINGS = {
    "bf16": Coding((16, 0), FLOAT, unit=2),
    "int8": Coding((8, 0), HALF, zero=128, unit=4),
    "int4": Coding((4, 0), HALF, zero=8, unit=8),
    "int4a": Coding((4, 0), HALF, MINIMA),
    "fp8": Coding((8, 0), TILES, unit=4),
    "fp8_row": Coding((8, 0), OF_ROWS, unit=4),
    "mxfp4": Coding((4, 0), E8M0, table=_DOUBLED, factor=0.5),
    "nvfp4": Coding((4, 0), E4M3, MATRIX, table=_DOUBLED, factor=0.5, parts=2),
    "int8a": Coding((8, 0), HALF, MINIMA),
    "int4z": Coding((4, 0), HALF, ZEROS),
    "int8z": Coding((8, 0), HALF, ZEROS),
    "iq4_nl": _iq("iq4_nl", 4, scale=HALF),
    "q4_k": Coding((4, 0), UNSIGNED, SUPER_MINIMA),
    "q5_k": Coding((4, 1), UNSIGNED, SUPER_MINIMA),
    "q2_k": Coding((2, 0), UNSIGNED, SUPER_MINIMA, parts=2),
    "q3_k": Coding((2, 1), SIGNED, SUPER, zero=4, parts=2),
    "q6_k": Coding((4, 2), SIGNED, SUPER, zero=32, parts=2),
    "iq4_xs": _iq("iq4_xs", 4),
    "iq3_xxs": _iq("iq3_xxs", 4),
    "iq3_s": _iq("iq3_s", 4),
    "iq2_xxs": _iq("iq2_xxs", 2, 1),
    "iq2_xs": _iq("iq2_xs", 2, 1, parts=2),
    "iq2_s": _iq("iq2_s", 2, 1, parts=2),
    "iq1_s": _iq("iq1_s", 2, 1),
    "iq1_m": _iq("iq1_m", 2, 1, parts=2),
}
"""By the names of ``hetero.formats.GPU_FORMATS``."""

BY_UNITS = {"int8": 102, "int4": 103}
"""Numbers of formats that few rows may read by units too, as those that came later are."""
