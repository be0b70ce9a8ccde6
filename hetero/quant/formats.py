"""The formats for this package; they stand in ``hetero.formats``, below the rules, which need them."""

from hetero.formats import (
    ACT_GROUP,
    BLOCK_ROWS,
    CODES,
    DEFAULT_GROUP,
    FIXED_GROUPS,
    FP8_TILE,
    GROUPS,
    Format,
    block_bytes,
    expert_bytes,
    packed_bytes,
    padded_k,
    parse_format,
    valid_formats,
)

__all__ = [
    "ACT_GROUP",
    "BLOCK_ROWS",
    "CODES",
    "DEFAULT_GROUP",
    "FIXED_GROUPS",
    "FP8_TILE",
    "GROUPS",
    "Format",
    "block_bytes",
    "expert_bytes",
    "packed_bytes",
    "padded_k",
    "parse_format",
    "valid_formats",
]
