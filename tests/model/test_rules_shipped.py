"""Every shipped rule file against every model type that it claims, on tiny trees and on the known shapes."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch

from hetero.core import MOE_BLOCK, InputError, ModuleInfo
from hetero.model.build import build_meta, describe
from hetero.model.config import load_config
from hetero.model.moe_types import REFUSED
from hetero.model.shapes import resolve_model, shape_names
from hetero.rules import Placement, load_rules, match
from hetero.rules.defaults import default_rules_for, shipped
from hetero.rules.explain import explain, totals
from tests.model.tiny_moe import moe_types, tiny_config

DEVICES = ("cpu", "cuda:0")
SUPPORTED = [t for t in moe_types() if t not in REFUSED]
CLAIMS = [(one.name, t) for one in shipped() for t in one.rules.models or SUPPORTED]
# The files for any type are checked in full with these; each type is checked once more below.
SHAPES = [(name, gpu) for name in shape_names() for gpu in (False, True)]


@cache
def tiny_tree(model_type: str) -> tuple[ModuleInfo, ...]:
    torch.set_num_threads(1)
    return tuple(describe(build_meta(tiny_config(model_type))))


@cache
def shape_tree(name: str) -> tuple[str, tuple[ModuleInfo, ...]]:
    ref = resolve_model(f"synthetic:{name}")
    return ref.model_type, tuple(describe(build_meta(load_config(ref.config))))


def assert_sound(placement: Placement, modules: tuple[ModuleInfo, ...], gpu: bool) -> None:
    """Every block is replaced, nothing else is but what fused layers ask for, and everything is where the
    file's name says."""
    blocks = [m.name for m in modules if MOE_BLOCK in m.classes]
    assert blocks
    replaced: dict[str | None, list[str]] = {}
    for assignment in placement.replacements():
        replaced.setdefault(assignment.op, []).append(assignment.module)
    assert replaced.pop("moe") == blocks
    fused = set(replaced.pop("fused", ()))
    assert fused == ({m.name for m in modules if m.classes[0].endswith("DecoderLayer")} if fused else set())
    linear = set(replaced.pop("linear", ()))
    assert bool(linear) == bool(fused)
    assert linear <= {m.name for m in modules if "Linear" in m.classes}
    tables = replaced.pop("embedding", [])
    assert tables == [
        m.name
        for m in modules
        if m.name.endswith((".ngram_embedding", "_per_layer")) and "Embedding" in m.classes
    ]
    assert not replaced
    placed = {a.module for a in placement.assignments}
    assert placed >= {m.name for m in modules if m.own_params}
    experts = [m.name for m in modules if m.experts is not None]
    assert {placement.device_of(name) for name in experts} == {"cpu"}
    dense = {
        placement.device_of(m.name)
        for m in modules
        if m.own_params and m.experts is None and m.name not in tables
        and not (fused and m.name.endswith("embed_tokens"))
        and not m.name.startswith(tuple(f"{name}." for name in experts))
    }  # fmt: skip
    assert dense == {"cuda:0" if gpu else "cpu"}


@pytest.mark.parametrize(("file", "model_type"), CLAIMS)
def test_a_file_places_every_type_that_it_claims(file: str, model_type: str) -> None:
    modules = tiny_tree(model_type)
    placement = match(load_rules(file), modules, devices=DEVICES, model_type=model_type)
    assert_sound(placement, modules, file.endswith("-gpu"))


@pytest.mark.parametrize(("name", "gpu"), SHAPES)
def test_every_known_shape_has_a_default_file(name: str, gpu: bool) -> None:
    model_type, modules = shape_tree(name)
    path = default_rules_for(model_type, gpu)
    assert path.stem.endswith("-gpu" if gpu else "-cpu")
    assert path.stem != f"default-{'gpu' if gpu else 'cpu'}"
    placement = match(load_rules(path), modules, devices=DEVICES, model_type=model_type)
    assert_sound(placement, modules, gpu)
    assert set(totals(explain(placement, modules))) == ({"cpu", "cuda:0"} if gpu else {"cpu"})


def test_a_cpu_only_machine_can_use_a_gpu_file_with_an_override() -> None:
    _, modules = shape_tree("qwen3-30b-a3b")
    placement = match(load_rules("default-gpu", {"gpu": "cpu"}), modules, devices=("cpu",))
    assert {a.device for a in placement.assignments} == {"cpu"}


def test_fused_layers_say_what_a_cpu_can_do() -> None:
    _, modules = shape_tree("qwen3-30b-a3b")
    with pytest.raises(InputError, match=r"op 'fused' runs on a GPU: .* 'op: keep' for the CPU"):
        match(load_rules("qwen-gpu", {"gpu": "cpu"}), modules, devices=("cpu",))


def test_no_two_families_claim_a_type() -> None:
    for suffix in ("-cpu", "-gpu"):
        claimed = [t for one in shipped() if one.name.endswith(suffix) for t in one.rules.models or ()]
        assert len(claimed) == len(set(claimed))


def test_an_unclaimed_type_gets_the_file_for_any() -> None:
    assert default_rules_for("ernie4_5_moe", False).name == "default-cpu.yaml"
    assert default_rules_for("ernie4_5_moe", True).name == "default-gpu.yaml"
    assert default_rules_for("qwen3_next", False).name == "qwen-cpu.yaml"


def test_every_shipped_file_says_what_it_is_for() -> None:
    for one in shipped():
        assert one.rules.description, one.name
        assert "models" in one.path.read_text(), one.name


def test_the_example_of_the_manual_is_a_good_file(tmp_path: Path) -> None:
    manual = (Path(__file__).parents[2] / "docs" / "rules.md").read_text(encoding="utf-8")
    example = manual.split("```yaml\n")[1].split("```")[0]
    path = tmp_path / "example.yaml"
    path.write_text(example, encoding="utf-8")
    model_type, modules = shape_tree("qwen3-30b-a3b")
    placement = match(load_rules(path), modules, devices=DEVICES, model_type=model_type)
    assert_sound(placement, modules, gpu=True)
    assert placement.notes == ()
