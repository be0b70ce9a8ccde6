"""Rules that let a quantised checkpoint decide its experts' format, in whole models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from hetero.cli import app
from hetero.core import InputError
from hetero.engine.load import load_model, prepare
from hetero.formats import FP8
from hetero.model.build import choose_class
from hetero.ops.experts import CpuExpertsOp
from hetero.quant.pack import dequantise
from tests.model.checkpoints import edit_tensors, write
from tests.model.hf_to_gguf import write as write_gguf
from tests.model.quantised import (
    SCHEMES,
    Scheme,
    fp8_rows,
    int8_rows,
    order_by,
    small_config,
    write_files,
    write_gpt_oss,
    write_quantised,
)
from tests.model.tiny_moe import tiny_config, tiny_model


def formats(model: Any) -> set[str]:
    """Of the experts' backends."""
    found = [module.backend for module in model.modules() if isinstance(module, CpuExpertsOp)]
    assert found
    return {str(backend.format_of(part)) for backend in found for part in ("gate", "up", "down")}


def close(model: Any, reference: Any, tolerance: float) -> None:
    ids = torch.randint(3, 90, (1, 6))
    with torch.no_grad():
        got, expected = model(input_ids=ids).logits, reference(input_ids=ids).logits
    error = (got - expected).norm() / expected.norm()
    assert torch.isfinite(got).all()
    assert error < tolerance


LINEARS = """
extends: default
rules:
  - name: attention
    match: {name: 'self_attn\\.[qkvo]_proj$'}
    replace: {class: hetero.ops.gpu.linear.PackedLinear, device: cpu, kwargs: {format: FORMAT}}
"""


@pytest.mark.parametrize(
    ("scheme", "fmt"), [("fp8", "fp8"), ("w8a8-fp8-rows", "fp8"), ("w4a16", "int4 g128"), ("w8a16", "fp8")]
)
def test_packed_linear_layers_keep_values_too(scheme: str, fmt: str, tmp_path: Path) -> None:
    """What their format holds; else they are quantised anew."""
    pytest.importorskip("triton", reason="triton is not installed")
    from hetero.ops.gpu.linear import PackedLinear

    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])
    rules = tmp_path / "rules.yaml"
    rules.write_text(LINEARS.replace("FORMAT", fmt))
    loaded = load_model(tmp_path, rules=rules, dtype="bfloat16")
    named = dict(loaded.runnable.model.named_modules())
    layers = {name: module for name, module in named.items() if isinstance(module, PackedLinear)}
    assert len(layers) == 4
    kept = scheme != "w8a16"
    for name, linear in layers.items():
        found = dequantise(linear.format, linear.packed, linear.out_features, linear.in_features)
        wanted = written.values[f"{name}.weight"].float()
        assert torch.equal(found, wanted) == kept
        assert float((found - wanted).norm() / wanted.norm()) < 0.05
    told = f"4 linear layers keep the checkpoint's values: {SCHEMES[scheme].format}"
    assert (told in loaded.notes) == kept


KEPT = ("fp8", "w8a8-fp8-rows", "awq", "gptq", "gptq-order", "modelopt-nvfp4", "w8a8-asym")


@pytest.mark.parametrize("scheme", KEPT)
def test_a_user_who_sets_nothing_gets_the_checkpoints_values(scheme: str, tmp_path: Path) -> None:
    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])
    loaded = load_model(tmp_path)
    wanted = SCHEMES[scheme].format
    assert formats(loaded.runnable.model) == {wanted}
    assert f"experts keep the checkpoint's values: {wanted}" in loaded.notes
    # Weights are the same; activations of all but fp8 are int8 in groups of 32.
    close(loaded.runnable.model, written.model, 1e-5 if wanted in FP8 else 0.05)


