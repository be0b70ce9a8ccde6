"""Options of rules that are about a GPU: fused layers, the experts' cache, the share that it reads."""

from __future__ import annotations

from pathlib import Path

import pytest

from hetero.core import InputError
from hetero.formats import parse_format
from hetero.rules.explain import CACHE, explain, totals
from hetero.rules.gpu_options import CacheSize, parse_cache
from tests.unit.rules_tree import GOOD, place, tree, write

DEVICES = ("cpu", "cuda:0")
BLOCK = GOOD.replace("{op: moe, ", "{op: moe, device: cuda:0, ", 1)
FUSED = (
    "  - name: layers\n    match: {class: '*DecoderLayer'}\n    replace: {op: fused, device: cuda:0}\n"
    "  - name: rest"
)


def with_experts(options: str) -> str:
    assert "experts: {" in BLOCK
    return BLOCK.replace("experts: {", f"experts: {{{options}, ", 1)


def error(path: Path) -> str:
    with pytest.raises(InputError) as caught:
        place(path, devices=DEVICES)
    return str(caught.value)


@pytest.mark.parametrize(
    ("word", "want"),
    [
        ("auto", CacheSize()),
        ("0", CacheSize(nbytes=0)),
        ("12GiB", CacheSize(nbytes=12 << 30)),
        ("30%", CacheSize(part=0.3)),
        ("100 %", CacheSize(part=1.0)),
    ],
)
def test_sizes_of_a_cache(word: str, want: CacheSize) -> None:
    assert parse_cache(word) == want


@pytest.mark.parametrize("word", ["", "all", "-1", "101%", "12 GiBs", "0.5"])
def test_other_words_are_no_size(word: str) -> None:
    with pytest.raises(InputError, match=r"must be auto, 0, a size|more than all"):
        parse_cache(word)


def test_slots_are_whole_experts_within_the_size() -> None:
    total = 48 * 64 * 100  # 48 blocks of 64 experts of 100 bytes
    assert CacheSize(part=0.25).slots(64, total) == 16
    assert CacheSize(nbytes=48 * 100 * 10 + 99).slots(64, total) == 10
    assert CacheSize(nbytes=1 << 40).slots(64, total) == 64
    assert CacheSize(nbytes=0).slots(64, total) == 0
    assert CacheSize().slots(64, total) is None


def test_options_are_read(tmp_path: Path) -> None:
    given = with_experts("cache: 30%, share: 0.25, defer: 3")
    options = next(place(write(tmp_path, given), devices=DEVICES).replacements()).options["experts"]
    assert (options["cache"], options["share"], options["defer"]) == (CacheSize(part=0.3), 0.25, 3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("cache: lots", "experts: cache: 'lots' must be auto, 0, a size like 12GiB or a part like 30%"),
        ("cache: 120%", "experts: cache: '120%' is more than all experts"),
        ("share: 1.5", "experts: 'share' must be auto or a number from 0 to 1, not 1.5"),
        ("share: true", "experts: 'share' must be auto or a number from 0 to 1, not True"),
        ("share: half", "experts: 'share' must be auto or a number from 0 to 1, not 'half'"),
        ("defer: 1.5", "experts: 'defer' must be a number of experts, 0 or more, not 1.5"),
        ("defer: -1", "experts: 'defer' must be a number of experts, 0 or more, not -1"),
        ("defer: true", "experts: 'defer' must be a number of experts, 0 or more, not True"),
        ("tier: disk, defer: 1", "experts: 'defer' needs all experts in main memory, not 'tier: disk'"),
        ("cahce: 1GiB", "unknown key 'cahce' in 'experts'; did you mean 'cache'?"),
        ("tier: disk, cache: 1GiB", "experts: 'cache' needs all experts in main memory, not 'tier: disk'"),
        ("device: cuda:0, cache: 9GiB", "experts: 'cache' is of experts on the CPU, and these are on 'cuda"),
    ],
)
def test_each_mistake_of_experts(tmp_path: Path, options: str, message: str) -> None:
    found = error(write(tmp_path, with_experts(options)))
    assert f"my.yaml:4: rule 1 'experts': {message}" in found


