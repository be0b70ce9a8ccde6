"""A model's configuration, as transformers spells it, from the metadata of a GGUF file."""

from __future__ import annotations

import re
from typing import Any

import numpy as np
from gguf.constants import MODEL_TENSOR as T
from gguf.constants import TENSOR_NAMES, Keys, RopeScalingType, TokenType

from hetero.core import InputError
from hetero.model.gguf_arch import find_arch
from hetero.model.gguf_derived import DERIVED
from hetero.model.gguf_file import GgufFile
from hetero.model.gguf_reading import ReadFloats, Reading
from hetero.model.gguf_scan import GgufTensor

# Key of the metadata -> field of the configuration, of every architecture.
_COMMON = {
    Keys.LLM.CONTEXT_LENGTH: "max_position_embeddings",
    Keys.LLM.EMBEDDING_LENGTH: "hidden_size",
    Keys.LLM.FEED_FORWARD_LENGTH: "intermediate_size",
    Keys.Attention.HEAD_COUNT: "num_attention_heads",
    Keys.Attention.HEAD_COUNT_KV: "num_key_value_heads",
    Keys.Attention.KEY_LENGTH: "head_dim",
    Keys.Attention.LAYERNORM_RMS_EPS: "rms_norm_eps",
    Keys.LLM.EXPERT_USED_COUNT: "num_experts_per_tok",
}
_REQUIRED = (Keys.LLM.EMBEDDING_LENGTH, Keys.Attention.HEAD_COUNT, Keys.LLM.CONTEXT_LENGTH)
_TOKENS = {
    Keys.Tokenizer.BOS_ID: "bos_token_id",
    Keys.Tokenizer.PAD_ID: "pad_token_id",
}
# Control tokens that end a turn or a text in models whose files name one other such token alone.
_ENDS = frozenset({
    "<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<|endoftext|>", "<end_of_turn>", "<|return|>",
    "<|call|>", "<|end_of_text|>",  "<｜end▁of▁sentence｜>", "<|eot|>", "<EOT>", "_<EOT>", "</s>",
    "[e~[", "<|im_end_text|>", "[|endofturn|]",
})  # fmt: skip
# The largest plausible number of blocks, heads or experts; a larger one is damage, and would take long.
_MANY = 1 << 16


def read_config(found: GgufFile, read_floats: ReadFloats) -> dict[str, Any]:
    """The configuration as a config.json would hold it, ``model_type`` included.

    ``read_floats`` reads small tensors of rotary factors. Raises InputError for an architecture that is not
    supported, and for metadata that are missing, of the wrong kind, or at odds with the tensors.
    """
    arch = find_arch(found.metadata, found.arch, str(found.path))
    return _Config(found, arch, read_floats).config()


