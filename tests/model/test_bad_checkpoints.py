"""Faulty configurations and checkpoints: one clear message each, before any weight is read."""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hetero.core import InputError
from hetero.model.build import build_meta, load_config
from hetero.model.loader import load, plan_load
from hetero.model.source import INDEX, Checkpoint
from hetero.model.sources import open_source
from tests.model.checkpoints import edit_config, edit_tensors, load_into, write

Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def originals(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Sound checkpoints by model type, to be copied and damaged."""
    root = tmp_path_factory.mktemp("originals")

    def original(model_type: str) -> Path:
        if not (root / model_type).exists():
            write(model_type, root / model_type)
        return root / model_type

    return original


@pytest.fixture
def copy(originals: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    def make(model_type: str = "qwen3_moe") -> Path:
        return Path(shutil.copytree(originals(model_type), tmp_path / model_type))

    return make


def refused(action: Callable[[], Any], *words: str) -> str:
    """The one-line message of the InputError that ``action`` raises, with all ``words`` in it."""
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(InputError) as error:
        action()
    message = str(error.value)
    assert "\n" not in message
    assert error.value.exit_code == 2
    for word in words:
        assert word in message
    assert len(os.listdir("/proc/self/fd")) <= len(descriptors), "a file is left open"
    return message


def plan(folder: Path, monkeypatch: pytest.MonkeyPatch | None = None) -> Any:
    return plan_load(build_meta(load_config(folder)), open_source(folder))


# Configurations


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda c: c.update(model_type="qwen3_mo"), ("unknown model_type 'qwen3_mo'", "qwen3_moe")),
        (lambda c: c.update(model_type="zzzzzz"), ("unknown model_type 'zzzzzz'",)),
        (lambda c: c.pop("model_type"), ("'model_type' is absent",)),
        (lambda c: c.pop("hidden_size"), ("'hidden_size' is absent", "qwen3_moe")),
        (lambda c: c.pop("num_local_experts"), ("'num_experts' is absent",)),
        (lambda c: c.pop("num_experts_per_tok"), ("'num_experts_per_tok' is absent",)),
        (lambda c: c.update(hidden_size="wide"), ("field 'hidden_size' is 'wide': must be a whole number",)),
        (lambda c: c.update(rms_norm_eps="x"), ("not a valid qwen3_moe configuration", "rms_norm_eps")),
    ],
)
def test_configuration(change: Callable[[dict[str, Any]], Any], words: tuple[str, ...], copy: Any) -> None:
    folder = copy()
    edit_config(folder, change)
    refused(lambda: load_config(folder), str(folder / "config.json"), *words)


def test_both_spellings_of_a_field_are_accepted(copy: Any) -> None:
    folder = copy()
    edit_config(folder, lambda c: c.update(num_experts=c.pop("num_local_experts")))
    assert load_config(folder).num_experts == 8


def test_text_part_of_a_configuration(copy: Any) -> None:
    folder = copy("qwen3_vl_moe")
    edit_config(folder, lambda c: c["text_config"].pop("hidden_size"))
    refused(lambda: load_config(folder), "'text_config.hidden_size' is absent")
    edit_config(folder, lambda c: c.pop("text_config"))
    refused(lambda: load_config(folder), "'text_config' is absent")


@pytest.mark.parametrize(
    ("text", "words"), [("{", "not valid JSON"), ("[1]", "expected a JSON object"), (None, "no such file")]
)
def test_configuration_file(text: str | None, words: str, copy: Any) -> None:
    path = copy() / "config.json"
    path.unlink()
    if text is not None:
        path.write_text(text)
    refused(lambda: load_config(path.parent), str(path), words)


# Files


def test_folders_without_safetensors(tmp_path: Path) -> None:
    refused(lambda: Checkpoint(tmp_path / "absent"), "no such folder")
    (tmp_path / "file").touch()
    refused(lambda: Checkpoint(tmp_path / "file"), "not a folder")
    refused(lambda: Checkpoint(tmp_path), "holds no weights")
    (tmp_path / "pytorch_model.bin").touch()
    refused(lambda: Checkpoint(tmp_path), "PyTorch .bin", "safetensors")


def shard(folder: Path) -> list[Path]:
    """Split a checkpoint in three files with an index."""
    names = sorted(load_file(folder / "model.safetensors").items())
    (folder / "model.safetensors").unlink()
    index = {}
    for number in range(3):
        file = f"model-{number + 1:05}-of-00003.safetensors"
        part = dict(names[number::3])
        save_file(part, folder / file)
        index |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return sorted(folder.glob("*.safetensors"))


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    data = json.loads((folder / INDEX).read_text())
    change(data)
    (folder / INDEX).write_text(json.dumps(data))


def test_missing_shard(copy: Any) -> None:
    folder = copy()
    shard(folder)[1].unlink()
    refused(lambda: Checkpoint(folder), INDEX, "1 are missing", "model-00002-of-00003.safetensors")


def test_index_that_names_an_absent_tensor(copy: Any) -> None:
    folder = copy()
    files = shard(folder)
    edit_index(folder, lambda d: d["weight_map"].update({"model.ghost": files[0].name}))
    refused(lambda: Checkpoint(folder), "model.ghost", files[0].name, INDEX)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": {"a": 1}}'])
def test_broken_index(text: str, copy: Any) -> None:
    folder = copy()
    shard(folder)
    (folder / INDEX).write_text(text)
    refused(lambda: Checkpoint(folder), str(folder / INDEX))


def test_the_same_tensor_in_two_shards(copy: Any) -> None:
    folder = copy()
    files = shard(folder)
    extra = load_file(files[1])
    name = "model.embed_tokens.weight"
    extra[name] = torch.zeros(2)
    for file in files:
        if name not in load_file(file):
            save_file({**load_file(file), name: torch.zeros(2)}, file)
            break
    refused(lambda: Checkpoint(folder), f"tensor {name} is in two files")


@pytest.mark.parametrize("cut", [1, 4096, "header", "length", "all"])
def test_truncated_file(cut: int | str, copy: Any) -> None:
    file = copy() / "model.safetensors"
    size = file.stat().st_size
    header = struct.unpack("<Q", file.read_bytes()[:8])[0]
    keep = {"header": 8 + header // 2, "length": 5, "all": 0}.get(cut) if isinstance(cut, str) else size - cut
    assert keep is not None
    os.truncate(file, keep)
    message = refused(lambda: Checkpoint(file.parent), str(file), "truncated", f"file has {keep}")
    if isinstance(cut, int):
        assert f"{size} bytes" in message


def test_a_file_with_a_tail(copy: Any) -> None:
    file = copy() / "model.safetensors"
    size = file.stat().st_size
    with file.open("ab") as stream:
        stream.write(b"123")
    refused(lambda: Checkpoint(file.parent), "no tensor owns", f"{size} bytes", f"{size + 3}")


def with_header(folder: Path, header: Any, data: bytes = b"") -> Path:
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(raw)) + raw + data)
    return folder


def entry(begin: int, end: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "data", "words"),
    [
        (b"\xff\xfe", 0, "not JSON"),
        (b"[]", 0, "not a JSON object"),
        ({"t": {}}, 0, "tensor t is malformed"),
        ({"t": entry(8, 0)}, 8, "tensor t is malformed"),
        ({"t": entry(0, 8, (-2,))}, 8, "tensor t is malformed"),
        ({"t": entry(0, 8) | {"shape": None}}, 8, "tensor t is malformed"),
        ({"t": entry(0, 12)}, 12, "cannot have 12 bytes"),
        ({"t": entry(0, 8), "u": entry(4, 12)}, 12, "tensor u do not follow"),
        ({"t": entry(0, 8), "u": entry(12, 20)}, 20, "tensor u do not follow"),
    ],
)
def test_malformed_header(header: Any, data: int, words: str, tmp_path: Path) -> None:
    refused(lambda: Checkpoint(with_header(tmp_path, header, bytes(data))), "model.safetensors", words)


def test_a_file_of_another_kind(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(64))
    refused(lambda: Checkpoint(tmp_path), "model.safetensors")
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 64)
    refused(lambda: Checkpoint(tmp_path), "not a safetensors file")


def test_a_file_that_shrinks_after_it_was_opened(copy: Any) -> None:
    folder = copy()
    model = build_meta(load_config(folder))
    checkpoint = Checkpoint(folder)
    os.truncate(folder / "model.safetensors", (folder / "model.safetensors").stat().st_size - 64)
    refused(lambda: load(model, checkpoint), "model.safetensors", "longer when it was opened")


# Tensors


def test_unconsumed_tensors(copy: Any) -> None:
    folder = copy()
    edit_tensors(folder, lambda t: t.update({f"model.layers.0.extra.{n}": torch.ones(2) for n in range(8)}))
    message = refused(lambda: plan(folder), "8 tensors", "model.layers.0.extra.0", "and 3 more")
    assert "extra.5" not in message


@pytest.mark.parametrize(
    ("model_type", "name"),
    [
        ("qwen3_moe", "model.norm.weight"),
        ("qwen3_moe", "lm_head.weight"),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight"),
        ("deepseek_v3", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax_m2", "model.layers.1.block_sparse_moe.e_score_correction_bias"),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj"),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj_bias"),
        ("deepseek_v4", "model.layers.0.ffn.gate.tid2eid"),
        ("granitemoe", "model.layers.1.block_sparse_moe.output_linear.weight"),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight"),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.7.w2.weight"),
    ],
)
def test_absent_tensor(model_type: str, name: str, copy: Any) -> None:
    """Never zeros in its place: a router without its correction bias routes wrongly and says nothing."""
    folder = copy(model_type)
    edit_tensors(folder, lambda t: t.pop(name))
    known = (
        name.replace("block_sparse_moe.e_score", "mlp.e_score")
        .replace(".ffn.", ".mlp.")
        .replace("output_linear.weight", "experts.down_proj")
    )
    message = refused(lambda: plan(folder))
    assert name in message or known in message


def test_a_whole_kind_of_expert_tensors_is_absent(copy: Any) -> None:
    folder = copy()

    def drop(tensors: Tensors) -> None:
        for name in [name for name in tensors if "layers.0.mlp.experts" in name and "up_proj" in name]:
            del tensors[name]

    edit_tensors(folder, drop)
    refused(lambda: plan(folder), "model.layers.0.mlp.experts", "up_proj")


@pytest.mark.parametrize("model_type", ["qwen3_moe", "mixtral"])
@pytest.mark.parametrize("count", [6, 10])
def test_another_number_of_experts(model_type: str, count: int, copy: Any) -> None:
    folder = copy(model_type)
    edit_config(folder, lambda c: c.update(num_local_experts=count))

    def rows(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            if name.endswith(".gate.weight"):
                tensors[name] = torch.zeros(count, tensor.shape[1])

    edit_tensors(folder, rows)
    words = ("has 6 experts", "has 8") if count == 6 else ("experts.8.", "absent")
    refused(lambda: plan(folder), *words)


def test_another_number_of_packed_experts(copy: Any) -> None:
    folder = copy("gpt_oss")

    def fewer(tensors: Tensors) -> None:
        name = "model.layers.0.mlp.experts.down_proj"
        tensors[name] = tensors[name][:5]

    edit_tensors(folder, fewer)
    refused(lambda: plan(folder), "model.layers.0.mlp.experts.down_proj", "[5, ", "expected [8, ")


@pytest.mark.parametrize(
    ("model_type", "pattern", "transposed"),
    [
        ("qwen3_moe", "model.layers.0.self_attn.q_proj.weight", False),
        ("qwen3_moe", "model.norm.weight", False),
        ("qwen3_moe", "model.layers.0.mlp.gate.weight", True),
        ("qwen3_moe", "model.layers.0.mlp.experts.*.gate_proj.weight", True),
        ("qwen3_moe", "model.layers.0.mlp.experts.*.down_proj.weight", True),
        ("mixtral", "model.layers.0.block_sparse_moe.experts.*.w2.weight", True),
        ("gpt_oss", "model.layers.0.mlp.experts.gate_up_proj", True),
        ("granitemoe", "model.layers.0.block_sparse_moe.output_linear.weight", True),
        ("aria_text", "model.layers.0.mlp.experts.fc2.weight", True),
        ("qwen3_moe", "model.layers.0.mlp.experts.3.up_proj.weight", False),
        ("qwen3_moe", "model.layers.0.mlp.experts.*.down_proj.weight", False),
    ],
)
def test_wrong_shape(model_type: str, pattern: str, transposed: bool, copy: Any) -> None:
    folder = copy(model_type)
    shapes: dict[str, tuple[list[int], list[int]]] = {}

    def reshape(tensors: Tensors) -> None:
        before, _, after = pattern.partition("*")
        for name, tensor in tensors.items():
            if name == pattern or ("*" in pattern and name.startswith(before) and name.endswith(after)):
                tensors[name] = tensor.mT.contiguous() if transposed else tensor[:-1].contiguous()
                shapes[name] = (list(tensors[name].shape), list(tensor.shape))

    edit_tensors(folder, reshape)
    name, (got, expected) = next(iter(sorted(shapes.items())))
    assert got != expected
    message = refused(lambda: plan(folder), name, str(got))
    assert ("looks transposed" in message) == transposed
    if transposed or "*" not in pattern:
        assert str(expected) in message


def test_two_tensors_for_one_parameter(copy: Any) -> None:
    folder = copy()
    edit_tensors(folder, lambda t: t.update({"norm.weight": t["model.norm.weight"] + 1}))
    refused(lambda: plan(folder), "norm.weight and", "both claim")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float64, torch.int8])
def test_dtypes_that_are_no_weights(dtype: torch.dtype, copy: Any) -> None:
    folder = copy()
    for name in ("model.layers.0.mlp.experts.2.up_proj.weight", "model.layers.0.self_attn.o_proj.weight"):
        shutil.copy(folder / "model.safetensors", folder / "sound")
        edit_tensors(folder, lambda t, name=name: t.update({name: t[name].to(dtype)}))
        spelled = {torch.float8_e4m3fn: "F8_E4M3", torch.float64: "F64", torch.int8: "I8"}[dtype]
        refused(lambda: plan(folder), name, spelled, "quantization_config")
        shutil.move(folder / "sound", folder / "model.safetensors")
    plan(folder)


def test_a_quantised_checkpoint(copy: Any) -> None:
    folder = copy("qwen3_moe")
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "fp8"}))
    refused(lambda: plan(folder), "quantised with fp8", "none of its tensors is", "disagree")
    edit_config(folder, lambda c: c.update(quantization_config={"quant_method": "aqlm"}))
    refused(lambda: plan(folder), "quantised with aqlm", "hetero reads fp8, compressed-tensors")
    folder = copy("qwen3_5_moe_text")
    config = json.loads((folder / "config.json").read_text())
    composite = {
        "model_type": "qwen3_5_moe",
        "text_config": config,
        "quantization_config": {"quant_method": "fp8"},
    }
    (folder / "config.json").write_text(json.dumps(composite))
    refused(lambda: plan(folder), "quantised with fp8", "none of its tensors is", "disagree")


def test_tensors_of_a_sound_checkpoint_raise_nothing(copy: Any) -> None:
    for model_type in (
        "qwen3_moe",
        "deepseek_v3",
        "gpt_oss",
        "granitemoe",
        "mixtral",
        "aria_text",
        "minimax_m2",
    ):
        load_into(copy(model_type), stream=True)