def test_a_block_on_the_cpu_has_no_cache(tmp_path: Path) -> None:
    found = error(write(tmp_path, GOOD.replace("experts: {", "experts: {share: 0.5, ", 1)))
    assert "experts: 'share' needs its block on a GPU: write 'device: cuda:0' by 'op: moe'" in found


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("keep", ""),
        ("auto mxfp4", ""),
        ("auto f32", "experts on 'cuda:0': no kernels for f32; it is one of bf16, int8,"),
        ("keep blocks", "experts on 'cuda:0' are not read from the blocks of a file: write 'keep'"),
    ],
)
def test_formats_of_experts_on_a_gpu(tmp_path: Path, word: str, message: str) -> None:
    text = BLOCK.replace("experts: {", "experts: {device: cuda:0, ", 1)
    assert text.count("format: int4") == 1
    path = write(tmp_path, text.replace("format: int4", f"format: {word}"))
    if message:
        assert f"my.yaml:4: rule 1 'experts': {message}" in error(path)
    else:
        options = next(place(path, devices=DEVICES).replacements()).options["experts"]
        assert (options["device"], options["format"]) == ("cuda:0", word)


def test_fused_layers_leave_their_parts_to_other_rules(tmp_path: Path) -> None:
    placement = place(write(tmp_path, BLOCK.replace("  - name: rest", FUSED, 1)), devices=DEVICES)
    layer = placement.by_module["model.layers.3"]
    assert (layer.op, layer.device, layer.owner) == ("fused", "cuda:0", None)
    assert layer.options == {"lanes": 1}
    for text, lanes in (("1", 1), ("2", 2), ("auto", 0)):
        fused = FUSED.replace("device: cuda:0", f"device: cuda:0, kwargs: {{lanes: {text}}}", 1)
        told = place(write(tmp_path, BLOCK.replace("  - name: rest", fused, 1)), devices=DEVICES)
        assert told.by_module["model.layers.3"].options == {"lanes": lanes}
    assert placement.by_module["model.layers.3.mlp"].op == "moe"
    assert placement.by_module["model.layers.3.self_attn"].op == "keep"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("fused, device: cuda:0", "fused", "op 'fused' runs on a GPU: write 'device: cuda:0'"),
        ("fused, device: cuda:0", "fused, device: cuda:0, kwargs: {lane: 1}", "did you mean 'lanes'?"),
        (
            "fused, device: cuda:0",
            "fused, device: cuda:0, kwargs: {lanes: 3}",
            "op 'fused': 'lanes' must be 1, 2 or auto, not 3",
        ),
        ("fused, device: cuda:0", "fused, device: cuda:0, experts: {}", "op 'fused' takes no 'experts'"),
        ("op: fused", "op: fuse", "unknown op 'fuse'; did you mean 'fused'?"),
    ],
)
def test_each_mistake_of_fused(tmp_path: Path, old: str, new: str, message: str) -> None:
    text = BLOCK.replace("  - name: rest", FUSED, 1)
    assert message in error(write(tmp_path, text.replace(old, new, 1)))


def test_linear_layers_of_a_block(tmp_path: Path) -> None:
    text = BLOCK.replace("device: cuda:0,", "device: cuda:0, kwargs: {format: int8},", 1)
    modules = tree(layers=1)
    lines = explain(place(write(tmp_path, text), modules, devices=DEVICES), modules, "bfloat16")
    found = next(line for line in lines if line.module.endswith("shared_expert.up_proj"))
    assert (found.format, found.bytes) == ("int8 g32", int(2048 * parse_format("int8").bits_per_weight / 8))
    wrong = write(tmp_path, text.replace("format: int8", "format: int4a"))
    assert "linear layers on 'cuda:0': no kernels for int4a" in error(wrong)
    on_cpu = write(tmp_path, text.replace("device: cuda:0, ", "", 1))
    assert "'kwargs: {format: ...}' of op 'moe' runs on a GPU" in error(on_cpu)


def test_a_cache_counts_on_its_gpu(tmp_path: Path) -> None:
    modules = tree(layers=4)
    plain = explain(place(write(tmp_path, BLOCK), modules, devices=DEVICES), modules)
    lines = explain(place(write(tmp_path, with_experts("cache: 50%")), modules, devices=DEVICES), modules)
    caches = [line for line in lines if line.op == CACHE]
    assert [line.module for line in caches] == [f"model.layers.{i}.mlp.experts" for i in range(4)]
    assert {line.device for line in caches} == {"cuda:0"}
    experts = sum(line.bytes for line in plain if line.module.endswith("mlp.experts"))
    assert sum(line.bytes for line in caches) == experts // 2
    assert totals(lines)["cuda:0"] == totals(plain)["cuda:0"] + experts // 2
    assert totals(lines)["cpu"] == totals(plain)["cpu"]
