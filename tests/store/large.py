"""A checkpoint whose experts are large, written fast: random bits of one expert, turned for each."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import numpy as np

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
    header, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    rng = np.random.default_rng(seed)
    largest = max(int(np.prod(shape)) for shape in shapes.values())
    # Signs and mantissas at random, exponents of 2^-5 to 2^-8: about as weights of this width are.
    bits = rng.integers(0, 2**16, largest, dtype=np.uint16)
    bits = (bits & 0x81FF) | 0x3C00
    twice = np.concatenate([bits, bits])
    norm = np.full(largest, 0x3F80, dtype=np.uint16)
    with (folder / "model.safetensors").open("wb", buffering=0) as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for index, (name, shape) in enumerate(shapes.items()):
            count = int(np.prod(shape))
            start = 997 * index % largest
            file.write((norm[:count] if "norm" in name else twice[start : start + count]).data)
    return layers * experts * 3 * hidden * intermediate * 2
