"""Models of random weights: every shipped family's shape at a small size, from a configuration alone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig
from typer.testing import CliRunner, Result

from hetero import cli, cpu
from hetero.core import InputError, MachineError
from hetero.cpu import pack_matrix
from hetero.engine.generate import Engine
from hetero.engine.load import Loaded, load_model
from hetero.engine.request import Request
from hetero.engine.sample import SamplingParams
from hetero.engine.synthetic import SOURCES, load_synthetic, repeated_rows
from hetero.formats import block_bytes, parse_format
from hetero.model import synthetic
from hetero.model.shapes import resolve_model, shape_names
from tests.model.tiny import COMMON, FAMILIES
from tests.model.tiny_moe import tiny_config


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    threads, before = cpu.threads(), torch.get_num_threads()
    monkeypatch.setenv("HETERO_THREADS", "1")
    torch.set_num_threads(1)
    yield
    cpu.set_threads(threads)
    torch.set_num_threads(before)


def small(model_type: str, **changes: Any) -> dict[str, Any]:
    config = AutoConfig.for_model(model_type, **{**COMMON, **FAMILIES.get(model_type, {}), **changes})
    return json.loads(config.to_json_string(use_diff=False))  # type: ignore[no-any-return]


def answer(loaded: Loaded) -> tuple[int, ...]:
    request = Request((1, 2, 3), SamplingParams(temperature=0.0), 4)
    return Engine(loaded.runnable).complete(request).token_ids


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "gpt_oss", "deepseek_v3", "mixtral"])
def test_a_shape_runs(model_type: str) -> None:
    loaded = load_synthetic(small(model_type), name="small", threads=1, seed=3)
    assert loaded.synthetic
    assert loaded.tokenizer is None
    assert len(answer(loaded)) == 4
    for parameter in loaded.runnable.model.parameters():
        assert parameter.isfinite().all()
    again = load_synthetic(small(model_type), threads=1, seed=3)
    assert answer(again) == answer(loaded)
    for mine, other in zip(
        again.runnable.model.parameters(), loaded.runnable.model.parameters(), strict=True
    ):
        assert torch.equal(mine, other)


def test_the_flagships_shape_runs() -> None:
    """Hyper-connections, an indexer and an n-gram table, in bfloat16."""
    data = json.loads(tiny_config("qwen4_exp").to_json_string(use_diff=False))
    loaded = load_synthetic(data, threads=1, dtype="bfloat16")
    assert len(answer(loaded)) == 4
    model: Any = loaded.runnable.model
    assert all(one.isfinite().all() for one in model.parameters())


def test_values_are_those_of_the_models_initialisation() -> None:
    loaded = load_synthetic(small("qwen3_next", hidden_size=256), threads=1)
    model: Any = loaded.runnable.model
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight") and "linear_attn" not in name:
            assert not parameter.any(), name  # they count from one
        if name.endswith("A_log"):
            assert parameter.exp().max() <= 16
        if name.endswith(("q_proj.weight", "lm_head.weight")):
            assert parameter.std() == pytest.approx(0.02, rel=0.2)


def test_tied_weights_stay_tied() -> None:
    model: Any = load_synthetic(small("qwen3_moe", tie_word_embeddings=True), threads=1).runnable.model
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_experts_are_made_of_a_few(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_synthetic(small("qwen3_moe", num_experts=20), threads=1)
    model: Any = loaded.runnable.model
    for layer in model.model.layers:
        backend = layer.mlp.experts.backend
        assert backend.missing() == []
        one = [bytes(backend.view(expert)) for expert in range(20)]
        assert len(set(one)) == SOURCES
    assert loaded.expert_bytes == 4 * backend.nbytes


def test_large_tensors_in_main_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Above a size values repeat; tables above another are zeros of no memory."""
    monkeypatch.setattr(synthetic, "_TILED", 100)
    monkeypatch.setattr(synthetic, "_PATTERN", 89)
    monkeypatch.setattr(synthetic, "SPARSE_BYTES", 96 * 32 * 4 - 1)
    loaded = load_synthetic(small("qwen3_moe", vocab_size=96), threads=1)
    model: Any = loaded.runnable.model
    table, matrix = model.model.embed_tokens.weight, model.model.layers[0].self_attn.q_proj.weight
    assert not table.any()
    assert any("embed_tokens" in note and "zeros" in note for note in loaded.notes)
    assert torch.equal(matrix.flatten()[:50], matrix.flatten()[89:139])
    assert matrix.std() == pytest.approx(0.02, rel=0.5)
    table[5] = 1.0  # it can be written
    assert table.sum() == 32


