"""Models from GGUF files against transformers: every architecture, types of blocks, splits, and faults."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import MODEL_TENSOR as T
from gguf import TENSOR_NAMES, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from typer.testing import CliRunner

from hetero.cli import app
from hetero.core import InputError
from hetero.engine.load import load_model
from hetero.formats import Format
from hetero.model.build import choose_class
from hetero.model.config import load_config
from hetero.model.gguf_arch import ARCHS, UNREAD, moe_names
from hetero.model.gguf_file import opened
from hetero.model.gguf_scan import BLOCK_TYPES
from hetero.model.gguf_source import GgufSource
from hetero.model.shapes import resolve_model
from hetero.quant.pack import Codes, dequantise, pack_codes
from tests.model.hf_to_gguf import quantised, write
from tests.model.parity import prompt, relative, trace
from tests.model.quiet import quiet  # noqa: F401  a fixture of every test here
from tests.model.tiny_moe import SIZES, tiny_config, tiny_model

TOLERANCE = 1e-4
DOCS = Path(__file__).parents[2] / "docs" / "gguf.md"

# Architecture, model type of transformers, and what the format implies where tiny models have something else.
MOE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "mixtral", {}),
    ("qwen2moe", "qwen2_moe", {}),
    ("qwen3moe", "qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3next", "qwen3_next", {}),
    ("qwen35moe", "qwen3_5_moe_text", {}),
    ("deepseek2", "deepseek_v2", {}),
    ("deepseek2", "deepseek_v3", {}),
    ("glm4moe", "glm4_moe", {}),
    ("glm-dsa", "glm_moe_dsa", {}),
    ("gpt-oss", "gpt_oss", {"swiglu_limit": 7.0}),
    ("olmoe", "olmoe", {}),
    ("phimoe", "phimoe", {}),
    ("granitemoe", "granitemoe", {}),
    ("granitemoe", "granitemoeshared", {}),
    ("granitehybrid", "granitemoehybrid", {}),
    ("ernie4_5-moe", "ernie4_5_moe", {}),
    ("hunyuan-moe", "hunyuan_v1_moe", {}),
    ("minimax-m2", "minimax_m2", {}),
    ("lfm2moe", "lfm2_moe", {"routed_scaling_factor": 1.0}),
    ("dots1", "dots1", {"sliding_window": None, "layer_types": ["full_attention"] * 4}),
    ("jamba", "jamba", {}),
    ("nemotron_h_moe", "nemotron_h", {}),
    ("afmoe", "afmoe", {"mup_enabled": True}),
    ("exaone-moe", "exaone_moe", {}),
    ("kimi-linear", "kimi_linear", {}),
    ("llama4", "llama4_text", {
        "num_experts_per_tok": 1, "no_rope_layer_interval": 4, "floor_scale": 8192,
        "attention_chunk_size": 8192}),
    ("mimo2", "mimo_v2_flash", {
        "attention_value_scale": 0.5, "routed_scaling_factor": 1.0, "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta, "partial_rotary_factor": 0.5}
        for kind, theta in (("full_attention", 5e6), ("sliding_attention", 1e4))}}),
    # Queries grow from the fifth position on.
    ("mistral4", "mistral4", {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 4,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.3, "partial_rotary_factor": 8 / 24}}),
    ("gemma4", "gemma4_text", {
        "attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32,
        "final_logit_softcapping": 3.0, "hidden_size_per_layer_input": 0}),
]  # fmt: skip
DENSE: list[tuple[str, str, dict[str, Any]]] = [
    ("llama", "llama", {}),
    ("qwen2", "qwen2", {}),
    ("qwen3", "qwen3", {}),
    ("smollm3", "smollm3", {}),
    ("granite", "granite", {}),
    ("ernie4_5", "ernie4_5", {}),
    ("gemma3", "gemma3_text", {"query_pre_attn_scalar": 16, "sliding_window": 6}),
    ("gemma4", "gemma4_text", {
        "enable_moe_block": False, "num_experts": None, "global_head_dim": 32,
        "num_kv_shared_layers": 2, "use_double_wide_mlp": True}),
]  # fmt: skip
# Read, but by the same line of the table as another one that is tested.
SAME_AS = {"qwen3vlmoe": "qwen3moe"}


def tiny(model_type: str, **changes: Any) -> Any:
    """A random model with the configuration of its type, changed."""
    if model_type in ("gemma4_text", "llama4_text"):  # which have what each layer is from the start
        config = tiny_config(model_type, **changes)
    else:
        config = tiny_config(model_type)
        for name, value in changes.items():
            setattr(config, name, value)
    chosen = choose_class(config)
    return tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(1 << 30, ())))


def load_ours(path: Path, experts: str = "f32") -> Any:
    return load_model(path, rules="default-cpu", overrides={"experts": experts}, threads=1).runnable.model


def agree(ours: Any, model: Any) -> None:
    got, want = trace(ours, prompt()), trace(model, prompt())
    assert want.prefill.std() > 0.05, "logits so flat prove nothing"
    assert max(relative(got.prefill, want.prefill), relative(got.steps, want.steps)) < TOLERANCE
    assert got.tokens == want.tokens


@pytest.mark.parametrize(("arch", "model_type", "changes"), MOE, ids=[f"{a}-{m}" for a, m, _ in MOE])
def test_moe(arch: str, model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(model_type, **changes)
    write(model, tmp_path / "m.gguf", arch)
    agree(load_ours(tmp_path / "m.gguf"), model)


@pytest.mark.parametrize(("arch", "model_type", "changes"), DENSE, ids=[a for a, _, _ in DENSE])
def test_dense(arch: str, model_type: str, changes: dict[str, Any], tmp_path: Path) -> None:
    model = tiny(model_type, **changes)
    write(model, tmp_path / "m.gguf", arch)
    agree(load_model(tmp_path / "m.gguf", threads=1).runnable.model, model)


def test_the_rules_of_a_dense_file_are_explained_as_they_run(tmp_path: Path) -> None:
    arch, model_type, changes = DENSE[0]
    model = tiny(model_type, **changes)
    write(model, tmp_path / "m.gguf", arch)
    told = CliRunner().invoke(app, ["rules", "explain", str(tmp_path / "m.gguf"), "--json"])
    assert told.exit_code == 0, told.output
    weights = sum(weight.numel() for weight in model.parameters())
    assert json.loads(told.stdout)["totals"] == {"cpu": 4 * weights}


QUANTISED = [
    {"gate": "Q8_0", "up": "Q8_0", "down": "Q8_0"},
    {"gate": "Q4_K", "up": "Q4_K", "down": "Q6_K"},
    {"gate": "MXFP4", "up": "MXFP4", "down": "MXFP4"},
    {"gate": "IQ3_XXS", "up": "IQ3_XXS", "down": "IQ4_XS"},
    {"gate": "Q5_1", "up": "Q4_1", "down": "BF16"},
]


def wide() -> Any:
    """A model whose matrices have rows of whole K-quant blocks."""
    config = tiny_config("qwen3_moe")
    for name in ("hidden_size", "intermediate_size", "moe_intermediate_size"):
        setattr(config, name, 256)
    config.norm_topk_prob, config.num_hidden_layers, config.mlp_only_layers = True, 2, []
    chosen = choose_class(config)
    return tiny_model(chosen.cls, chosen.config, 3)


def adopt(model: Any, held: dict[str, np.ndarray[Any, Any]]) -> Any:
    """The model with the values that a file stands for."""
    model = copy.deepcopy(model)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.QWEN3MOE, 2)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            block = re.search(r"layers\.(\d+)", name)
            kinds = {
                "gate_up_proj": (T.FFN_GATE_EXP, T.FFN_UP_EXP),
                "down_proj": (T.FFN_DOWN_EXP,),
            }.get(name.rpartition("experts.")[2])
            if kinds and block:
                parts = [held[f"{TENSOR_NAMES[kind].format(bid=block[1])}.weight"] for kind in kinds]
            else:
                parts = [held[names.get_name(name, (".weight", ".bias"))]]
            parameter.copy_(torch.cat([torch.from_numpy(part) for part in parts], dim=-2 if kinds else 0))
    return model


def kinds_of(types: dict[str, str]) -> Callable[[str, np.ndarray[Any, Any]], Kind | None]:
    def kind_of(name: str, values: np.ndarray[Any, Any]) -> Kind | None:
        part = re.search(r"ffn_(gate|up|down)_exps", name)
        if part:
            return Kind[types[part[1]]]
        if values.ndim < 2 or "gate_inp" in name:
            return None
        return Kind.Q6_K if "output" in name else Kind.Q8_0

    return kind_of


@pytest.mark.parametrize("types", QUANTISED, ids=lambda types: "-".join(types.values()))
def test_quantised(types: dict[str, str], tmp_path: Path) -> None:
    """Dense layers and experts as the floats that their blocks stand for; experts also as they are."""
    model = wide()
    held = write(model, tmp_path / "m.gguf", "qwen3moe", kind_of=kinds_of(types))
    want = adopt(model, held)
    agree(load_ours(tmp_path / "m.gguf"), want)
    if "BF16" not in types.values():
        kept = load_ours(tmp_path / "m.gguf", "keep")
        got, exact = (
            m(input_ids=prompt(), use_cache=False).logits[0].detach().double() for m in (kept, want)
        )
        # Activations are rounded to 8 bits there; weights are not.
        assert float(((got - exact).norm(dim=-1) / exact.norm(dim=-1)).median()) < 0.02


def values_of(codes: Codes, fmt: Format) -> torch.Tensor:
    n, k = codes.codes.shape
    return dequantise(fmt, pack_codes(fmt, *codes), n, k)


@pytest.mark.parametrize("name", [name for name in BLOCK_TYPES if name != "NVFP4"])
def test_codes_are_the_blocks(name: str, tmp_path: Path) -> None:
    """Every type: the codes of experts, and of queries, whose rows are in another order in such files."""
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    for add, value in (
        (writer.add_block_count, 1),
        (writer.add_context_length, 8),
        (writer.add_embedding_length, 512),
        (writer.add_head_count, 4),
        (writer.add_expert_count, 3),
        (writer.add_expert_used_count, 2),
    ):
        add(value)
    rng = np.random.default_rng()
    held = {}

    def put(tensor: str, shape: tuple[int, ...], kind: Kind = Kind.F32) -> None:
        values = rng.standard_normal(shape, dtype=np.float32)
        raw = values if kind == Kind.F32 else quantised(values, kind)
        writer.add_tensor(tensor, raw, raw_dtype=kind)
        held[tensor] = raw if kind == Kind.F32 else gguf.quants.dequantize(raw, kind)

    put("token_embd.weight", (5, 512))
    put("blk.0.ffn_gate_inp.weight", (3, 512))
    put("blk.0.ffn_up_exps.weight", (3, 40, 512), Kind[name])
    put("blk.0.attn_q.weight", (64, 512), Kind[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with GgufSource(tmp_path / "m.gguf") as source:
        up, query = "model.layers.0.mlp.experts.up_proj.weight", "model.layers.0.self_attn.q_proj.weight"
        piece = source.pieces("model.layers.0.mlp.experts", 2, "up")
        assert piece is not None
        assert (piece.name, piece.index, piece.rows) == (up, 2, None)
        assert source.pieces("model.layers.0.mlp.experts", 2, "gate") is None
        fmt = source.tensors[up].format
        assert isinstance(fmt, Format)
        got = values_of(source.codes(up, 2), fmt)
        assert torch.equal(got, torch.from_numpy(held["blk.0.ffn_up_exps.weight"][2]))
        assert torch.equal(source.read_slice(up, 1)[0], torch.from_numpy(held["blk.0.ffn_up_exps.weight"][1]))
        # Head of 16 rows: pairs (0, 8), (1, 9), ... stand side by side in the file.
        order = [16 * head + 2 * (i % 8) + i // 8 for head in range(4) for i in range(16)]
        want = torch.from_numpy(held["blk.0.attn_q.weight"][order])
        assert torch.equal(source.read(query), want)
        assert torch.equal(values_of(source.codes(query), fmt), want)
        with pytest.raises(InputError, match="has no matrix None"):
            source.codes(up)
        with pytest.raises(InputError, match="not quantised"):
            source.codes("model.embed_tokens.weight")


def test_a_split_model(tmp_path: Path) -> None:
    model = tiny("qwen3_moe", norm_topk_prob=True)
    write(model, tmp_path / "m.gguf", "qwen3moe", split=9)
    files = sorted(tmp_path.glob("*.gguf"))
    assert len(files) > 3
    assert files[0].name == f"m-00001-of-{len(files):05d}.gguf"
    agree(load_ours(files[0]), model)
    agree(load_ours(tmp_path), model)  # the folder that holds nothing else
    assert resolve_model(str(tmp_path)).kind == "gguf"
    with pytest.raises(InputError, match="give its first part"):
        load_config(files[1])


def test_gate_and_up_in_one_tensor(tmp_path: Path) -> None:
    model = tiny("qwen2_moe")
    write(model, tmp_path / "m.gguf", "qwen2moe", fuse=True)
    agree(load_ours(tmp_path / "m.gguf"), model)


def test_latent_attention_of_old_files(tmp_path: Path) -> None:
    model = tiny("deepseek_v2")
    write(model, tmp_path / "m.gguf", "deepseek2", whole_kv=True)
    agree(load_ours(tmp_path / "m.gguf"), model)


def test_drafting_layers_are_left_out(tmp_path: Path) -> None:
    model = tiny("glm4_moe")

    def more(writer: GGUFWriter) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_block_count(5)
        writer.add_tensor("blk.4.nextn.eh_proj.weight", np.ones((4, 8), np.float32))
        writer.add_tensor("blk.4.attn_norm.weight", np.ones(64, np.float32))

    write(model, tmp_path / "m.gguf", "glm4moe", more=more)
    loaded = load_model(tmp_path / "m.gguf", rules="default-cpu", overrides={"experts": "f32"}, threads=1)
    assert any("mtp (2 tensors)" in note for note in loaded.notes)
    agree(loaded.runnable.model, model)


def llama3_factors(head: int, base: float, scaling: dict[str, Any]) -> np.ndarray[Any, Any]:
    """What a frequency is divided by, as the conversion script computes it."""
    factors = []
    for i in range(0, head, 2):
        length = 2 * math.pi * base ** (i / head)
        high = scaling["original_max_position_embeddings"] / scaling["high_freq_factor"]
        low = scaling["original_max_position_embeddings"] / scaling["low_freq_factor"]
        if length < high:
            factors.append(1.0)
        elif length > low:
            factors.append(scaling["factor"])
        else:
            part = scaling["original_max_position_embeddings"] / length - scaling["low_freq_factor"]
            smooth = part / (scaling["high_freq_factor"] - scaling["low_freq_factor"])
            factors.append(1 / ((1 - smooth) / scaling["factor"] + smooth))
    return np.array(factors, np.float32)


def test_rotary_factors_of_llama3(tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    }
    model = tiny("llama", rope_parameters=scaling, max_position_embeddings=128)
    factors = llama3_factors(16, 500.0, scaling)
    assert len(set(factors)) > 1
    assert factors.max() == 8
    write(model, tmp_path / "m.gguf", "llama", more=lambda w: w.add_tensor("rope_freqs.weight", factors))
    agree(load_ours_dense(tmp_path / "m.gguf"), model)


def test_rotary_factors_of_another_type(tmp_path: Path) -> None:
    arch, model_type, changes = DENSE[-1]
    model = tiny(model_type, **changes)
    write(model, tmp_path / "m.gguf", arch, kind_of=lambda name, _: Kind.BF16 if "rope" in name else None)
    agree(load_ours_dense(tmp_path / "m.gguf"), model)


def load_ours_dense(path: Path) -> Any:
    return load_model(path, threads=1).runnable.model


def test_yarn_of_deepseek(tmp_path: Path) -> None:
    rope = {
        "rope_type": "yarn",
        "rope_theta": 100.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    model = tiny("deepseek_v3", rope_parameters=rope)
    write(model, tmp_path / "m.gguf", "deepseek2")
    agree(load_ours(tmp_path / "m.gguf"), model)


def refused(path: Path, *parts: str) -> None:
    with pytest.raises(InputError) as caught:
        load_model(path, rules="default-cpu", threads=1)
    message = str(caught.value)
    for part in parts:
        assert part in message, message


def change(writer_change: Callable[[GGUFWriter], None], path: Path, **options: Any) -> Path:
    write(tiny("qwen3_moe"), path, "qwen3moe", more=writer_change, **options)
    return path


FAULTS: dict[str, tuple[Callable[[GGUFWriter], None], tuple[str, ...]]] = {
    "no blocks": (lambda w: w.kv_data[0].pop("qwen3moe.block_count"), ("qwen3moe.block_count is missing",)),
    "many blocks": (lambda w: w.add_block_count(1 << 30), ("block_count is 1073741824", "4 blocks")),
    "fewer experts": (lambda w: w.add_expert_count(4), ("expert_count is 4", "ffn_gate_inp", "has 8 rows")),
    "other width": (lambda w: w.add_embedding_length(96), ("embedding_length is 96", "token_embd", "64")),
    "text": (lambda w: w.add_string("qwen3moe.context_length", "128"), ("context_length is '128'",)),
    "zero": (lambda w: w.add_head_count(0), ("head_count is 0",)),
    "odd rope": (
        lambda w: w.add_string("qwen3moe.rope.scaling.type", "spiral"),
        ("rope.scaling.type is 'spiral'",),
    ),
    "stray": (
        lambda w: w.add_tensor("blk.0.attn_wings.weight", np.ones(4, np.float32)),
        ("blk.0.attn_wings.weight belongs to no parameter", "'qwen3moe'"),
    ),
    "intermediate": (lambda w: w.add_expert_feed_forward_length(48), ("experts",)),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults(fault: str, tmp_path: Path) -> None:
    how, parts = FAULTS[fault]
    refused(change(how, tmp_path / "m.gguf"), "m.gguf", *parts)


def rewrite_without(path: Path, leave_out: str, arch: str, model: Any) -> None:
    """The file without one of its tensors."""
    original = GGUFWriter.add_tensor

    def add(self: GGUFWriter, name: str, *args: Any, **kwargs: Any) -> None:
        if name != leave_out:
            original(self, name, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GGUFWriter, "add_tensor", add)
        write(model, path, arch)


@pytest.mark.parametrize(
    ("arch", "model_type", "name", "message"),
    [
        ("qwen3moe", "qwen3_moe", "blk.2.ffn_up_exps.weight", "lacks up"),
        ("qwen3moe", "qwen3_moe", "blk.2.attn_k_norm.weight", "layers.2.self_attn.k_norm.weight"),
        ("deepseek2", "deepseek_v3", "blk.3.exp_probs_b.bias", "layers.3.mlp.gate.e_score_correction_bias"),
        ("deepseek2", "deepseek_v3", "blk.3.attn_v_b.weight", "but not blk.3.attn_v_b.weight"),
        ("qwen3next", "qwen3_next", "blk.0.attn_gate.weight", "but not blk.0.attn_gate.weight"),
        ("qwen3next", "qwen3_next", "blk.0.ssm_a", "block 0 has none of the tensors blk.0.ssm_a"),
        ("qwen3moe", "qwen3_moe", "token_embd.weight", "no tensor token_embd.weight"),
    ],
)
def test_a_tensor_is_missing(arch: str, model_type: str, name: str, message: str, tmp_path: Path) -> None:
    """Never zeros in its place."""
    rewrite_without(tmp_path / "m.gguf", name, arch, tiny(model_type))
    refused(tmp_path / "m.gguf", message)


def test_other_architectures_are_named(tmp_path: Path) -> None:
    for arch, reason in (("mamba", ""), ("bailingmoe2", "no tree"), ("dbrx", "outside the interface")):
        writer = GGUFWriter(tmp_path / f"{arch}.gguf", arch)
        writer.add_tensor("token_embd.weight", np.ones((2, 4), np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        refused(
            tmp_path / f"{arch}.gguf", f"architecture {arch!r} is not supported", reason, "qwen3moe", "llama"
        )


def test_every_moe_architecture_of_the_package_is_tested_or_refused() -> None:
    tested = {arch for arch, _, _ in (*MOE, *DENSE)} | set(SAME_AS)
    assert set(ARCHS) | {"llama", "deepseek2"} == tested
    assert set(moe_names()) <= tested | set(UNREAD)
    assert not tested & set(UNREAD)


def test_the_documents_list_them() -> None:
    text = DOCS.read_text(encoding="utf-8")
    for arch, model_type, _ in (*MOE, *DENSE):
        assert f"| `{arch}` | {model_type} |" in text, arch
    for arch, reason in UNREAD.items():
        assert f"| `{arch}` | {reason} |" in text, arch


def test_commands(tmp_path: Path) -> None:
    """run and rules take the file, and keep its values where a rule says so."""
    write(wide(), tmp_path / "m.gguf", "qwen3moe", kind_of=kinds_of(QUANTISED[1]))
    file = str(tmp_path / "m.gguf")
    ran = CliRunner().invoke(
        app, ["run", file, "--prompt-ids", "1,2,3", "--max-tokens", "3", "--set", "experts=keep", "--json"]
    )
    assert ran.exit_code == 0, ran.output
    result = json.loads(ran.stdout)
    assert any(name.startswith("q4_k.") for name in result["kernels"])
    assert any(name.startswith("q6_k.") for name in result["kernels"])
    explained = CliRunner().invoke(app, ["rules", "explain", file, "--set", "experts=keep"])
    assert explained.exit_code == 0, explained.output
    assert "q4_k + q6_k" in explained.stdout


def test_nothing_stays_mapped_or_open(tmp_path: Path) -> None:
    write(tiny("qwen3_moe"), tmp_path / "m.gguf", "qwen3moe")
    source = GgufSource(tmp_path / "m.gguf")
    source.read("lm_head.weight")
    source.close()
    assert str(tmp_path) not in Path("/proc/self/maps").read_text()
    assert source.nbytes == sum(tensor.nbytes for tensor in opened(tmp_path / "m.gguf").tensors.values())
    assert SIZES["vocab_size"] == source.read_slice("lm_head.weight", 3).shape[0] * SIZES["vocab_size"]