@pytest.mark.parametrize("scheme", ["w8a8-fp8-rows", "gptq-order"])
def test_llama4_with_matrices_of_each_expert(scheme: str, tmp_path: Path) -> None:
    """As tools that quantise it write it, which transformers has no conversion for."""
    # One expert a token, as all of them have: more rows than 16 would be rounded to bf16.
    sizes = dict.fromkeys(("hidden_size", "intermediate_size", "intermediate_size_mlp"), 256)
    few = {"num_hidden_layers": 1, "moe_layers": [0], "num_local_experts": 2, "num_experts_per_tok": 1}
    made, config = SCHEMES[scheme], tiny_config("llama4_text", **sizes, **few)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    stored: dict[str, torch.Tensor] = {}

    def put(name: str, matrix: torch.Tensor) -> torch.Tensor:
        order_by(name.replace("gate_proj", "up_proj"))
        parts, values = made.make(matrix.contiguous())
        stored.update({f"language_model.{name}.{ending}": part for ending, part in parts.items()})
        return values.float()

    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name.endswith("experts.gate_up_proj"):
                for e, expert in enumerate(tensor):
                    path, (gate, up) = name.replace("gate_up_proj", str(e)), expert.T.chunk(2)
                    both = put(f"{path}.gate_proj", gate), put(f"{path}.up_proj", up)
                    expert.copy_(torch.cat(both).T)
            elif name.endswith("experts.down_proj"):
                for e, expert in enumerate(tensor):
                    expert.copy_(put(name.replace("down_proj", f"{e}.down_proj"), expert.T).T)
            elif name.endswith("_proj.weight"):
                tensor.copy_(put(name.removesuffix(".weight"), tensor))
            else:
                stored[f"language_model.{name}"] = tensor
    config.save_pretrained(tmp_path)
    write_files(tmp_path, stored, made.config)
    loaded = load_model(tmp_path)
    assert formats(loaded.runnable.model) == {made.format}
    close(loaded.runnable.model, model, 1e-5 if made.format in FP8 else 0.05)


def test_llama4_as_fbgemm_packs_it(tmp_path: Path) -> None:
    """Experts [E, k, n] with a scale per output."""
    config = tiny_config("llama4_text")
    config.num_experts_per_tok = 1
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    stored: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            stored[name] = tensor
            if ".experts." not in name:
                continue
            made = [fp8_rows(expert.T, dtype=torch.float32) for expert in tensor]
            tensor.copy_(torch.stack([values.T for _, values in made]))
            scales = torch.stack([parts["weight_scale"] for parts, _ in made])
            codes = torch.stack([parts["weight"].view(torch.uint8).T for parts, _ in made])
            stored[name] = codes.view(torch.float8_e4m3fn)
            stored[f"{name}_scale"] = scales.mT if "gate_up" in name else scales
    config.save_pretrained(tmp_path)
    write_files(tmp_path, stored, SCHEMES["fbgemm"].config)
    loaded = load_model(tmp_path)
    assert formats(loaded.runnable.model) == {"fp8_row"}
    close(loaded.runnable.model, model, 1e-5)
    wrong = {name: torch.ones(3) for name in stored if name.endswith("down_proj_scale")}
    edit_tensors(tmp_path, lambda t: t.update(wrong))
    with pytest.raises(InputError, match=r"down_proj_scale has shape \[3\]; expected one scale an output"):
        prepare(tmp_path)


def test_gpt_oss_keeps_mxfp4(tmp_path: Path) -> None:
    written = write_gpt_oss(tmp_path)
    loaded = load_model(tmp_path, overrides={"experts": "keep"})
    assert formats(loaded.runnable.model) == {"mxfp4"}
    close(loaded.runnable.model, written.model, 0.05)


ON_GPU = """
vars: {experts: auto int4}
rules:
  - name: experts
    match: {class: MoeBlock}
    replace: {op: moe, device: "cuda:0", experts: {device: "cuda:0", format: "${experts}"}}
  - name: rest
    match: {name: '.*'}
    replace: {op: keep, device: cpu}
"""


