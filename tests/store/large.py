"""Checkpoints whose experts, or whose table of n-grams, are large, written fast: random bits, repeated."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file

from hetero.model.build import build_meta
from hetero.model.config import load_config
from tests.model.checkpoints import write_config
from tests.model.tiny_moe import tiny_config

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "vocab_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 64,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 511,
}


def large(folder: Path, seed: int, *, layers: int, experts: int, hidden: int, intermediate: int) -> int:
    """Write it; returns the bytes of its experts, all bfloat16."""
    folder.mkdir(parents=True)
    sizes = {
        "num_hidden_layers": layers,
        "num_experts": experts,
        "hidden_size": hidden,
        "moe_intermediate_size": intermediate,
    }
    (folder / "config.json").write_text(json.dumps(CONFIG | sizes))
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (512, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (512, hidden),
    }
    for layer in range(layers):
        at = f"model.layers.{layer}"
        attention = {
            "q_proj": (128, hidden),
            "k_proj": (64, hidden),
            "v_proj": (64, hidden),
            "o_proj": (hidden, 128),
        }
        shapes |= {f"{at}.self_attn.{name}.weight": shape for name, shape in attention.items()}
        shapes |= {f"{at}.self_attn.{name}.weight": (32,) for name in ("q_norm", "k_norm")}
        shapes |= {
            f"{at}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")
        }
        shapes[f"{at}.mlp.gate.weight"] = (experts, hidden)
        for expert in range(experts):
            for part in ("gate_proj", "up_proj", "down_proj"):
                shape = (hidden, intermediate) if part == "down_proj" else (intermediate, hidden)
                shapes[f"{at}.mlp.experts.{expert}.{part}.weight"] = shape
    header = _header({name: ("BF16", shape) for name, shape in shapes.items()})
    rng = np.random.default_rng(seed)
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    bits = _bits(rng, largest)
    twice = np.concatenate([bits, bits])
    norm = np.full(largest, 0x3F80, dtype=np.uint16)
    with (folder / "model.safetensors").open("wb", buffering=0) as file:
        file.write(header)
        for index, (name, shape) in enumerate(shapes.items()):
            count = int(np.prod(shape))
            start = 997 * index % largest
            file.write((norm[:count] if "norm" in name else twice[start : start + count]).data)
    return layers * experts * 3 * hidden * intermediate * 2


def large_table(folder: Path, seed: int, base: int) -> int:
    """A tiny qwen4_exp, bfloat16, whose table has about ``base`` rows a head; the bytes of the table."""
    sizes = {"ple_layer_ids": [1], "ple_embed_dim": 256, "split_ngram_parts": 3}
    small = tiny_config("qwen4_exp_text", **sizes, ngram_vocab_size_base=61)
    config = tiny_config("qwen4_exp_text", **sizes, ngram_vocab_size_base=base)
    config.architectures = write_config(small, folder, torch.bfloat16).config.architectures
    config.save_pretrained(folder)
    path = folder / "model.safetensors"
    held = {name: value.clone() for name, value in load_file(path).items()}  # which is a map of the file
    module = build_meta(load_config(folder)).get_submodule("model.layers.0.ple.ple_embedding")
    held |= {f"model.layers.0.ple.ple_embedding.{name}": value for name, value in module.named_buffers()}
    shards = sorted(name for name in held if ".shard_" in name)
    rows, width = module.ngram_embedding.weight.shape
    counts = [len(part) for part in np.array_split(np.arange(rows), len(shards))]
    for name in shards:
        del held[name]
    kinds = {torch.bfloat16: "BF16", torch.float32: "F32", torch.int64: "I64"}
    entries = {name: (kinds[value.dtype], tuple(value.shape)) for name, value in held.items()}
    entries |= {name: ("BF16", (count, width)) for name, count in zip(shards, counts, strict=True)}
    bits = _bits(np.random.default_rng(seed), 4_000_037)
    with path.open("wb", buffering=0) as file:
        file.write(_header(entries))
        for value in held.values():
            file.write(value.contiguous().view(-1).view(torch.uint8).numpy().data)
        for count in counts:
            left = count * width
            while left:
                left -= file.write(bits[:left].data) // 2
    return int(rows * width * 2)


def _header(tensors: dict[str, tuple[str, tuple[int, ...]]]) -> bytes:
    header, end = {}, 0
    for name, (kind, shape) in tensors.items():
        size = {"BF16": 2, "F32": 4, "I64": 8}[kind] * int(np.prod(shape))
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # as everybody writes it, so that tensors are aligned
    return struct.pack("<Q", len(text)) + text


def _bits(rng: np.random.Generator, count: int) -> np.ndarray:
    """Of bfloat16. Signs and mantissas at random, exponents of 2^-5 to 2^-8: about as weights are."""
    bits = rng.integers(0, 2**16, count, dtype=np.uint16)
    return (bits & 0x81FF) | 0x3C00