def test_layers_are_cut() -> None:
    data = json.loads(tiny_config("qwen4_exp").to_json_string(use_diff=False))
    whole = data["text_config"]["num_hidden_layers"]
    data["text_config"]["layer_types"].reverse()  # attention first
    cut = synthetic.cut_layers(data, whole - 1)["text_config"]
    assert cut["num_hidden_layers"] == len(cut["layer_types"]) == whole - 1
    assert synthetic.cut_layers(data, whole) == data
    with pytest.raises(InputError, match=f"--layers {whole + 5}: the model has {whole}"):
        synthetic.cut_layers(data, whole + 5)
    for name in ("qwen3.8-flash-next-125b", "qwen3-next-80b-a3b"):
        with pytest.raises(InputError, match="--layers 3: must be at least 4, the first"):
            synthetic.cut_layers(resolve_model(f"synthetic:{name}").config, 3)
    model: Any = load_synthetic(small("qwen3_moe"), layers=1, threads=1).runnable.model
    assert len(model.model.layers) == 1
    with pytest.raises(InputError, match="--layers 0: must be at least 1"):
        load_synthetic(small("qwen3_moe"), layers=0)


def test_every_shipped_shape_can_be_cut() -> None:
    from hetero.model.build import build_meta, find_moe, load_config

    for name in shape_names():
        model: Any = build_meta(
            load_config(synthetic.cut_layers(resolve_model(f"synthetic:{name}").config, 4))
        )
        assert find_moe(model), name


def test_rules_and_options_hold(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(small("qwen3_moe")))
    loaded = load_model(config, overrides={"experts": "int8"}, threads=1)
    assert loaded.synthetic
    block: Any = loaded.runnable.model.get_submodule("model.layers.0.mlp")
    assert str(block.experts.backend.format) == "int8 g32"
    with pytest.raises(InputError, match="--tier disk: random weights have no file"):
        load_synthetic(config, tier="disk")
    with pytest.raises(InputError, match="no routed experts"):
        load_synthetic({**small("qwen3_moe"), "mlp_only_layers": [0, 1, 2, 3]})
    rules = tmp_path / "rules.yaml"
    rules.write_text(
        "rules:\n"
        "  - name: e\n"
        "    match: {class: MoeBlock}\n"
        "    replace: {op: moe, device: cpu, experts: {device: cpu, backend: torch}}\n"
        "  - {name: r, match: {name: '.*'}, replace: {op: keep, device: cpu}}\n"
    )
    assert len(answer(load_synthetic(small("qwen3_moe"), rules=rules, threads=1))) == 4


def test_no_memory_for_a_tensor_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic.mmap, "mmap", lambda *_, **__: (_ for _ in ()).throw(OSError(12, "Cannot")))
    monkeypatch.setattr(synthetic, "SPARSE_BYTES", 100)
    with pytest.raises(MachineError, match="of address space for a table: Cannot"):
        load_synthetic(small("qwen3_moe"), threads=1)


@pytest.mark.parametrize("name", ["int8", "int4 g64"])
def test_packed_rows_repeat_in_blocks(name: str, generator: torch.Generator) -> None:
    fmt = parse_format(name)
    some = pack_matrix(fmt, torch.randn(64, 96, generator=generator))
    made = repeated_rows(some, fmt, 200, 96, generator).view(-1, block_bytes(fmt, 96))
    known = some.view(-1, block_bytes(fmt, 96))
    assert len(made) == 13  # 200 rows, 16 each
    assert all((known == block).all(1).any() for block in made)
    assert len(made.unique(dim=0)) > 1


def test_linear_layers_are_packed_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    from hetero.engine.synthetic import _fill_linears
    from hetero.ops.gpu.linear import PackedLinear

    with torch.device("meta"):
        layers = [nn.Linear(96, 48), nn.Linear(96, 32, bias=False), nn.Linear(64, 16)]
    formats = [parse_format(name) for name in ("int8", "int8", "bf16")]
    made = [PackedLinear(layer, fmt, "cpu") for layer, fmt in zip(layers, formats, strict=True)]
    model = nn.Sequential(*made)
    _fill_linears(model, 0)
    first, second, third = model
    assert third.packed.shape == (16, 64)
    assert first.source is None
    assert second.bias is None
    assert not first.bias.any()
    out = first(torch.randn(2, 96))
    assert out.isfinite().all()
    assert out.std() == pytest.approx(0.02 * 96**0.5, rel=0.5)


def test_the_command_line_runs_a_shape(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HETERO_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HETERO_STATS", "on")
    (tmp_path / "config.json").write_text(json.dumps(small("qwen3_moe")))
    model = f"synthetic:{tmp_path / 'config.json'}"

    def call(*args: str) -> Result:
        return CliRunner().invoke(cli.app, list(args))

    done = call("run", model, "--prompt-ids", "1,2,3", "--max-tokens", "3", "--threads", "1", "--json")
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["token_ids"]) == 3
    assert not list((tmp_path / "cache").rglob("*stat*"))  # random choices are not counted
    for command in (("run", model, "-p", "hello"), ("chat", model)):
        done = call(*command)
        assert done.exit_code == 2
        assert "random weights have no tokenizer" in done.stderr
