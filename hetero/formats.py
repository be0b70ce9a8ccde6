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

SUPER_GROUP = 256
"""Values that share the fp16 scales of a format that has integer scales beside them."""


@dataclass(frozen=True, slots=True)
class _Kind:
    """What a format takes in memory. ``scale_bits``: of a row and group, minima and zeros included;
    of fp8: of a block of rows and group. ``super_scales``: fp16 numbers of a row and 256 values.
    ``row_bits``: of a scale of a whole row."""

    bits: int
    scale_bits: int = 0
    group: int = 0  # where it is part of the definition, and not of the name
    super_scales: int = 0
    row_bits: int = 0
    kept_only: bool = False


_KINDS = {
    "f32": _Kind(32),
    "bf16": _Kind(16),
    "int8": _Kind(8, 16),
    "int4": _Kind(4, 16),
    "int4a": _Kind(4, 32),
    "fp8": _Kind(8, 2, 128),
    "mxfp4": _Kind(4, 8, 32),
    "nvfp4": _Kind(4, 8, 16),
    "int8a": _Kind(8, 32, kept_only=True),
    "int4z": _Kind(4, 24, kept_only=True),
    "int8z": _Kind(8, 24, kept_only=True),
    "iq4_nl": _Kind(4, 16, 32, kept_only=True),
    "q4_k": _Kind(4, 16, 32, 2, kept_only=True),
    "q5_k": _Kind(5, 16, 32, 2, kept_only=True),
    "q2_k": _Kind(2, 16, 16, 2, kept_only=True),
    "q3_k": _Kind(3, 8, 16, 1, kept_only=True),
    "q6_k": _Kind(6, 8, 16, 1, kept_only=True),
    "iq4_xs": _Kind(4, 8, 32, 1, kept_only=True),
    "iq3_xxs": _Kind(4, 8, 32, 1, kept_only=True),
    "iq3_s": _Kind(4, 8, 32, 1, kept_only=True),
    "iq2_xxs": _Kind(3, 8, 32, 1, kept_only=True),
    "iq2_xs": _Kind(3, 8, 16, 1, kept_only=True),
    "iq2_s": _Kind(3, 8, 16, 1, kept_only=True),
    "iq1_s": _Kind(3, 8, 32, 1, kept_only=True),
    "iq1_m": _Kind(3, 8, 16, 1, kept_only=True),
    "fp8_row": _Kind(8, 0, 128, row_bits=32, kept_only=True),
}

CODES = {name: number for number, name in enumerate(_KINDS)}
"""Number of each format in the extension (``enum Format`` of cpu_ext/kernels.h)."""

FIXED_GROUPS = {name: kind.group for name, kind in _KINDS.items() if kind.group}
"""Formats whose group is part of their definition, and not of their name."""

FP8 = ("fp8", "fp8_row")
"""Formats of E4M3 codes, which are multiplied with floats."""

FP8_TILE = 128
"""Rows that share a scale of fp8, as many as its group has columns."""

_BLOCK_BYTES = {"q2_k": 84, "iq2_xxs": 66, "iq2_xs": 74, "iq2_s": 82, "iq1_s": 50, "iq1_m": 56}
"""GGUF types of 1 and 2 bits, which take more memory packed: bytes of their blocks of ``SUPER_GROUP``."""

_ORDERED = ("int4", "int8", "int4z", "int8z")
"""Formats of checkpoints whose groups may be of columns that are no neighbours."""

_GROUPED = tuple(name for name, kind in _KINDS.items() if kind.scale_bits and not kind.group)
_PATTERN = re.compile(r"^\s*([a-z0-9_]+?)(?:[\s_-]*g(\d+))?\s*$")


@dataclass(frozen=True, slots=True)
class Format:
    """A weight format: ``f32`` and ``bf16`` (group 0), or codes that share a scale per ``group`` of k.

    ``int8`` and ``int4`` are symmetric with fp16 scales, ``int4a`` has an fp16 minimum beside the scale.
    ``fp8`` is E4M3 with a float32 scale per 128 x 128, ``mxfp4`` E2M1 with an E8M0 scale per 32, ``nvfp4``
    E2M1 with an E4M3 scale per 16 and a float32 scale of the matrix. The others are those of checkpoints
    (``kept_only``): ``fp8_row`` as fp8 with a float32 scale per row; ``int8a`` as int4a; ``int4z`` and
    ``int8z`` with an integer zero per group beside the fp16 scale; the K and IQ types of GGUF with an integer
    scale, of some an integer minimum, per 16 or 32 and fp16 scales of these per 256.
    hetero/quant/k_formats.py has what each takes.
    """

    name: str
    group: int = 0
    blocks: bool = False
    """Whether weights stay in the blocks of their GGUF file in memory and are packed in every step that uses
    them: as few bytes as in the file, and slower. See ``in_blocks``."""
    ordered: bool = False
    """Whether columns stand by their groups: those of gate and up in an order that each expert has beside its
    weights, int32 [hidden], and by which it takes its inputs; those of down in one that the rows of gate and
    up follow. Gate, up and down have it together."""

    def __str__(self) -> str:
        if self.blocks:
            return f"{self.name} blocks"
        text = f"{self.name} g{self.group}" if self.name in _GROUPED else self.name
        return f"{text} ordered" if self.ordered else text

    @property
    def packed(self) -> Format:
        """The format that kernels read."""
        return Format(self.name, self.group)

    @property
    def code(self) -> int:
        """Number of the format in the extension."""
        return CODES[self.name]

    @property
    def quantised(self) -> bool:
        """Whether weights are codes with scales."""
        return self.group > 0

    @property
    def kept_only(self) -> bool:
        """Whether only weights that are quantised so already can be stored: there is no packing of floats."""
        return self.ordered or _KINDS[self.name].kept_only

    @property
    def code_bits(self) -> int:
        """Bits of a packed code."""
        return _KINDS[self.name].bits

    @property
    def super_scales(self) -> int:
        """Fp16 numbers that a row has per 256 values beside the integers of its groups."""
        return _KINDS[self.name].super_scales

    @property
    def rounds_activations(self) -> bool:
        """Whether the exact kernels take activations as int8 in groups of 32."""
        return self.quantised and self.name not in FP8

    @property
    def bits_per_weight(self) -> float:
        """Bits of a weight with its share of scales and minima, without padding and scales of whole rows."""
        if self.blocks:
            return 8 * _BLOCK_BYTES[self.name] / SUPER_GROUP
        kind = _KINDS[self.name]
        shared = kind.scale_bits / self.group if self.group else 0.0
        return kind.bits + shared + 16 * kind.super_scales / SUPER_GROUP