class _Config(Reading):
    def config(self) -> dict[str, Any]:
        for key in _REQUIRED:
            self.number(key)
        self._count_layers()
        for key, name in (_COMMON | dict(self.arch.fields)).items():
            value = self.one(key) if name else None
            if value is not None:
                self.values[name] = value
        self.values.setdefault("num_key_value_heads", self.values["num_attention_heads"])
        self._check_embedding()
        self.values["tie_word_embeddings"] = not self.has(T.OUTPUT)
        for key, name in _TOKENS.items():
            value = self.found.metadata.get(key)
            # Ids that no token has are how some files say that there is none.
            if not isinstance(value, int) or not 0 <= value < self.values["vocab_size"]:
                value = None
            self.values[name] = value
        ends = end_ids(self.found)
        self.values["eos_token_id"] = ends[0] if len(ends) == 1 else ends or None
        self.values["rope_parameters"] = self._rope()
        for name in self.arch.derived:
            DERIVED[name](self)
        return self.values

    def _count_layers(self) -> None:
        blocks, drafts = self.number(Keys.LLM.BLOCK_COUNT), self.one(Keys.LLM.NEXTN_PREDICT_LAYERS) or 0
        if not 0 <= drafts < blocks:
            self.wrong(Keys.LLM.NEXTN_PREDICT_LAYERS, f"is {drafts}, of {blocks} blocks")
        held = {int(m[1]) for name in self.found.tensors if (m := re.match(r"blk\.(\d{1,9})\.", name))}
        if blocks > _MANY or blocks - drafts > len(held):
            self.wrong(Keys.LLM.BLOCK_COUNT, f"is {blocks}, but there are tensors of {len(held)} blocks")
        self.values["num_hidden_layers"] = blocks - drafts
        if drafts:
            self.values["num_nextn_predict_layers"] = drafts

    def _check_embedding(self) -> None:
        embedding = self.tensor(T.TOKEN_EMBD)
        if embedding is None or len(embedding.shape) != 2:
            raise InputError(
                f"{self.found.path}: no tensor {TENSOR_NAMES[T.TOKEN_EMBD]}.weight of two dimensions"
            )
        self.values["vocab_size"], width = embedding.shape
        if width != self.values["hidden_size"]:
            self.wrong(
                Keys.LLM.EMBEDDING_LENGTH,
                f"is {self.values['hidden_size']}, but {embedding.name} has {width}",
            )
        experts = self.one(Keys.LLM.EXPERT_COUNT) or 0
        for n in range(self.layers):
            router = self.tensor(T.FFN_GATE_INP, n)
            if router is not None and router.shape[0] != experts:
                self.wrong(
                    Keys.LLM.EXPERT_COUNT, f"is {experts}, but {router.name} has {router.shape[0]} rows"
                )
        for name in ("num_attention_heads", "num_key_value_heads", "num_experts_per_tok"):
            if self.values.get(name, 1) > _MANY:
                raise InputError(f"{self.found.path}: {name} of {self.values[name]} is not plausible")

    def _rope(self) -> dict[str, Any]:
        theta = self.one(Keys.Rope.FREQ_BASE)
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0 if theta is None else theta}
        rotated, head = self.one(Keys.Rope.DIMENSION_COUNT), self.head_dim()
        if rotated is not None and rotated != head and Keys.Attention.KV_LORA_RANK not in self.arch.fields:
            rope["partial_rotary_factor"] = rotated / head
        kind, factor = self.get(Keys.Rope.SCALING_TYPE), self.one(Keys.Rope.SCALING_FACTOR)
        original = self.one(Keys.Rope.SCALING_ORIG_CTX_LEN)
        factors = self.tensor(T.ROPE_FREQS)
        match kind:
            case None | RopeScalingType.NONE.value | "":
                pass
            case RopeScalingType.LINEAR.value:
                rope |= {"rope_type": "linear", "factor": float(factor or 1.0)}
            case RopeScalingType.YARN.value:
                rope |= self._yarn(float(factor or 1.0), original)
            case RopeScalingType.LONGROPE.value:
                rope |= self._long_rope(original)
            case _:
                self.wrong(Keys.Rope.SCALING_TYPE, f"is {kind!r}, which is not supported")
        long = self.tensor(T.ROPE_FACTORS_LONG)
        if long is not None and rope["rope_type"] == "default":
            rope |= self._long_rope(original)
        elif factors is not None:
            rope |= self._table(factors)
        return rope

    def _yarn(self, factor: float, original: Any) -> dict[str, Any]:
        yarn: dict[str, Any] = {"rope_type": "yarn", "factor": factor}
        if original is not None:
            yarn["original_max_position_embeddings"] = original
        for key, name in (
            (Keys.Rope.SCALING_YARN_BETA_FAST, "beta_fast"),
            (Keys.Rope.SCALING_YARN_BETA_SLOW, "beta_slow"),
            (Keys.Rope.SCALING_YARN_ATTN_FACTOR, "attention_factor"),
        ):
            value = self.one(key)
            if value is not None:
                yarn[name] = float(value)
        return yarn

    def _long_rope(self, original: Any) -> dict[str, Any]:
        rope: dict[str, Any] = {"rope_type": "longrope"}
        for kind, name in ((T.ROPE_FACTORS_LONG, "long_factor"), (T.ROPE_FACTORS_SHORT, "short_factor")):
            tensor = self.tensor(kind)
            if tensor is None:
                raise InputError(f"{self.found.path}: no tensor {TENSOR_NAMES[kind]}.weight")
            rope[name] = self.read_floats(tensor).astype(float).tolist()
        length = self.values["max_position_embeddings"]
        original = original or length
        rope |= {"original_max_position_embeddings": original, "factor": length / original}
        attention = self.one(Keys.Rope.SCALING_ATTN_FACTOR)
        if attention is not None:
            rope["attention_factor"] = float(attention)
        return rope

    def _table(self, factors: GgufTensor) -> dict[str, Any]:
        """Llama 3's scaling comes as a table of what divides each frequency."""
        values = self.read_floats(factors).astype(float).tolist()
        return {
            "rope_type": "longrope",
            "long_factor": values,
            "short_factor": values,
            "factor": 1.0,
            "attention_factor": 1.0,
            "original_max_position_embeddings": self.values["max_position_embeddings"],
        }


def end_ids(found: GgufFile) -> list[int]:
    """Ids of the tokens that end an answer: those that the file names, and control tokens known for it."""
    metadata = found.metadata
    tokens, kinds = metadata.get(Keys.Tokenizer.LIST), metadata.get(Keys.Tokenizer.TOKEN_TYPE)
    count = len(tokens) if isinstance(tokens, list) else 1 << 31
    named = (
        metadata.get(key) for key in (Keys.Tokenizer.EOS_ID, Keys.Tokenizer.EOT_ID, Keys.Tokenizer.EOM_ID)
    )
    ids = {value for value in named if type(value) is int and 0 <= value < count}
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(kinds) == count:
        control = {str(tokens[i]): int(i) for i in np.flatnonzero(kinds == TokenType.CONTROL)}
        ends = {text for text in _ENDS if text in control}
        if "<|return|>" in ends:
            ends.discard("<|end|>")  # which there only ends a message within an answer
        ids |= {control[text] for text in ends}
    return sorted(ids)