@pytest.mark.parametrize("scheme", ["awq", "gptq-order"])
def test_a_gpu_keeps_them_too(scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As far as it goes without one: before weights are read."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])
    rules = tmp_path / "rules.yaml"
    rules.write_text(ON_GPU)
    ready = prepare(tmp_path, rules=rules)
    wanted = SCHEMES[scheme].format
    assert f"experts keep the checkpoint's values: {wanted}" in ready.placement.notes
    found = [a.options["experts"]["formats"] for a in ready.placement.assignments if a.op == "moe"]
    assert found
    assert {pair for formats in found for pair in formats.values()} == {(wanted, wanted)}


def test_another_format_is_requantised_and_said_so(tmp_path: Path) -> None:
    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES["fp8"])
    loaded = load_model(tmp_path, overrides={"experts": "f32"})
    assert formats(loaded.runnable.model) == {"f32"}
    assert any("checkpoint's fp8 becomes f32, as the rule says" in note for note in loaded.notes)
    close(loaded.runnable.model, written.model, 1e-5)


@pytest.mark.parametrize("scheme", ["gptq-order-apart", "fp8-small-blocks"])
def test_what_no_format_keeps(scheme: str, tmp_path: Path) -> None:
    written = write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])
    loaded = load_model(tmp_path, overrides={"experts": "auto int8"})
    assert formats(loaded.runnable.model) == {"int8 g32"}
    assert any("becomes int8 g32, since no packed format keeps it" in note for note in loaded.notes)
    close(loaded.runnable.model, written.model, 0.05)
    with pytest.raises(InputError, match=r"'format: keep' cannot be.*--set experts=int8"):
        prepare(tmp_path, overrides={"experts": "keep"})


def test_scales_that_are_no_16_bit_floats(tmp_path: Path) -> None:
    """Told before the weights are read; only "auto" goes on, with another format."""
    plain = SCHEMES["w8a8"]

    def make(w: torch.Tensor) -> Any:
        made, _ = int8_rows()(w)
        scale = made["weight_scale"].float() * 1.0001
        return made | {"weight_scale": scale}, made["weight"].double() * scale.double()

    written = write_quantised(tmp_path, "qwen3_moe", replace(plain, make=make))
    loaded = load_model(tmp_path, overrides={"experts": "auto int8 g64"})
    assert formats(loaded.runnable.model) == {"int8 g64"}
    assert any("are no 16-bit float" in note for note in loaded.notes)
    close(loaded.runnable.model, written.model, 0.05)
    with pytest.raises(InputError) as error:
        prepare(tmp_path, overrides={"experts": "keep"})
    message = str(error.value)
    assert "model.safetensors: tensor model.layers.0.mlp.experts.0." in message
    assert "are no 16-bit float" in message
    assert "\n" not in message


@pytest.mark.parametrize("scheme", ["w8a8", "gptq", "awq"])
def test_one_scale_of_an_expert_in_the_middle(scheme: str, tmp_path: Path) -> None:
    """It is found before weights are read, so that "auto" can take another format for its block."""
    write_quantised(tmp_path, "qwen3_moe", SCHEMES[scheme])

    def spoil(tensors: dict[str, torch.Tensor]) -> None:
        expert = "model.layers.0.mlp.experts.1.up_proj"
        (name,) = (name for name in tensors if name.startswith(expert) and name.rpartition("scale")[1])
        tensors[name] = tensors[name].float()
        tensors[name].view(-1)[3] = 1e-9

    edit_tensors(tmp_path, spoil)
    loaded = load_model(tmp_path, overrides={"experts": "auto int8 g64"})
    assert formats(loaded.runnable.model) == {"int8 g64"}
    assert any("are no 16-bit float" in note and "experts.1" in note for note in loaded.notes)
    with pytest.raises(InputError, match=r"'format: keep' cannot be.*experts\.1\.up_proj"):
        prepare(tmp_path, overrides={"experts": "keep"})


