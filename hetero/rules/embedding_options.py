"""Options of op ``embedding``: a large table of which a step reads a few rows, in main memory or on disk."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hetero.core import InputError
from hetero.hw.memory import parse_bytes
from hetero.rules.devices import check_device
from hetero.rules.mistakes import Mistakes
from hetero.rules.schema import TABLE_KEYS, Replace, check_keys
from hetero.rules.source import Value

TABLE_TIERS = ("auto", "ram", "disk")
"""Words of ``table: tier``; the first is the default."""

DEFAULT_ROWS_RAM = 64 << 20
"""Bytes of rows of a table on disk that main memory keeps, where a rule does not say."""


def embedding_options(replace: Replace, devices: Sequence[str]) -> Mapping[str, Any]:
    """``table: {tier, ram}`` with the defaults."""
    mistakes = Mistakes()
    for given, key in ((replace.experts, "experts"), (replace.kwargs, "kwargs")):
        with mistakes:
            if given is not None:
                given.where.fail(f"op 'embedding' takes no '{key}', but 'table: {{tier: ..., ram: ...}}'")
    with mistakes:
        if check_device(replace.device, replace.where, devices) != "cpu":
            replace.where.fail(
                "op 'embedding' keeps its table in main memory or on disk: write 'device: cpu'; 'op: keep' "
                "takes a GPU"
            )
    table = replace.table or Value({}, replace.where)
    with mistakes:
        check_keys(table, "'table'", TABLE_KEYS)
    get = table.mapping("'table'").get
    tier, ram = TABLE_TIERS[0], DEFAULT_ROWS_RAM
    with mistakes:
        tier = _tier(get("tier"))
    with mistakes:
        ram = _ram(get("ram"), tier)
    mistakes.tell()
    return {"table": {"tier": tier, "ram": ram}}


def refuse_table(replace: Replace) -> None:
    """For every other operator."""
    if replace.table is not None:
        replace.table.where.fail("'table' belongs to op 'embedding': where a large table of embeddings lies")


def _tier(value: Value | None) -> str:
    return TABLE_TIERS[0] if value is None else value.one_of("table", "tier", TABLE_TIERS)


def _ram(value: Value | None, tier: str) -> int:
    """Bytes of rows that main memory keeps of a table on disk; 0: none."""
    if value is None:
        return DEFAULT_ROWS_RAM
    if tier == "ram":
        value.where.fail("table: 'ram' is what main memory keeps of a table on disk: leave it out")
    number = isinstance(value.data, int) and not isinstance(value.data, bool)
    if number and value.data == 0:
        return 0
    try:
        return parse_bytes(value.data if number else value.text or value.kind)
    except InputError as error:
        value.where.fail(f"table: ram: {error}")
