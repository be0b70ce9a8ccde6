"""Op ``embedding`` in rule files: its options, and one message for each mistake."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.rules.embedding_options import DEFAULT_ROWS_RAM
from hetero.rules.explain import IN_RAM_ROWS, explain, totals
from hetero.rules.mistakes import RuleError
from tests.unit.rules_tree import place, tree, write

FILE = """rules:
  - name: table
    match: {{name: '{name}'}}
    replace: {replace}
  - name: rest
    match: {{name: '.*'}}
    replace: {{op: keep}}
"""
EMBED = "model.embed_tokens"


def rules(folder: Path, replace: str, name: str = EMBED) -> Path:
    return write(folder, FILE.format(name=name, replace=replace))


@pytest.mark.parametrize(
    ("table", "want"),
    [
        ("", {"tier": "auto", "ram": DEFAULT_ROWS_RAM}),
        (", table: {}", {"tier": "auto", "ram": DEFAULT_ROWS_RAM}),
        (", table: {tier: ram}", {"tier": "ram", "ram": DEFAULT_ROWS_RAM}),
        (", table: {tier: disk, ram: 512MiB}", {"tier": "disk", "ram": 512 << 20}),
        (", device: cpu, table: {ram: 0}", {"tier": "auto", "ram": 0}),
    ],
)
def test_options_have_defaults(tmp_path: Path, table: str, want: dict[str, object]) -> None:
    placement = place(rules(tmp_path, f"{{op: embedding{table}}}"))
    (one,) = placement.replacements()
    assert (one.module, one.op, one.device) == (EMBED, "embedding", "cpu")
    assert one.options == {"table": want}


@pytest.mark.parametrize(
    ("replace", "want"),
    [
        ("{op: embedding, table: {tier: dsk}}", "table: unknown tier 'dsk'; did you mean 'disk'?"),
        ("{op: embedding, table: {tier: nvme}}", "table: unknown tier 'nvme'; it is one of auto, ram, disk"),
        ("{op: embedding, table: {tier: disk, ram: lots}}", "table: ram: 'lots' is no size: write one like"),
        ("{op: embedding, table: {tier: disk, ram: false}}", "table: ram: 'false' is no size"),
        ("{op: embedding, table: {tier: ram, ram: 1GiB}}", "of a table on disk: leave it out"),
        ("{op: embedding, table: {format: int8}}", "unknown key 'format' in 'table'; 'table' has tier, ram"),
        ("{op: embedding, table: disk}", "'table' must be a mapping"),
        ("{op: embedding, device: cuda:0}", "op 'embedding' keeps its table in main memory or on disk"),
        ("{op: embedding, kwargs: {tier: disk}}", "op 'embedding' takes no 'kwargs'"),
        ("{op: embedding, experts: {tier: disk}}", "op 'embedding' takes no 'experts'"),
        ("{op: embedding, tabel: {tier: disk}}", "unknown key 'tabel' in 'replace'; did you mean 'table'?"),
        ("{op: keep, table: {tier: disk}}", "'table' belongs to op 'embedding'"),
        ("{op: linear, device: cuda:0, table: {}}", "'table' belongs to op 'embedding'"),
        ("{op: fused, device: cuda:0, table: {}}", "'table' belongs to op 'embedding'"),
        ("{op: moe, table: {}}", "'table' belongs to op 'embedding'"),
        ("{class: my.Operator, table: {}}", "'table' belongs to op 'embedding'"),
    ],
)
def test_each_mistake_has_its_message(tmp_path: Path, replace: str, want: str) -> None:
    path = rules(tmp_path, replace)
    with pytest.raises(RuleError) as caught:
        place(path)
    assert f"{path}:4: rule 1 'table': " in str(caught.value)
    assert want in str(caught.value)


def test_it_replaces_tables_of_embeddings_only(tmp_path: Path) -> None:
    with pytest.raises(
        RuleError, match="op 'embedding' replaces tables of embeddings, and lm_head is a Linear"
    ):
        place(rules(tmp_path, "{op: embedding}", "lm_head"))


def test_a_table_counts_where_it_lies(tmp_path: Path) -> None:
    """Two bytes a value where no checkpoint tells, as most have it; rows that RAM keeps besides."""
    modules = tree()
    ram = explain(place(rules(tmp_path, "{op: embedding}"), modules), modules)
    (line,) = [line for line in ram if line.module == EMBED]
    assert (line.device, line.format, line.bytes) == ("cpu", "bfloat16", 1280)
    disk = explain(place(rules(tmp_path, "{op: embedding, table: {tier: disk, ram: 500}}"), modules), modules)
    lines = [line for line in disk if line.module == EMBED]
    assert [(line.op, line.device, line.bytes) for line in lines] == [
        ("embedding", "disk", 1280),
        (IN_RAM_ROWS, "cpu", 500),
    ]
    assert totals(disk)["cpu"] == totals(ram)["cpu"] - 1280 + 500