def test_a_plain_checkpoint(tmp_path: Path) -> None:
    """Nothing is quantised: "auto" is the format after it, "keep" the file's own floats."""
    write("qwen3_moe", tmp_path / "f32")
    assert formats(load_model(tmp_path / "f32").runnable.model) == {"int4 g32"}
    assert formats(load_model(tmp_path / "f32", overrides={"experts": "keep"}).runnable.model) == {"f32"}
    write("qwen3_moe", tmp_path / "bf16", torch.bfloat16)
    loaded = load_model(tmp_path / "bf16", overrides={"experts": "keep"})
    assert formats(loaded.runnable.model) == {"bf16"}
    assert not loaded.notes


def test_activations_are_not_quantised_and_a_note_says_so(tmp_path: Path) -> None:
    write_quantised(tmp_path, "qwen3_moe", SCHEMES["w8a8"])
    ready = prepare(tmp_path)
    assert any("quantisation of activations is not used" in note for note in ready.placement.notes)


def test_explain_shows_the_real_formats_and_bytes(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    write_quantised(tmp_path, "qwen3_moe", SCHEMES["awq"])
    result = CliRunner().invoke(app, ["rules", "explain", str(tmp_path)])
    assert result.exit_code == 0, result.output
    assert "int4z g128" in result.output
    assert "experts keep the checkpoint's values: int4z g128" in result.output
    ready = prepare(tmp_path)
    loaded = load_model(tmp_path)
    from hetero.rules.explain import explain

    lines = explain(ready.placement, ready.modules)
    assert sum(line.bytes for line in lines if line.format == "int4z g128") == loaded.expert_bytes


def test_a_tensor_that_nothing_consumes(tmp_path: Path) -> None:
    write_quantised(tmp_path, "qwen3_moe", SCHEMES["fp8"])
    edit_tensors(tmp_path, lambda t: t.update({"model.layers.0.mlp.ghost.weight": torch.zeros(2, 2)}))
    with pytest.raises(InputError, match=r"belong to no parameter.*ghost"):
        prepare(tmp_path)


def test_one_expert_in_another_scheme(tmp_path: Path) -> None:
    """A block whose experts are not all quantised alike is not kept, and loads all the same."""
    scheme: Scheme = SCHEMES["fp8"]
    names = r"(?<!experts\.1\.down)_proj\.weight$"
    written = write_quantised(tmp_path, "qwen3_moe", replace(scheme, names=names))
    assert not any("experts.1.down_proj" in name for name in written.values)
    loaded = load_model(tmp_path, overrides={"experts": "auto f32"})
    assert formats(loaded.runnable.model) == {"f32"}
    assert any("different formats" in note for note in loaded.notes)
    close(loaded.runnable.model, written.model, 1e-5)


@pytest.mark.parametrize("fuse", [False, True])
def test_a_gguf_file_whose_down_has_a_type_of_its_own(fuse: bool, tmp_path: Path) -> None:
    # What a file of this architecture cannot say, and all such models have.
    config = small_config("qwen3_moe", norm_topk_prob=True)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))

    def kind_of(name: str, values: Any) -> Kind | None:
        return None if "_exps" not in name else Kind.Q8_0 if "down" in name else Kind.Q4_0

    held = write_gguf(model, tmp_path / "model.gguf", "qwen3moe", kind_of=kind_of, fuse=fuse)
    experts = model.model.layers[0].mlp.experts
    with torch.no_grad():
        experts.down_proj.copy_(torch.from_numpy(held["blk.0.ffn_down_exps.weight"]))
        if fuse:
            both = torch.from_numpy(held["blk.0.ffn_gate_up_exps.weight"])
        else:
            parts = (torch.from_numpy(held[f"blk.0.ffn_{part}_exps.weight"]) for part in ("gate", "up"))
            both = torch.cat(tuple(parts), 1)
        experts.gate_up_proj.copy_(both)
    loaded = load_model(tmp_path / "model.gguf")
    assert formats(loaded.runnable.model) == {"int4 g32", "int8 g32"}
    assert "experts keep the checkpoint's values: int4 g32 (down: int8 g32)" in loaded.notes
    close(loaded.runnable.model, model, 0.05)
    exact = load_model(tmp_path / "model.gguf", overrides={"experts": "f32"})
    close(exact.runnable.model, model, 1e-5)
