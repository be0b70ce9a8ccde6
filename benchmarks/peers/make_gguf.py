"""Write the synthetic Qwen3-MoE model of a comparison as GGUF: its experts in full, its dense half tiny.

Two heads of 128 and a vocabulary of 512; the router is quantised like the rest. Takes common.Job as JSON.
"""

from __future__ import annotations

from typing import Any

import common
import gguf
import numpy as np

VOCABULARY, HEADS, KEY_HEADS, HEAD = 512, 2, 1, 128
spec = common.job()
kind = {"q4_0": gguf.GGMLQuantizationType.Q4_0, "q8_0": gguf.GGMLQuantizationType.Q8_0}.get(
    spec.format, gguf.GGMLQuantizationType.BF16
)
out = gguf.GGUFWriter(spec.model, "qwen3moe")
rng = np.random.default_rng(1)


def quantised(name: str, array: Any) -> None:
    out.add_tensor(name, gguf.quants.quantize(array.astype(np.float32), kind), raw_dtype=kind)


def ones(name: str, size: int) -> None:
    out.add_tensor(name, np.ones(size, np.float32))


def gaussian(name: str, rows: int, columns: int) -> None:
    quantised(name, rng.standard_normal((rows, columns), dtype=np.float32) / columns**0.5)


out.add_context_length(4096)
out.add_embedding_length(spec.hidden)
out.add_block_count(spec.layers)
out.add_feed_forward_length(spec.intermediate)
out.add_head_count(HEADS)
out.add_head_count_kv(KEY_HEADS)
out.add_key_length(HEAD)
out.add_value_length(HEAD)
out.add_layer_norm_rms_eps(1e-6)
out.add_rope_freq_base(1e6)
out.add_expert_count(spec.experts)
out.add_expert_used_count(spec.top_k)
out.add_expert_feed_forward_length(spec.intermediate)
out.add_file_type({"q4_0": 2, "q8_0": 7}.get(spec.format, 32))
letters = [chr(256 + b) if b < 33 or 126 < b < 161 or b == 173 else chr(b) for b in range(256)]
pairs = [(a, b) for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"][
    : VOCABULARY - 258
]
out.add_tokenizer_model("gpt2")
out.add_tokenizer_pre("qwen2")
out.add_token_list([*letters, *(a + b for a, b in pairs), "<|endoftext|>", "<|im_end|>"])
out.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
out.add_token_merges([f"{a} {b}" for a, b in pairs])
out.add_bos_token_id(VOCABULARY - 2)
out.add_eos_token_id(VOCABULARY - 1)
out.add_add_bos_token(False)
gaussian("token_embd.weight", VOCABULARY, spec.hidden)
gaussian("output.weight", VOCABULARY, spec.hidden)
ones("output_norm.weight", spec.hidden)
base = common.weights(spec)
stacks = {}
for part in ("gate", "up", "down"):
    packed = np.stack([gguf.quants.quantize(w[part], kind) for w in base])
    stacks[part] = np.tile(packed, (-(-spec.experts // common.DISTINCT), 1, 1))[: spec.experts]
for number in range(spec.layers):
    at = f"blk.{number}."
    for norm, size in (("attn", spec.hidden), ("ffn", spec.hidden), ("attn_q", HEAD), ("attn_k", HEAD)):
        ones(f"{at}{norm}_norm.weight", size)
    gaussian(at + "attn_q.weight", HEADS * HEAD, spec.hidden)
    gaussian(at + "attn_k.weight", KEY_HEADS * HEAD, spec.hidden)
    gaussian(at + "attn_v.weight", KEY_HEADS * HEAD, spec.hidden)
    gaussian(at + "attn_output.weight", spec.hidden, HEADS * HEAD)
    gaussian(at + "ffn_gate_inp.weight", spec.experts, spec.hidden)
    for part, stack in stacks.items():
        out.add_tensor(f"{at}ffn_{part}_exps.weight", stack, raw_dtype=kind)
out.write_header_to_file()
out.write_kv_data_to_file()
out.write_tensors_to_file()
out.close()
