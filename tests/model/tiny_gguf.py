"""A tiny random dense Llama of transformers, and the same as a GGUF file with a byte-level tokenizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as Kind
from gguf.quants import dequantize, quantize
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, LAYERS = 4, 2, 16, 64, 256, 2
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEXT = "In 1851 the whale was 90 feet long; its teeth weren't counted. Naïve — but true.\n" * 3
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['content'] }}<|im_end|>{% endfor %}"

_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def make_tokenizer() -> Tokenizer:
    """Digits apart, then byte-level pairs; the control tokens come first."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=CONTROL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([TEXT], trainer)
    return tokenizer


def make_dense(vocabulary: int) -> LlamaForCausalLM:
    """Random weights that a GGUF file can hold: matrices rounded to Q4_1, the embedding to Q8_0."""
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=HIDDEN,
        intermediate_size=FFN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        max_position_embeddings=128,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1000.0},
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=2,
    )
    torch.manual_seed(5)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0, 0.2)
            if weight.dim() == 1:
                weight.add_(1.0)
            else:
                kind = Kind.Q8_0 if "embed" in name else Kind.Q4_1
                weight.copy_(torch.from_numpy(dequantize(quantize(weight.numpy(), kind), kind)))
    return model


def _rotary_pairs(weight: np.ndarray[Any, Any], heads: int) -> np.ndarray[Any, Any]:
    """The order of query and key rows in GGUF: row i and row i + half of a head side by side."""
    out = np.empty_like(weight)
    size = weight.shape[0] // heads
    for head in range(heads):
        for i in range(size // 2):
            for part in range(2):
                out[head * size + 2 * i + part] = weight[head * size + part * (size // 2) + i]
    return out


def write_gguf(
    path: Path,
    model: LlamaForCausalLM,
    tokenizer: Tokenizer,
    *,
    arch: str = "llama",
    pre: str = "smollm",
    leave_out: str = "",
    add: str = "",
) -> None:
    """Write ``model`` to ``path``. The rest makes faulty files: another architecture or pre-tokenizer, a
    tensor left out, a tensor added."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_block_count(LAYERS)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FFN)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(1000.0)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in CONTROL else 1 for token in tokens])
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template(TEMPLATE)

    def put(name: str, values: np.ndarray[Any, Any], kind: Kind) -> None:
        if name != leave_out:
            writer.add_tensor(name, quantize(values, kind), raw_dtype=kind)

    for name, parameter in model.named_parameters():
        values = parameter.detach().numpy()
        if name == "model.embed_tokens.weight":
            put("token_embd.weight", values, Kind.Q8_0)
        elif name == "model.norm.weight":
            put("output_norm.weight", values, Kind.F32)
        else:
            _, _, layer, part = name.removesuffix(".weight").split(".", 3)
            for heads, suffix in ((HEADS, "q_proj"), (KV_HEADS, "k_proj")):
                if part.endswith(suffix):
                    values = _rotary_pairs(values, heads)
            put(f"blk.{layer}.{_NAMES[part]}.weight", values, Kind.F32 if values.ndim == 1 else Kind.Q4_1)
    if add:
        put(add, np.ones(HIDDEN, np.float32), Kind.F32)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
