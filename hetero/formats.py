"""Formats of packed weights: names, groups and sizes. Imports no torch: rules and plans use it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from difflib import get_close_matches

from hetero.core import InputError

BLOCK_ROWS = 16
"""Output rows of a packed block."""

ACT_GROUP = 32
"""Activations share one scale per this many values; k is padded to a multiple of it at least."""

GROUPS = (32, 64, 128)
DEFAULT_GROUP = 32

CODES = {"f32": 0, "bf16": 1, "int8": 2, "int4": 3, "int4a": 4, "fp8": 5, "mxfp4": 6, "nvfp4": 7}
"""Number of each format in the extension (``enum Format`` of cpu_ext/kernels.h)."""

FIXED_GROUPS = {"fp8": 128, "mxfp4": 32, "nvfp4": 16}
"""Formats whose group is part of their definition, and not of their name."""

FP8_TILE = 128
"""Rows that share a scale of fp8, as many as its group has columns."""

_BITS = {"f32": 32, "bf16": 16, "int8": 8, "int4": 4, "int4a": 4, "fp8": 8, "mxfp4": 4, "nvfp4": 4}
# Of a row and group, but fp8: of a block of rows and group.
_SCALE_BITS = {"f32": 0, "bf16": 0, "int8": 16, "int4": 16, "int4a": 32, "fp8": 2, "mxfp4": 8, "nvfp4": 8}
_GROUPED = tuple(name for name, bits in _SCALE_BITS.items() if bits and name not in FIXED_GROUPS)
_PATTERN = re.compile(r"^\s*([a-z0-9]+?)(?:[\s_-]*g(\d+))?\s*$")


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: ``f32`` and ``bf16`` (group 0), or codes that share a scale per ``group`` of k.

    ``int8`` and ``int4`` are symmetric with fp16 scales, ``int4a`` has an fp16 minimum beside the scale.
    ``fp8`` is E4M3 with a float32 scale per 128 x 128, ``mxfp4`` E2M1 with an E8M0 scale per 32, ``nvfp4``
    E2M1 with an E4M3 scale per 16 and a float32 scale of the matrix.
    """

    name: str
    group: int = 0

    def __str__(self) -> str:
        return f"{self.name} g{self.group}" if self.name in _GROUPED else self.name

    @property
    def code(self) -> int:
        """Number of the format in the extension."""
        return CODES[self.name]

    @property
    def quantised(self) -> bool:
        """Whether weights are codes with scales."""
        return self.group > 0

    @property
    def rounds_activations(self) -> bool:
        """Whether the exact kernels take activations as int8 in groups of 32."""
        return self.quantised and self.name != "fp8"

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of scales and minima, without padding."""
        return _BITS[self.name] + (_SCALE_BITS[self.name] / self.group if self.group else 0.0)


def valid_formats() -> list[str]:
    """Every format as ``parse_format`` accepts it."""
    plain = [name for name in CODES if not _SCALE_BITS[name]]
    return plain + [f"{name} g{group}" for name in _GROUPED for group in GROUPS] + list(FIXED_GROUPS)


def parse_format(text: str) -> Format:
    """``"int8"``, ``"int4 g128"``, ``"int8_g64"``, ``"bf16"`` ... as a Format; the group is 32 by default.

    Raises InputError, with the valid formats, on anything else.
    """
    match = _PATTERN.match(text.lower())
    if match and match[1] in CODES:
        name, group = match[1], match[2]
        if name not in _GROUPED and group is None:
            return Format(name, FIXED_GROUPS.get(name, 0))
        if name in _GROUPED and (group is None or int(group) in GROUPS):
            return Format(name, int(group) if group else DEFAULT_GROUP)
    close = get_close_matches(text.strip().lower().replace("_", " "), [*valid_formats(), *CODES], n=1)
    hint = f" (did you mean '{close[0]}'?)" if close else ""
    raise InputError(f"unknown weight format '{text}'{hint}; valid: {', '.join(valid_formats())}")


def padded_k(fmt: Format, k: int) -> int:
    """k rounded up to a multiple of the group, at least of ``ACT_GROUP``."""
    unit = max(fmt.group, ACT_GROUP)
    return -(-k // unit) * unit


def block_bytes(fmt: Format, k: int) -> int:
    """Bytes of one packed block: codes, scales and extras of 16 rows, a multiple of 64."""
    k_pad = padded_k(fmt, k)
    codes = k_pad * _BITS[fmt.name] * BLOCK_ROWS // 8
    scales = k_pad // fmt.group * BLOCK_ROWS * _SCALE_BITS[fmt.name] // 8 if fmt.group else 0
    extra = 4 if fmt.name == "nvfp4" else 0
    return -(-(codes + scales + extra) // 64) * 64


def packed_bytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of a packed matrix of n outputs and k inputs."""
    return -(-n // BLOCK_ROWS) * block_bytes(fmt, k)


def expert_bytes(fmt: Format, hidden: int, intermediate: int, *, has_gate: bool, has_bias: bool) -> int:
    """Bytes of one expert in an arena: gate and up, down, float32 biases; a multiple of 64."""
    projections = 2 if has_gate else 1
    total = projections * packed_bytes(fmt, intermediate, hidden) + packed_bytes(fmt, hidden, intermediate)
    if has_bias:
        total += 4 * (projections * intermediate + hidden)
    return -(-total // 64) * 64
