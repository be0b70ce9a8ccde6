"""Reads a dense Llama-type model out of a GGUF file: config, float32 weights, tokenizer.

Only what the demo needs: architecture ``llama``, a byte-level BPE tokenizer. Everything else is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from hetero.core import InputError

# GGUF name inside a block -> name inside a layer of transformers' Llama.
_LAYER = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_CONTROL = 3  # type of a token that is not text, in tokenizer.ggml.token_type
# How a text is cut before byte pairs are merged, by the name that GGUF gives to the method.
_DIGITS_APART = {"smollm"}


class DenseGguf:
    """One file, its tensors mapped; raises InputError for a file that is not a dense Llama with such a
    tokenizer."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._reader = GGUFReader(path)
        except (OSError, ValueError, IndexError, KeyError) as error:
            raise InputError(f"{path} is not a readable GGUF file: {error}") from None
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        kind = self.field("general.architecture")
        if kind != "llama":
            raise InputError(f"{path}: architecture {kind!r}; only llama is read here")

    def field(self, name: str) -> Any:
        """A metadata value; InputError where the file has none of that name."""
        field = self._reader.get_field(name)
        if field is None:
            raise InputError(f"{self.path}: metadata {name} is missing")
        return field.contents()

    def config(self) -> dict[str, Any]:
        """The model's shape as keys of a transformers config, without ``model_type``."""
        heads = int(self.field("llama.attention.head_count"))
        hidden = int(self.field("llama.embedding_length"))
        rope = int(self.field("llama.rope.dimension_count"))
        if hidden != heads * rope:
            raise InputError(f"{self.path}: {heads} heads of {rope} do not make the hidden size {hidden}")
        return {
            "vocab_size": len(self.field("tokenizer.ggml.tokens")),
            "hidden_size": hidden,
            "intermediate_size": int(self.field("llama.feed_forward_length")),
            "num_hidden_layers": int(self.field("llama.block_count")),
            "num_attention_heads": heads,
            "num_key_value_heads": int(self.field("llama.attention.head_count_kv")),
            "head_dim": rope,
            "hidden_act": "silu",
            "max_position_embeddings": int(self.field("llama.context_length")),
            # Kept as float32 in the file: 1e-5 comes back as 9.99999974e-06.
            "rms_norm_eps": float(f"{self.field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": float(self.field("llama.rope.freq_base")),
            },
            "tie_word_embeddings": "output.weight" not in self._tensors,
            **self.special_ids(),
        }

    def special_ids(self) -> dict[str, int]:
        """``bos_token_id``, ``eos_token_id`` and ``pad_token_id``."""
        names = {"bos": "bos", "eos": "eos", "pad": "padding"}
        return {
            f"{ours}_token_id": int(self.field(f"tokenizer.ggml.{n}_token_id")) for ours, n in names.items()
        }

    def names(self) -> dict[str, str]:
        """Name in transformers' Llama -> name in the file, for every tensor of the model."""
        names = {_TOP[name]: name for name in self._tensors if name in _TOP}
        for layer in range(int(self.field("llama.block_count"))):
            for theirs, ours in _LAYER.items():
                names[f"model.layers.{layer}.{ours}"] = f"blk.{layer}.{theirs}"
        missing = [name for name in names.values() if name not in self._tensors]
        unknown = sorted(set(self._tensors) - set(names.values()))
        if missing or unknown:
            what = (
                f"lacks tensor {missing[0]}" if missing else f"has a tensor that Llama has not: {unknown[0]}"
            )
            raise InputError(f"{self.path} {what}")
        return names

    def read(self, name: str) -> torch.Tensor:
        """A tensor by its name in the file, decoded to float32 [out, in] (or [n]), rows in the order that
        transformers wants."""
        tensor = self._tensors[name]
        # Copied: float32 tensors come back as views of the map, which cannot be written.
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type)))
        # GGUF lists the fastest axis first.
        values = values.reshape([int(n) for n in reversed(tensor.shape)])
        for part, count in (("attn_q.weight", "head_count"), ("attn_k.weight", "head_count_kv")):
            if name.endswith(part):
                values = _halves(values, int(self.field(f"llama.attention.{count}")))
        return values.contiguous()

    def tokenizer(self) -> Tokenizer:
        """The byte-level BPE tokenizer that the metadata describes."""
        model, cut = self.field("tokenizer.ggml.model"), self.field("tokenizer.ggml.pre")
        if model != "gpt2" or cut not in _DIGITS_APART:
            raise InputError(f"{self.path}: tokenizer {model}/{cut}; only gpt2/smollm is read here")
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        merges = [tuple(merge.split(" ")) for merge in self.field("tokenizer.ggml.merges")]
        vocab = {token: index for index, token in enumerate(tokens)}
        tokenizer = Tokenizer(models.BPE(vocab, merges))
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
        tokenizer.decoder = decoders.ByteLevel()
        kinds = self.field("tokenizer.ggml.token_type")
        control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL]
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
        return tokenizer

    def tokenizer_config(self) -> dict[str, Any]:
        """What ``tokenizer_config.json`` says: special tokens and the chat template."""
        tokens: list[str] = self.field("tokenizer.ggml.tokens")
        ids = self.special_ids()
        return {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **{f"{name}_token": tokens[ids[f"{name}_token_id"]] for name in ("bos", "eos", "pad")},
            "unk_token": tokens[int(self.field("tokenizer.ggml.unknown_token_id"))],
            "clean_up_tokenization_spaces": False,
            "model_max_length": int(self.field("llama.context_length")),
            "chat_template": self.field("tokenizer.chat_template"),
        }


def _halves(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Undoes GGUF's order of query and key rows, which puts the two rows that rotate together side by side;
    transformers has the first halves of a head, then the second."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
