"""The parts of an expert, their shapes, and the bytes that a block of experts takes packed."""

from __future__ import annotations

from typing import Any, Literal

from hetero import _cpu
from hetero.core import ExpertSpec, InputError
from hetero.formats import Format
from hetero.quant.ggml_types import ggml_type, tables

Part = Literal["gate", "up", "down", "gate_bias", "up_bias", "down_bias", "order"]

PARTS: tuple[Part, ...] = ("gate", "up", "down", "gate_bias", "up_bias", "down_bias", "order")


def packed_nbytes(spec: ExpertSpec, fmt: Format, down_format: Format | None = None) -> int:
    """Bytes of all experts of a block, packed. Raises InputError where a format cannot hold the shape."""
    down = down_format or fmt
    try:
        return _cpu.experts_bytes(
            fmt.code,
            fmt.group,
            down.code,
            down.group,
            spec.num_experts,
            spec.hidden,
            spec.intermediate,
            spec.has_bias,
            spec.has_gate,
            stored(fmt)[0],
            stored(down)[0],
            fmt.ordered,
        )
    except ValueError as error:
        raise InputError(f"experts of {spec.hidden} x {spec.intermediate} in {fmt}: {error}") from None


def stored(fmt: Format) -> tuple[int, Any, Any]:
    """The GGUF type in whose blocks weights stay, -1 for none, and its tables."""
    if not fmt.blocks:
        return -1, None, None
    kind = ggml_type(fmt.name.upper())
    of_kind = tables(kind)
    return kind.number, of_kind["grid"], of_kind["numbers"]


def has_part(spec: ExpertSpec, part: Part, fmt: Format) -> bool:
    """Whether experts of a shape and format have that part."""
    if part == "order":
        return fmt.ordered
    if part.endswith("_bias") and not spec.has_bias:
        return False
    return spec.has_gate or not part.startswith("gate")


def part_shape(spec: ExpertSpec, part: Part) -> tuple[int, ...]:
    """As it is put: weights [rows, columns], a bias or an order [values]."""
    if part == "order":
        return (spec.hidden,)
    if part.endswith("_bias"):
        return (spec.hidden if part == "down_bias" else spec.intermediate,)
    return (spec.hidden, spec.intermediate) if part == "down" else (spec.intermediate, spec.hidden)
