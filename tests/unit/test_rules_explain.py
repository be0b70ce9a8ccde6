"""Bytes of a placement, folded and in total."""

from __future__ import annotations

from pathlib import Path

from hetero.formats import expert_bytes, parse_format
from hetero.rules.explain import IN_RAM, explain, group, human, totals
from tests.unit.rules_tree import GOOD, SPEC, place, tree, write


def bytes_of(fmt: str) -> int:
    one = expert_bytes(parse_format(fmt), SPEC.hidden, SPEC.intermediate, has_gate=True, has_bias=False)
    return SPEC.num_experts * one


def test_every_byte_is_on_a_device(tmp_path: Path) -> None:
    modules = tree(dense=2)
    placement = place(write(tmp_path, GOOD.replace("{op: keep}", "{op: keep, device: cuda:0}")), modules)
    lines = explain(placement, modules, "bfloat16")
    dense = sum(m.own_params for m in modules if m.experts is None)
    assert sum(totals(lines).values()) == 2 * dense + 10 * bytes_of("int4")
    in_blocks = 10 * (256 + 2048)
    assert totals(lines) == {"cpu": 2 * in_blocks + 10 * bytes_of("int4"), "cuda:0": 2 * (dense - in_blocks)}
    wide = explain(placement, modules)
    assert totals(wide)["cuda:0"] == 2 * totals(lines)["cuda:0"]


def test_editing_the_format_changes_the_table(tmp_path: Path) -> None:
    modules = tree()
    tables = {}
    for fmt in ("int4", "int8"):
        lines = explain(place(write(tmp_path, GOOD.replace("int4", fmt)), modules), modules)
        tables[fmt] = {(line.module, line.format, line.bytes) for line in lines}
    changed = tables["int4"] ^ tables["int8"]
    assert changed == {
        (f"model.layers.{i}.mlp.experts", f"{fmt} g32", bytes_of(fmt)) for i in range(12) for fmt in tables
    }
    assert 1.7 < bytes_of("int8") / bytes_of("int4") < 2


def test_packed_linear_layers_count_their_bits(tmp_path: Path) -> None:
    modules = tree(layers=1)
    text = (
        "rules:\n  - match: {name: lm_head}\n"
        "    replace: {op: linear, device: cuda:0, kwargs: {format: int8}}\n"
        "  - match: {name: '.*'}\n    replace: {op: keep}\n"
    )
    lines = explain(place(write(tmp_path, text), modules), modules)
    weights = next(m.own_params for m in modules if m.name == "lm_head")
    found = [(line.format, line.device, line.bytes) for line in lines if line.module == "lm_head"]
    assert found == [("int8 g32", "cuda:0", int(weights * 8.5 / 8))]


def test_experts_that_no_operator_takes_stay_dense(tmp_path: Path) -> None:
    modules = tree(layers=1)
    path = write(tmp_path, "rules:\n  - match: {name: '.*'}\n    replace: {op: keep}\n")
    experts = [line for line in explain(place(path, modules), modules) if line.module.endswith("experts")]
    assert [(line.format, line.bytes) for line in experts] == [("float32", 4 * SPEC.params)]


def test_folding_keeps_count_and_bytes(tmp_path: Path) -> None:
    modules = tree(dense=3)
    lines = explain(place(write(tmp_path, GOOD), modules), modules)
    groups = {one.pattern: one for one in group(lines)}
    assert sum(one.count for one in groups.values()) == len(modules)
    assert sum(one.bytes for one in groups.values()) == sum(totals(lines).values())
    assert groups["model.layers.{3-11}.mlp.experts"].bytes == 9 * bytes_of("int4")
    assert groups["model.layers.{0-2}.mlp"].line.op == "keep"
    assert groups["model.layers.{3-11}.mlp.gate"].line.op == "moe"


def test_folded_numbers(tmp_path: Path) -> None:
    odd = "  - name: odd\n    match: {class: TinyAttention, layers: '%s'}\n    replace: {op: keep}\n"
    for layers, want in (("1,3,5", "{1,3,5}"), ("1,3,5,7", "{4 of 1-7}"), ("4", "4")):
        path = write(tmp_path, GOOD.replace("rules:\n", "rules:\n" + odd % layers))
        modules = tree()
        patterns = [g.pattern for g in group(explain(place(path, modules), modules)) if g.line.rule == "odd"]
        assert patterns == [f"model.layers.{want}.self_attn"]


def test_bytes_for_people() -> None:
    assert [human(n) for n in (0, 1023, 1536, 3 << 20, 5 << 30, 3 << 40)] == [
        "0 B",
        "1023 B",
        "1.5 KiB",
        "3.0 MiB",
        "5.0 GiB",
        "3.00 TiB",
    ]


def test_the_disk_tier_counts_as_disk_and_ram_as_its_rule_says(tmp_path: Path) -> None:
    modules = tree(layers=2)
    experts = "experts: {format: int4"
    assert experts in GOOD
    plain = explain(place(write(tmp_path, GOOD), modules), modules)
    packed = sum(line.bytes for line in plain if line.module.endswith("experts"))
    everything = explain(
        place(write(tmp_path, GOOD.replace(experts, f"{experts}, tier: disk")), modules), modules
    )
    assert totals(everything)["disk"] == packed
    assert totals(everything)["cpu"] == totals(plain)["cpu"] - packed
    some = f"{experts}, tier: disk, ram: {packed // 2}"
    lines = explain(place(write(tmp_path, GOOD.replace(experts, some)), modules), modules)
    held = [line for line in lines if line.op == IN_RAM]
    assert [line.device for line in held] == ["cpu", "cpu"]
    assert sum(line.bytes for line in held) == packed // 2
    assert totals(lines)["disk"] == packed
