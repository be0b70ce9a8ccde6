"""What a sequence keeps in memory: keys and values of its tokens, states of recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

_RECURRENT = ("linear_attention", "mamba", "mamba2", "recurrent", "conv", "moe_mamba")


@dataclass(frozen=True, slots=True)
class LayerState:
    """One layer's share of what a sequence keeps."""

    kind: str  # attention, sliding, indexed, mla, delta
    per_token: int = 0  # values that each token adds, in the dtype of the dense layers
    window: int | None = None  # tokens after which nothing more is kept
    fixed: int = 0  # values of the dense layers' dtype that do not grow
    fixed_f32: int = 0  # float32 values that do not grow
    token_bytes: int = 0  # that each token adds besides, whatever the dtype
    fixed_bytes: int = 0
    budget: int | None = None  # tokens that a step reads at most, where attention is sparse
    readers: int = 1  # query heads that read each of the values

    def bytes(self, tokens: int, width: int) -> int:
        """Bytes of a sequence of ``tokens``, at ``width`` bytes a value."""
        kept = tokens if self.window is None else min(tokens, self.window)
        sized = width * (self.per_token * kept + self.fixed) + 4 * self.fixed_f32
        return sized + self.token_bytes * kept + self.fixed_bytes

    def read_bytes(self, tokens: int, width: int) -> int:
        """Bytes that a step reads after ``tokens``."""
        return self.bytes(tokens if self.budget is None else min(tokens, self.budget), width)


def sequence_bytes(layers: Sequence[LayerState], tokens: int, width: int) -> int:
    """Bytes of everything that one sequence of ``tokens`` keeps, over all layers."""
    return sum(layer.bytes(tokens, width) for layer in layers)


def states(
    text: Mapping[str, Any], layers: int | None = None
) -> tuple[tuple[LayerState, ...], tuple[str, ...]]:
    """One state a layer, from the text part of a configuration, and notes on what is not counted. ``layers``:
    how many, where that is known better than the configuration tells."""
    kinds = layer_kinds(text, layers)
    unknown = sorted({k for k in kinds if k in _RECURRENT and k != "linear_attention"})
    unknown += ["linear_attention"] if "linear_attention" in kinds and not _has_delta(text) else []
    notes = tuple(f"the state of '{kind}' layers is not counted" for kind in unknown)
    found = [_state(text, kind) for kind in kinds]
    for layer in text.get("ple_layer_ids") or ():  # they count from 1
        if 1 <= layer <= len(found):
            found[layer - 1] = _with_ngrams(text, found[layer - 1])
    indexed = [i for i, state in enumerate(found) if state.kind == "indexed"]
    if indexed:  # positions of all indexers stand once, three int64 a token
        found[indexed[0]] = replace(found[indexed[0]], token_bytes=24)
    return tuple(found), notes


def layer_kinds(text: Mapping[str, Any], layers: int | None = None) -> list[str]:
    """The kind of every layer's token mixer, in the words of ``layer_types``."""
    count = int(text.get("num_hidden_layers") or 0) if layers is None else layers
    listed = text.get("layer_types") or text.get("layers_block_type")
    if isinstance(listed, list) and len(listed) >= count:
        return [str(kind) for kind in listed[:count]]
    every = text.get("full_attention_interval")
    if _has_delta(text):
        every = every if isinstance(every, int) and every > 0 else 4
        return ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(count)]
    window = text.get("sliding_window")
    if text.get("model_type") == "gpt_oss" and window:
        return ["sliding_attention" if i % 2 == 0 else "full_attention" for i in range(count)]
    if text.get("model_type") in ("mixtral", "mistral") and window:
        return ["sliding_attention"] * count
    return ["full_attention"] * count


def _has_delta(text: Mapping[str, Any]) -> bool:
    return "linear_num_value_heads" in text


def head_dim(text: Mapping[str, Any]) -> int:
    """Width of an attention head."""
    heads = int(text.get("num_attention_heads") or 1)
    return int(text.get("head_dim") or int(text.get("hidden_size") or 0) // heads)


def _state(text: Mapping[str, Any], kind: str) -> LayerState:
    if kind == "linear_attention" and _has_delta(text):
        keys, values = int(text["linear_num_key_heads"]), int(text["linear_num_value_heads"])
        wide, deep = int(text["linear_key_head_dim"]), int(text["linear_value_head_dim"])
        channels = 2 * keys * wide + values * deep
        kernel = int(text.get("linear_conv_kernel_dim") or 4)
        return LayerState("delta", fixed=channels * kernel, fixed_f32=values * wide * deep)
    if kind in _RECURRENT:
        return LayerState("recurrent")
    heads = int(text.get("num_attention_heads") or 1)
    if text.get("kv_lora_rank"):
        return LayerState("mla", per_token=int(text["kv_lora_rank"]) + int(text["qk_rope_head_dim"]))
    kv_heads = int(text.get("num_key_value_heads") or heads)
    per_token = 2 * kv_heads * head_dim(text)
    readers = max(1, heads // max(1, kv_heads))
    if text.get("indexer_head_dim"):
        per_token += int(text.get("indexer_kv_heads") or 1) * int(text["indexer_head_dim"])
        return LayerState("indexed", per_token=per_token, budget=text.get("indexer_budget"), readers=readers)
    window = text.get("sliding_window")
    if kind in ("sliding_attention", "chunked_attention") and isinstance(window, int):
        return LayerState("sliding", per_token=per_token, window=window - 1, readers=readers)
    return LayerState("attention", per_token=per_token, readers=readers)


def _with_ngrams(text: Mapping[str, Any], state: LayerState) -> LayerState:
    """A layer that adds n-gram embeddings keeps the inputs of its convolution and the last token ids."""
    size = int(text.get("ngram_size") or 1)
    wide = int(text["hidden_size"]) * int(text.get("hc_count") or 1)
    reach = (int(text.get("ple_conv_kernel_size") or 1) - 1) * size
    return replace(state, fixed=state.fixed + wide * reach, fixed_bytes=8 * (size - 1))
