"""Quantised checkpoints that cannot be read: one clear message each, before a weight is."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hetero.core import InputError
from hetero.engine.load import load_model
from hetero.model.build import build_meta, load_config
from hetero.model.loader import plan_load
from hetero.model.sources import open_source
from tests.model.checkpoints import edit_config, edit_tensors
from tests.model.quantised import SCHEMES, write_gpt_oss, write_quantised

LAYER = "model.layers.0.self_attn.q_proj"
EXPERT = "model.layers.0.mlp.experts.2.up_proj"


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A fresh copy of a checkpoint of a scheme, written once."""
    made: dict[str, Path] = {}

    def fresh(scheme: str) -> Path:
        if scheme not in made:
            made[scheme] = tmp_path_factory.mktemp(scheme)
            if scheme == "gpt_oss":
                write_gpt_oss(made[scheme])
            else:
                write_quantised(made[scheme], "qwen3_moe", SCHEMES[scheme])
        target = tmp_path_factory.mktemp("copy") / "model"
        shutil.copytree(made[scheme], target)
        return target

    return fresh


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(InputError) as error:
        plan_load(build_meta(load_config(folder)), open_source(folder))
    told(error.value, words)


def told(error: InputError, words: tuple[str, ...]) -> None:
    message = str(error)
    assert "\n" not in message
    assert error.exit_code == 2
    for word in words:
        assert word in message


def edit_quantisation(folder: Path, **changes: Any) -> None:
    edit_config(folder, lambda config: config["quantization_config"].update(changes))


@pytest.mark.parametrize(
    ("scheme", "ending"),
    [
        ("fp8", "weight_scale_inv"),
        ("w4a16", "weight_scale"),
        ("w4a16", "weight_shape"),
        ("w8a8", "weight_scale"),
        ("w8a8-fp8", "weight_scale"),
        ("fbgemm", "weight_scale"),
        ("awq", "qzeros"),
        ("awq", "scales"),
        ("gptq", "qzeros"),
        ("gptq", "scales"),
        ("modelopt-nvfp4", "weight_scale"),
        ("modelopt-nvfp4", "weight_scale_2"),
        ("modelopt-fp8", "weight_scale"),
        ("ct-nvfp4", "weight_global_scale"),
        ("ct-mxfp4", "weight_scale"),
    ],
)
def test_scales_that_are_absent(scheme: str, ending: str, copy: Any) -> None:
    folder = copy(scheme)
    edit_tensors(folder, lambda t: t.pop(f"{EXPERT}.{ending}"))
    refused(folder, "model.safetensors", f"{EXPERT}.{ending} is absent")


def test_gpt_oss_without_scales(copy: Any) -> None:
    name = "model.layers.0.mlp.experts.down_proj"
    folder = copy("gpt_oss")
    edit_tensors(folder, lambda t: t.pop(f"{name}_scales"))
    refused(folder, f"{name}_blocks is quantised, but its {name}_scales is absent")
    folder = copy("gpt_oss")
    edit_tensors(folder, lambda t: t.pop(f"{name}_blocks"))
    refused(folder, f"{name}_scales", "belongs to no")
    folder = copy("gpt_oss")
    edit_tensors(folder, lambda t: t.update({f"{name}_scales": t[f"{name}_scales"][:, :, 1:]}))
    refused(folder, f"{name}_scales", "has shape")


@pytest.mark.parametrize(
    ("scheme", "ending"),
    [
        ("fp8", "weight"),
        ("w4a16", "weight_packed"),
        ("awq", "qweight"),
        ("gptq", "qweight"),
        ("modelopt-nvfp4", "weight"),
    ],
)
def test_scales_without_a_matrix(scheme: str, ending: str, copy: Any) -> None:
    folder = copy(scheme)
    edit_tensors(folder, lambda t: t.pop(f"{LAYER}.{ending}"))
    refused(folder, f"{LAYER}.", "belongs to no")


@pytest.mark.parametrize("scheme", ["awq", "gptq"])
@pytest.mark.parametrize("size", [96, 512, 0, "128"])
def test_groups_that_do_not_divide(scheme: str, size: Any, copy: Any) -> None:
    folder = copy(scheme)
    edit_quantisation(folder, group_size=size)
    words = ("does not divide", "128 columns") if size in (96, 512) else ("'group_size' is",)
    refused(folder, *words)


def test_configurations_that_the_tensors_contradict(copy: Any) -> None:
    folder = copy("awq")
    edit_quantisation(folder, group_size=64)
    refused(folder, "qzeros", "has shape", "groups of 64")
    folder = copy("gptq")
    edit_quantisation(folder, bits=8)
    refused(folder, "has shape", "8 bits")
    folder = copy("fp8")
    edit_quantisation(folder, weight_block_size=[64, 128])
    refused(folder, "_scale_inv has shape", "'weight_block_size' [64, 128]", "disagree")
    folder = copy("fp8")
    edit_quantisation(folder, weight_block_size=None)
    refused(folder, "one scale a matrix", "disagree")
    for change in ({"num_bits": 8}, {"group_size": 64}, {"type": "float"}):
        folder = copy("w4a16")
        weights = json.loads((folder / "config.json").read_text())["quantization_config"]["config_groups"]
        weights["group_0"]["weights"].update(change)
        edit_quantisation(folder, config_groups=weights)
        refused(folder, "4 bits in groups of 128 columns", "config_groups", "disagree")
    folder = copy("w4a16")
    weights["group_0"]["weights"].update(
        {"num_bits": 4, "group_size": 128, "type": "int", "symmetric": False}
    )
    edit_quantisation(folder, config_groups=weights)
    refused(folder, "lacks", "weight_zero_point", "'symmetric' false", "disagree")
    folder = copy("gptq")
    edit_quantisation(folder, desc_act=True)
    edit_tensors(folder, lambda t: [t.pop(name) for name in list(t) if name.endswith("g_idx")])
    refused(folder, "has no", "g_idx", "'desc_act'", "disagree")


