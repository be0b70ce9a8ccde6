"""Tiny quantised checkpoints of every scheme, written by definitions of their own.

Each scheme takes a matrix of floats and gives the tensors that its files hold and, in float64, the values
that they stand for. Nothing here uses the readers or the packed formats.
"""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from hetero.model.build import choose_class
from tests.model.tiny_moe import tiny_config, tiny_model

_orders = torch.Generator()
# Tensors by the ending that replaces "weight", and the values in float64.
Made = tuple[dict[str, Tensor], Tensor]

E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], dtype=torch.float64)


@dataclass(frozen=True)
class Scheme:
    """One kind of checkpoint: how a matrix is stored, the configuration, the format that keeps it."""

    make: Callable[[Tensor], Made]
    config: dict[str, Any]
    format: str | None
    # Names of matrices that are quantised; others stay plain.
    names: str = r"_proj\.weight$"
    config_file: str = "config.json"
    extra: dict[str, Tensor] = field(default_factory=dict)
    apart: bool = False  # whether gate and up of an expert have shuffled columns of their own


def bits_to_words(values: Tensor, bits: int) -> Tensor:
    """Integers [r, c] into int32 [r, ceil(c * bits / 32)], the first in the lowest bits."""
    per = 32 // bits
    padded = torch.nn.functional.pad(values.long(), (0, -values.shape[1] % per))
    out = (padded.reshape(values.shape[0], -1, per) << (bits * torch.arange(per))).sum(2)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32)


def grouped(w: Tensor, group: int) -> Tensor:
    return w.double().reshape(w.shape[0], -1, group)