GPU_FORMATS = tuple(name for name in _KINDS if name != "f32")
"""Names of the formats that the kernels for experts on a GPU read."""

GPU_LINEAR_FORMATS = ("bf16", "int8", "int4", "fp8")
"""Names of the formats that the kernels for linear layers on a GPU read."""


def on_gpu(fmt: Format) -> bool:
    """Whether the kernels for experts on a GPU read a format."""
    return fmt.name in GPU_FORMATS and not fmt.blocks


def valid_formats(*, kept_only: bool = False) -> list[str]:
    """Every format that weights can be put into, as ``parse_format`` accepts it; ``kept_only``: every other,
    which only keeps the values of checkpoints that have it."""
    names = [name for name, kind in _KINDS.items() if kind.kept_only == kept_only]
    plain = [name for name in names if not _KINDS[name].group and name not in _GROUPED]
    grouped = [f"{name} g{group}" for name in names if name in _GROUPED for group in GROUPS]
    return plain + grouped + [name for name in names if name in FIXED_GROUPS]


def in_blocks(fmt: Format) -> Format:
    """The same values in the blocks of their file, for types of 1 and 2 bits; else ``fmt``."""
    return Format(fmt.name, fmt.group, blocks=True) if fmt.name in _BLOCK_BYTES else fmt


def in_order(fmt: Format) -> Format:
    """The same weights with columns that stand by their groups, see ``Format.ordered``."""
    return Format(fmt.name, fmt.group, ordered=True)


def parse_format(text: str) -> Format:
    """``"int8"``, ``"int4 g128"``, ``"int8_g64"``, ``"bf16"`` ... as a Format; the group is 32 by default.

    Raises InputError, with the valid formats, on anything else.
    """
    first, _, rest = text.strip().lower().partition(" ")
    if rest == "blocks" and first in _BLOCK_BYTES:
        return in_blocks(Format(first, FIXED_GROUPS[first]))
    if rest.endswith("ordered") and first in _ORDERED:
        return in_order(parse_format(f"{first} {rest.removesuffix('ordered')}"))
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


def parse_target(text: str) -> Format:
    """``parse_format`` of a format that weights are to be put into.

    Raises InputError also for one that only keeps the values of checkpoints.
    """
    fmt = parse_format(text)
    if fmt.kept_only:
        raise InputError(
            f"weights cannot be turned into '{fmt}': it only keeps the values of checkpoints that have it; "
            f"valid: {', '.join(valid_formats())}"
        )
    return fmt


def padded_k(fmt: Format, k: int) -> int:
    """k rounded up to a multiple of the group, at least of ``ACT_GROUP``."""
    unit = max(fmt.group, ACT_GROUP)
    return -(-k // unit) * unit


def block_bytes(fmt: Format, k: int) -> int:
    """Bytes of one block: codes, scales and extras of 16 rows, or these rows as in their file, a multiple of
    64."""
    if fmt.blocks:
        return -(-BLOCK_ROWS * -(-k // SUPER_GROUP) * _BLOCK_BYTES[fmt.name] // 64) * 64
    k_pad = padded_k(fmt, k)
    kind = _KINDS[fmt.name]
    codes = k_pad * kind.bits * BLOCK_ROWS // 8
    scales = k_pad // fmt.group * BLOCK_ROWS * kind.scale_bits // 8 if fmt.group else 0
    extra = 4 if fmt.name == "nvfp4" else -(-k_pad // SUPER_GROUP) * 2 * BLOCK_ROWS * kind.super_scales
    extra += BLOCK_ROWS * kind.row_bits // 8
    return -(-(codes + scales + extra) // 64) * 64


def packed_bytes(fmt: Format, n: int, k: int) -> int:
    """Bytes of a packed matrix of n outputs and k inputs."""
    return -(-n // BLOCK_ROWS) * block_bytes(fmt, k)


def expert_bytes(
    fmt: Format,
    hidden: int,
    intermediate: int,
    *,
    has_gate: bool,
    has_bias: bool,
    down_format: Format | None = None,
) -> int:
    """Bytes of one expert in an arena: gate and up, down, float32 biases, the order of its inputs where the
    format has one; a multiple of 64.

    ``down_format``: of the down projection where it is another.
    """
    projections = 2 if has_gate else 1
    total = projections * packed_bytes(fmt, intermediate, hidden)
    total += packed_bytes(down_format or fmt, hidden, intermediate)
    if has_bias:
        total += 4 * (projections * intermediate + hidden)
    if fmt.ordered:
        total += 4 * hidden
    return -(-total // 64) * 64