def test_zero_points_in_what_is_called_symmetric(copy: Any) -> None:
    folder = copy("gptq-asym")
    edit_quantisation(folder, sym=True)
    with pytest.raises(InputError) as error:
        load_model(folder)
    told(error.value, ("zero point other than 8", "says symmetric", "disagree"))


@pytest.mark.parametrize(
    ("scheme", "change", "words"),
    [
        ("fp8", {"quant_method": "bitsandbytes"}, ("quantised with bitsandbytes", "hetero reads fp8")),
        ("fp8", {"quant_method": None}, ("an unknown method", "hetero reads fp8")),
        ("fp8", {"fmt": "e5m2"}, ("'fmt' is 'e5m2'",)),
        ("fp8", {"weight_block_size": [128]}, ("'weight_block_size' is [128]",)),
        ("awq", {"version": "gemv"}, ("'version' is 'gemv'", "hetero reads gemm")),
        ("awq", {"bits": 8}, ("'bits' 8", "hetero reads 4")),
        ("gptq", {"checkpoint_format": "marlin"}, ("'checkpoint_format' is 'marlin'",)),
        ("gptq", {"bits": 3}, ("'bits' 3", "hetero reads 4 and 8")),
        ("gptq", {"bits": [4]}, ("'bits' [4]", "hetero reads 4 and 8")),
        ("w4a16", {"format": "marlin-24"}, ("'format' is 'marlin-24'", "pack-quantized")),
        ("w4a16", {"sparsity_config": {"format": "sparse-24-bitmask"}}, ("sparsity",)),
        ("w4a16", {"config_groups": {}}, ("needs 'config_groups'",)),
        ("w4a16", {"config_groups": {"a": {}}}, ("group 'a'", "says nothing of weights")),
        ("w4a16", {"config_groups": {"a": {"weights": {"num_bits": "x"}}}}, ("'num_bits'", "'a'", "'x'")),
        (
            "w8a8-fp8",
            {"config_groups": {"a": {"weights": {"block_structure": [128]}}}},
            ("'block_structure'", "[128]", "sizes, [128, 128]"),
        ),
        ("modelopt-nvfp4", {"quant_algo": "W4A8_AWQ"}, ("'quant_algo' is 'W4A8_AWQ'", "NVFP4")),
    ],
)
def test_schemes_that_are_not_read(scheme: str, change: dict[str, Any], words: Any, copy: Any) -> None:
    folder = copy(scheme)
    edit_quantisation(folder, **change)
    refused(folder, "config.json", *words)


def test_a_quantised_checkpoint_that_does_not_say_so(copy: Any) -> None:
    for scheme, ending in (("fp8", ".weight"), ("awq", ".qweight"), ("w4a16", ".weight_packed")):
        folder = copy(scheme)
        edit_config(folder, lambda config: config.pop("quantization_config"))
        refused(folder, ending, "of a quantised checkpoint", "no 'quantization_config'")


@pytest.mark.parametrize("scheme", ["awq", "gptq"])
def test_codes_that_are_no_matrix(scheme: str, copy: Any) -> None:
    folder = copy(scheme)
    edit_tensors(folder, lambda t: t.update({f"{EXPERT}.qweight": t[f"{EXPERT}.qweight"].flatten()}))
    refused(folder, f"{EXPERT}.qweight", "is no matrix")


@pytest.mark.parametrize("group", [-1, 99])
def test_columns_of_groups_that_there_are_not(group: int, copy: Any) -> None:
    """A negative number must not count from the end."""
    folder = copy("w4a16")
    order = torch.zeros(256, dtype=torch.int32)
    order[5] = group
    edit_tensors(folder, lambda t: t.update({f"{LAYER}.weight_g_idx": order}))
    with pytest.raises(InputError) as error, open_source(folder) as source:
        source.read(f"{LAYER}.weight")
    told(error.value, (f"{LAYER}.weight", "g_idx", "names groups other than 0 to 1"))


def test_a_matrix_that_is_there_twice(copy: Any) -> None:
    folder = copy("awq")
    edit_tensors(folder, lambda t: t.update({f"{EXPERT}.weight": torch.zeros(128, 256)}))
    refused(folder, f"{EXPERT}.weight is there twice")


def test_codes_that_are_no_numbers(copy: Any) -> None:
    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        tensors[f"{EXPERT}.weight"].view(torch.uint8)[3, 5] = 0x7F

    folder = copy("fp8")
    edit_tensors(folder, spoil)
    with pytest.raises(InputError) as error:
        load_model(folder)
    told(error.value, ("expert 2", "NaN"))