def integers(
    w: Tensor, bits: int, group: int, *, symmetric: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Codes from 0 [n, k], scales and zeros [n, groups], values: each group over its range."""
    parts, top = grouped(w, group), 2**bits - 1
    if symmetric:
        scales = (parts.abs().amax(2) / (2 ** (bits - 1) - 1)).to(dtype)
        zeros = torch.full(scales.shape, 2 ** (bits - 1))
    else:
        low, high = parts.amin(2).clamp(max=0), parts.amax(2).clamp(min=0)
        scales = ((high - low) / top).to(dtype)
        zeros = torch.round(-low / scales.double()).clamp(0, top).long()
    codes = torch.round(parts / scales.double()[..., None] + zeros[..., None]).clamp(0, top).long()
    values = (codes - zeros[..., None]) * scales.double()[..., None]
    return codes.flatten(1), scales, zeros, values.flatten(1)


def fp8_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    codes = x.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes, codes.double()


def e2m1_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Nearest codes 0 to 15, and their numbers."""
    nearest = torch.bucketize(x.abs().contiguous(), (E2M1[1:] + E2M1[:-1]) / 2)
    return nearest + 8 * (x < 0), E2M1[nearest] * torch.where(x < 0, -1.0, 1.0)


def e2m1_bytes(codes: Tensor) -> Tensor:
    return (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)


def fp8_blocks(
    rows: int, columns: int, dtype: torch.dtype = torch.float32, suffix: str = "weight_scale_inv"
) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        n, k = w.shape
        r, c = torch.arange(n) // rows, torch.arange(k) // columns
        scales = torch.zeros(int(r[-1]) + 1, int(c[-1]) + 1, dtype=torch.float64)
        for i in range(scales.shape[0]):
            for j in range(scales.shape[1]):
                tile = w[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns]
                scales[i, j] = tile.abs().max() / 448
        scales = scales.to(dtype)
        spread = scales.double()[r][:, c]
        codes, values = fp8_codes(w / spread)
        return {"weight": codes, suffix: scales}, values * spread

    return make


def fp8_rows(w: Tensor, *, flat: bool = False, dtype: torch.dtype = torch.bfloat16) -> Made:
    scales = (w.abs().amax(1, keepdim=True) / 448).to(dtype)
    codes, values = fp8_codes(w / scales.double())
    return {"weight": codes, "weight_scale": scales.flatten() if flat else scales}, values * scales.double()


def fp8_whole(suffix: str, shape: tuple[int, ...], **others: Tensor) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        scale = w.abs().max().float() / 448
        codes, values = fp8_codes(w / scale.double())
        return {"weight": codes, suffix: scale.reshape(shape), **others}, values * scale.double()

    return make


def packed(bits: int, group: int, *, symmetric: bool, order: bool = False) -> Callable[[Tensor], Made]:
    """compressed-tensors' integers in words; with ``order`` columns belong to shuffled groups."""

    def make(w: Tensor) -> Made:
        n, k = w.shape
        size = k if group == -1 else group
        turn = torch.randperm(k, generator=_orders) if order else torch.arange(k)
        codes, scales, zeros, values = integers(
            w[:, turn], bits, size, symmetric=symmetric, dtype=torch.bfloat16
        )
        back = turn.argsort()
        made = {
            "weight_packed": bits_to_words(codes[:, back], bits),
            "weight_scale": scales,
            "weight_shape": torch.tensor([n, k]),
        }
        if not symmetric:
            made["weight_zero_point"] = bits_to_words(zeros.T, bits).T
        if order:
            made["weight_g_idx"] = (torch.arange(k) // size)[back].to(torch.int32)
        return made, values[:, back]

    return make


def int8_rows(*, symmetric: bool = True) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        codes, scales, zeros, values = integers(w, 8, w.shape[1], symmetric=symmetric, dtype=torch.bfloat16)
        made = {"weight": (codes - 128).to(torch.int8), "weight_scale": scales}
        if not symmetric:
            made["weight_zero_point"] = (zeros - 128).to(torch.int8)
        return made, values

    return make


def awq(group: int) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        size = w.shape[1] if group == -1 else group
        codes, scales, zeros, values = integers(w, 4, size, symmetric=False, dtype=torch.float16)
        # In each run of eight, the word's fields are rows 0, 2, 4, 6, 1, 3, 5, 7.
        n = torch.arange(w.shape[0]).reshape(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].flatten()
        made = {
            "qweight": bits_to_words(codes.T[:, n], 4),
            "qzeros": bits_to_words(zeros.T[:, n], 4),
            "scales": scales.T,
        }
        return made, values

    return make


def gptq(
    bits: int, group: int, *, symmetric: bool, first: bool, order: bool = False
) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        k = w.shape[1]
        size = k if group == -1 else group
        turn = torch.randperm(k, generator=_orders) if order else torch.arange(k)
        codes, scales, zeros, values = integers(
            w[:, turn], bits, size, symmetric=symmetric, dtype=torch.float16
        )
        back = turn.argsort()
        words = bits_to_words(zeros.T, bits).long()
        if first:  # a word of zeros less one in each field, and wrapped around
            words = (words - {4: 0x11111111, 8: 0x01010101}[bits] + 2**31) % 2**32 - 2**31
        made = {
            "qweight": bits_to_words(codes[:, back], bits).T,
            "qzeros": words.to(torch.int32),
            "scales": scales.T,
            "g_idx": (torch.arange(k) // size)[back].to(torch.int32),
        }
        return made, values[:, back]

    return make


def mxfp4_parts(w: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes [n, k / 32, 32], E8M0 bytes [n, k / 32], values."""
    parts = grouped(w, 32)
    exponent = torch.floor(torch.log2(parts.abs().amax(2).clamp(min=1e-30))) - 2
    codes, numbers = e2m1_codes(parts / 2 ** exponent[..., None])
    return codes, (exponent + 127).to(torch.uint8), (numbers * 2 ** exponent[..., None]).flatten(1)


def mxfp4_packed(w: Tensor) -> Made:
    codes, scales, values = mxfp4_parts(w)
    return {"weight_packed": e2m1_bytes(codes.flatten(1)), "weight_scale": scales}, values


def nvfp4(*, divides: bool) -> Callable[[Tensor], Made]:
    def make(w: Tensor) -> Made:
        parts = grouped(w, 16)
        whole = parts.abs().max() / (448 * 6)
        stored = (1 / whole if divides else whole).float().reshape((1,) if divides else ())
        matrix = 1 / stored if divides else stored  # in float32
        scales = (parts.abs().amax(2) / 6 / matrix.double()).float().to(torch.float8_e4m3fn)
        both = (scales.double() * matrix.double()).float().double()  # rounded once
        codes, numbers = e2m1_codes(parts / both[..., None])
        packed = e2m1_bytes(codes.flatten(1))
        values = (numbers * both[..., None]).flatten(1)
        if divides:
            names = ("weight_packed", "weight_scale", "weight_global_scale")
        else:
            names = ("weight", "weight_scale", "weight_scale_2")
        return dict(zip(names, (packed, scales, stored), strict=True)), values

    return make


def _ct(fmt: str, weights: dict[str, Any], activations: dict[str, Any] | None = None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors",
        "format": fmt,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*mlp.gate$"],
    }


def _ct_int(bits: int, strategy: str, group: int | None, *, symmetric: bool, **more: Any) -> dict[str, Any]:
    return {
        "num_bits": bits,
        "type": "int",
        "strategy": strategy,
        "group_size": group,
        "symmetric": symmetric,
        **more,
    }


_TOKEN = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
_BLOCK = {"strategy": "block", "block_structure": [128, 128]}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def _gptq_config(**more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, **more}


SCHEMES: dict[str, Scheme] = {
    "fp8": Scheme(
        fp8_blocks(128, 128), {"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e4m3"}, "fp8"
    ),
    "fp8-bf16-scales": Scheme(
        fp8_blocks(128, 128, torch.bfloat16),
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        "fp8",
    ),
    "fp8-matrix": Scheme(
        fp8_whole("weight_scale_inv", (), activation_scale=torch.tensor(0.5)),
        {"quant_method": "fp8", "weight_block_size": None, "activation_scheme": "static"},
        "fp8",
    ),
    "fp8-small-blocks": Scheme(
        fp8_blocks(64, 64), {"quant_method": "fp8", "weight_block_size": [64, 64]}, None
    ),
    "w4a16": Scheme(
        packed(4, 128, symmetric=True),
        _ct("pack-quantized", _ct_int(4, "group", 128, symmetric=True)),
        "int4 g128",
    ),
    "w4a16-asym": Scheme(
        packed(4, 64, symmetric=False),
        _ct("pack-quantized", _ct_int(4, "group", 64, symmetric=False)),
        "int4z g64",
    ),
    "w4a16-channel": Scheme(
        packed(4, -1, symmetric=True),
        _ct("pack-quantized", _ct_int(4, "channel", None, symmetric=True)),
        "int4 g128",
    ),
    "w8a16": Scheme(
        packed(8, 32, symmetric=True),
        _ct("pack-quantized", _ct_int(8, "group", 32, symmetric=True)),
        "int8 g32",
    ),
    "w4a16-order": Scheme(
        packed(4, 64, symmetric=True, order=True),
        _ct("pack-quantized", _ct_int(4, "group", 64, symmetric=True, actorder="group")),
        "int4 g64 ordered",
    ),
    "w8a8": Scheme(
        int8_rows(), _ct("int-quantized", _ct_int(8, "channel", None, symmetric=True), _TOKEN), "int8 g128"
    ),
    "w8a8-asym": Scheme(
        int8_rows(symmetric=False),
        _ct("int-quantized", _ct_int(8, "channel", None, symmetric=False)),
        "int8z g128",
    ),
    "w8a8-fp8-rows": Scheme(
        fp8_rows, _ct("float-quantized", {**_FP8, "strategy": "channel"}, {"dynamic": True}), "fp8_row"
    ),
    "fbgemm": Scheme(
        lambda w: fp8_rows(w, dtype=torch.float32),
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "fp8_row",
    ),
    "w8a8-fp8": Scheme(
        fp8_whole("weight_scale", (1,), input_scale=torch.ones(1)),
        _ct("float-quantized", {**_FP8, "strategy": "tensor"}, {"dynamic": False}),
        "fp8",
    ),
    "w8a8-fp8-blocks": Scheme(
        fp8_blocks(128, 128, suffix="weight_scale"), _ct("float-quantized", {**_FP8, **_BLOCK}), "fp8"
    ),
    "ct-nvfp4": Scheme(
        nvfp4(divides=True),
        _ct(
            "nvfp4-pack-quantized",
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
        ),
        "nvfp4",
    ),
    "ct-mxfp4": Scheme(
        mxfp4_packed,
        _ct("mxfp4-pack-quantized", {"num_bits": 4, "type": "float", "strategy": "group", "group_size": 32}),
        "mxfp4",
    ),
    "awq": Scheme(
        awq(128),
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True, "version": "gemm"},
        "int4z g128",
    ),
    "gptq": Scheme(gptq(4, 64, symmetric=True, first=True), _gptq_config(), "int4 g64"),
    "gptq-v2-asym": Scheme(
        gptq(4, 32, symmetric=False, first=False),
        _gptq_config(group_size=32, sym=False, checkpoint_format="gptq_v2"),
        "int4z g32",
    ),
    "gptq-asym": Scheme(
        gptq(4, 64, symmetric=False, first=True),
        _gptq_config(sym=False, checkpoint_format="gptq"),
        "int4z g64",
    ),
    "gptq-8": Scheme(
        gptq(8, -1, symmetric=True, first=True), _gptq_config(bits=8, group_size=-1), "int8 g128"
    ),
    "gptq-order": Scheme(
        gptq(4, 64, symmetric=True, first=True, order=True),
        _gptq_config(desc_act=True),
        "int4 g64 ordered",
    ),
    "gptq-order-int8": Scheme(
        gptq(8, 32, symmetric=False, first=False, order=True),
        _gptq_config(desc_act=True, bits=8, group_size=32, sym=False, checkpoint_format="gptq_v2"),
        "int8z g32 ordered",
    ),
    "gptq-order-apart": Scheme(
        gptq(4, 64, symmetric=True, first=True, order=True), _gptq_config(desc_act=True), None, apart=True
    ),
    "modelopt-nvfp4": Scheme(
        nvfp4(divides=False),
        {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]},
        "nvfp4",
        extra={"model.layers.0.self_attn.k_proj.k_scale": torch.ones(1)},
    ),
    "modelopt-fp8": Scheme(
        fp8_whole("weight_scale", (), input_scale=torch.tensor(1.0)),
        {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}},
        "fp8",
        config_file="hf_quant_config.json",
    ),
    "modelopt-fp8-rows": Scheme(
        lambda w: fp8_rows(w, flat=True),
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
        "fp8_row",
    ),
}
"""Schemes of checkpoints with one tensor per expert."""

MXFP4_CONFIG = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def small_config(model_type: str, **changes: Any) -> Any:
    """A tiny configuration whose matrices hold whole groups of 128."""
    config = tiny_config(model_type)
    sizes = {
        "hidden_size": 256,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
        "num_hidden_layers": 2 if model_type == "deepseek_v3" else 1,
        "num_experts": 4,
        "n_routed_experts": 4,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "n_group": 2,
        "topk_group": 1,
        "num_attention_heads": 8,
        "v_head_dim": 16,
        "head_dim": 32,
        **changes,
    }
    for name, value in sizes.items():
        if hasattr(config, name):
            setattr(config, name, value)
    if hasattr(config, "mlp_only_layers"):
        config.mlp_only_layers = []
    if model_type == "deepseek_v3":
        config.num_key_value_heads = config.num_attention_heads
        config.qk_nope_head_dim, config.qk_rope_head_dim = 16, 16
        config.qk_head_dim, config.head_dim = 32, 16
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[: config.num_hidden_layers]
    return config


@dataclass(frozen=True)
class Written:
    """A quantised checkpoint in ``folder``, and the model that it stands for."""

    folder: Path
    values: dict[str, Tensor]  # of quantised tensors by their logical names, float64
    names: set[str]  # of all tensors of the plain checkpoint
    model: Any  # of transformers, with those values in float32


def write_quantised(folder: Path, model_type: str, scheme: Scheme, config: Any = None) -> Written:
    """A random model of a type, its matrices stored by a scheme."""
    config = config or small_config(model_type)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    plain = load_file(path)
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    dequantised = {}
    for name, tensor in plain.items():
        if not re.search(scheme.names, name) or tensor.ndim != 2 or min(tensor.shape) < 16:
            stored[name] = dequantised[name] = tensor
            continue
        # Gate and up of an expert see the same inputs, which is what tools take the order of columns from.
        order_by(name if scheme.apart else name.replace("gate_proj", "up_proj"))
        parts, values[name] = scheme.make(tensor)
        stored |= {name.removesuffix("weight") + ending: part for ending, part in parts.items()}
        dequantised[name] = values[name].float()
    write_files(folder, stored | scheme.extra, scheme.config, scheme.config_file)
    return Written(folder, values, set(plain), _reference(folder, dequantised))


def order_by(inputs: str) -> None:
    """What columns are shuffled by from here on."""
    _orders.manual_seed(zlib.crc32(inputs.encode()))


def write_gpt_oss(folder: Path, config: Any = None) -> Written:
    """A random gpt-oss in MXFP4, experts in blocks [E, rows, k / 32, 16]."""
    config = config or small_config("gpt_oss", intermediate_size=96)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    stored: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    dequantised = {}
    for name, tensor in plain.items():
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            stored[name] = dequantised[name] = tensor
            continue
        made = [mxfp4_parts(expert.T) for expert in tensor]
        stored[f"{name}_blocks"] = torch.stack([e2m1_bytes(codes) for codes, _, _ in made])
        stored[f"{name}_scales"] = torch.stack([scales for _, scales, _ in made])
        values[name] = torch.stack([value.T for _, _, value in made])
        dequantised[name] = values[name].float().contiguous()
    write_files(folder, stored, MXFP4_CONFIG)
    return Written(folder, values, set(plain), _reference(folder, dequantised))


def write_files(
    folder: Path, tensors: dict[str, Tensor], config: dict[str, Any], config_file: str = "config.json"
) -> None:
    contiguous = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / config_file
    if config_file == "config.json":
        config = {**json.loads(path.read_text()), "quantization_config": config}
    path.write_text(json.dumps(config))


def _reference(folder: Path, tensors: dict[str, Tensor]) -> Any:
    """What transformers makes of the dequantised tensors as a plain checkpoint."""
    plain = folder / "plain"
    plain.mkdir()
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    (plain / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        plain / "model.safetensors",
        metadata={"format": "pt"},
    )
    from transformers import AutoConfig

    loaded = AutoConfig.from_pretrained(plain)
    return choose_class(loaded).cls.from_pretrained(plain, dtype=torch.float32).eval()


def write_packed_fp8(folder: Path, config: Any) -> Written:
    """A random model whose packed experts are FP8 in blocks, the rest plain."""
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, seed=int(torch.randint(2**31, ())))
    model.save_pretrained(folder)
    plain = load_file(folder / "model.safetensors")
    stored, values, dequantised = dict(plain), {}, dict(plain)
    for name, tensor in plain.items():
        if tensor.ndim == 3 and min(tensor.shape[1:]) >= 128:
            made = [fp8_blocks(128, 128)(expert) for expert in tensor]
            stored[name] = torch.stack([parts["weight"].view(torch.uint8) for parts, _ in made]).view(
                torch.float8_e4m3fn
            )
            stored[f"{name}_scale_inv"] = torch.stack([parts["weight_scale_inv"] for parts, _ in made])
            values[name] = torch.stack([value for _, value in made])
            dequantised[name] = values[name].float()
    write_files(folder, stored, SCHEMES["fp8"].config)
    return Written(folder, values, set(plain), _reference(folder, dequantised))
