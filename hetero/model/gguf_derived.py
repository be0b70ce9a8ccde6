"""Fields of a configuration that metadata do not say, read layer by layer off the tensors that are there.

Which layers have experts, attention, a recurrence, a bias; ``Arch.derived`` names those of an architecture.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from gguf.constants import MODEL_TENSOR as T
from gguf.constants import TENSOR_NAMES, Keys

from hetero.core import InputError
from hetero.model.gguf_reading import Reading, shortest

# What divides frequencies that do not rotate at all is larger.
_BEYOND = 1e20


def _dense_layers(r: Reading) -> None:
    r.values["mlp_only_layers"] = [n for n in range(r.layers) if not r.has(T.FFN_GATE_INP, n)]


def _leading_dense(r: Reading) -> None:
    sparse = (n for n in range(r.layers) if r.has(T.FFN_GATE_INP, n))
    r.values["first_k_dense_replace"] = next(sparse, r.layers)


def _attention_bias(r: Reading) -> None:
    r.values["attention_bias"] = r.any(T.ATTN_Q, T.ATTN_Q_A, T.ATTN_OUT, suffix="bias")


def _mlp_bias(r: Reading) -> None:
    r.values["mlp_bias"] = r.any(T.FFN_UP, suffix="bias")


def _qkv_bias(r: Reading) -> None:
    r.values["qkv_bias"] = r.values["attention_bias"] = r.any(T.ATTN_Q, suffix="bias")


def _use_bias(r: Reading) -> None:
    r.values["use_bias"] = r.any(T.ATTN_Q, T.FFN_UP, suffix="bias")


def _query_norm(r: Reading) -> None:
    r.values["use_qk_norm"] = r.any(T.ATTN_Q_NORM, suffix="weight")


def _head_bias(r: Reading) -> None:
    r.values["lm_head_bias"] = f"{TENSOR_NAMES[T.OUTPUT]}.bias" in r.found.tensors
    r.values["sliding_window"] = r.values.get("sliding_window") or None
    rope = r.values["rope_parameters"]
    if rope["rope_type"] == "longrope":
        scale = rope["factor"]
        default = math.sqrt(1 + math.log(scale) / math.log(rope["original_max_position_embeddings"]))
        attention = rope.get("attention_factor", default if scale > 1 else 1.0)
        rope |= {"long_mscale": attention, "short_mscale": attention}


def _top_k_method(r: Reading) -> None:
    grouped = (r.values.get("n_group") or 1) > 1
    r.values["topk_method"] = "group_limited_greedy" if grouped else "greedy"


def _latent(r: Reading) -> None:
    """Latent attention: newer files give the key's length as cached, and the real one beside it."""
    rotated = r.number(Keys.Rope.DIMENSION_COUNT)
    key = r.one(Keys.Attention.KEY_LENGTH_MLA) or r.number(Keys.Attention.KEY_LENGTH)
    value = r.one(Keys.Attention.VALUE_LENGTH_MLA) or r.number(Keys.Attention.VALUE_LENGTH)
    if key <= rotated:
        r.wrong(Keys.Attention.KEY_LENGTH, f"is {key}, of which {rotated} rotate: none are left")
    r.values |= {
        "qk_nope_head_dim": key - rotated,
        "v_head_dim": value,
        "num_key_value_heads": r.values["num_attention_heads"],
    }
    r.values.setdefault("q_lora_rank", None)
    r.values.setdefault("n_shared_experts", 0)
    r.values.pop("head_dim", None)
    rope = r.values["rope_parameters"]
    scale = r.one(Keys.Rope.SCALING_YARN_LOG_MUL)
    if rope["rope_type"] == "yarn" and scale:
        # A tenth of what the attention's scale grows by with the logarithm of the factor; the rotation itself
        # is not scaled.
        rope |= {"mscale": shortest(scale * 10), "mscale_all_dim": shortest(scale * 10)}
        rope.pop("attention_factor", None)


def _temperature(r: Reading) -> None:
    """What queries grow by beyond the original context. Where a file does not say it, it is the one of the
    type, and of its published model."""
    rope = r.values["rope_parameters"]
    told = r.one(Keys.Attention.TEMPERATURE_SCALE)
    rope |= {"llama_4_scaling_beta": 0.1 if told is None else float(told)}
    rope.setdefault("original_max_position_embeddings", r.values["max_position_embeddings"])


def _untruncated_yarn(r: Reading) -> None:
    rope = r.values["rope_parameters"]
    if rope["rope_type"] == "yarn":
        rope.setdefault("beta_fast", 32.0)
        rope.setdefault("beta_slow", 1.0)
        rope["truncate"] = False


def _delta_layers(r: Reading) -> None:
    r.values["layer_types"] = r.choose({T.SSM_A: "linear_attention", T.ATTN_Q: "full_attention"})


def _delta_values(r: Reading) -> None:
    inner, heads = r.number(Keys.SSM.INNER_SIZE), r.number(Keys.SSM.TIME_STEP_RANK)
    keys = r.number(Keys.SSM.GROUP_COUNT)
    if inner % heads or heads % keys:
        r.wrong(Keys.SSM.INNER_SIZE, f"is {inner}, of {heads} value heads over {keys} key heads")
    r.values["linear_value_head_dim"] = inner // heads


def _rope_sections(r: Reading) -> None:
    sections = r.get(Keys.Rope.DIMENSION_SECTIONS)
    if sections is None:
        return
    if not isinstance(sections, np.ndarray) or len(sections) < 3:
        r.wrong(Keys.Rope.DIMENSION_SECTIONS, "must be three numbers")
    rope = r.values["rope_parameters"]
    rope |= {"mrope_section": [int(n) for n in sections[:3]], "mrope_interleaved": True}


def _conv_layers(r: Reading) -> None:
    r.values["layer_types"] = r.choose({T.SHORTCONV_CONV: "conv", T.ATTN_Q: "full_attention"})


def _llama4(r: Reading) -> None:
    r.values |= {
        "moe_layers": [n for n in range(r.layers) if r.has(T.FFN_GATE_INP, n)],
        # Of the two that there are, the one with 128 experts has no norms of queries and keys.
        "use_qk_norm": r.values["num_local_experts"] != 128,
    }


def _mimo(r: Reading) -> None:
    """Sliding layers have twice the heads of keys, and see as many positions as the file says beside their
    own."""
    if not isinstance(r.get(Keys.Attention.SLIDING_WINDOW_PATTERN), np.ndarray):
        r.wrong(Keys.Attention.SLIDING_WINDOW_PATTERN, "must have one flag a block")
    _sliding_layers(r)
    kinds, heads = r.values["layer_types"], r.by_layer(Keys.Attention.HEAD_COUNT_KV)
    full = min(heads)
    if heads != [2 * full if kind == "sliding_attention" else full for kind in kinds]:
        r.wrong(Keys.Attention.HEAD_COUNT_KV, f"is {heads}: sliding layers must have twice the others'")
    rope, local = r.values["rope_parameters"], r.one(Keys.Rope.FREQ_BASE_SWA)
    r.values |= {
        "num_key_value_heads": full,
        "sliding_window": r.number(Keys.Attention.SLIDING_WINDOW) + 1,
        "mlp_layer_types": r.choose({T.FFN_GATE_INP: "sparse", T.FFN_GATE: "dense"}),
        "rope_parameters": {
            "full_attention": rope,
            "sliding_attention": rope | {"rope_theta": 10000.0 if local is None else local},
        },
    }


def _mamba_heads(r: Reading) -> tuple[int, int]:
    inner, heads = r.number(Keys.SSM.INNER_SIZE), r.number(Keys.SSM.TIME_STEP_RANK)
    if inner % heads:
        r.wrong(Keys.SSM.INNER_SIZE, f"is {inner}, of {heads} heads")
    return inner, heads


def _granite_hybrid(r: Reading) -> None:
    inner, heads = _mamba_heads(r)
    r.values |= {
        "layer_types": r.choose({T.SSM_A: "linear_attention", T.ATTN_Q: "full_attention"}),
        "mamba_d_head": inner // heads,
        "mamba_expand": inner // r.values["hidden_size"],
        "mamba_conv_bias": r.any(T.SSM_CONV1D, suffix="bias"),
        "mamba_proj_bias": r.any(T.SSM_IN, suffix="bias"),
        # Without rotation unless the file says so.
        "position_embedding_type": "rope" if r.get(Keys.Rope.SCALING_FINETUNED) else "nope",
    }
    if not r.values.get("num_local_experts"):
        r.values |= {"num_local_experts": 0, "shared_intermediate_size": r.values["intermediate_size"]}
    r.values.setdefault("shared_intermediate_size", 0)


def _jamba_layers(r: Reading) -> None:
    hidden, inner = r.values["hidden_size"], r.number(Keys.SSM.INNER_SIZE)
    r.values |= {
        "mamba_expand": inner // hidden,
        "mamba_conv_bias": r.any(T.SSM_CONV1D, suffix="bias"),
        "mamba_proj_bias": r.any(T.SSM_IN, suffix="bias"),
    }
    for kind, name in ((T.ATTN_Q, "attn_layer"), (T.FFN_GATE_INP, "expert_layer")):
        offset, period = _period([r.has(kind, n) for n in range(r.layers)], r, name)
        r.values |= {f"{name}_offset": offset, f"{name}_period": period}


def _period(there: list[bool], r: Reading, name: str) -> tuple[int, int]:
    """(offset, period) of the layers that have something."""
    for period in range(1, len(there) + 1):
        for offset in range(period):
            if there == [n % period == offset for n in range(len(there))]:
                return offset, period
    if not any(there):
        return len(there), len(there) + 1
    raise InputError(f"{r.found.path}: {name}s follow no period, which {r.arch.model_type} needs")


def _nemotron_layers(r: Reading) -> None:
    inner, heads = _mamba_heads(r)
    kinds = {T.SSM_A: "linear_attention", T.ATTN_Q: "full_attention", T.FFN_GATE_INP: "moe", T.FFN_UP: "mlp"}
    r.values |= {
        "layers_block_type": r.choose(kinds),
        "mamba_head_dim": inner // heads,
        "use_conv_bias": r.any(T.SSM_CONV1D, suffix="bias"),
        "mamba_proj_bias": r.any(T.SSM_IN, suffix="bias"),
        "mlp_bias": r.any(T.FFN_UP, T.FFN_UP_SHEXP, suffix="bias"),
    }
    del r.values["num_hidden_layers"]


def _sliding_layers(r: Reading) -> None:
    pattern = r.get(Keys.Attention.SLIDING_WINDOW_PATTERN)
    if isinstance(pattern, np.ndarray) and len(pattern) >= r.layers:
        sliding = [bool(value) for value in pattern[: r.layers]]
    elif pattern is None or isinstance(pattern, int):
        every = pattern or 4
        sliding = [bool((n + 1) % every) for n in range(r.layers)]
    else:
        r.wrong(
            Keys.Attention.SLIDING_WINDOW_PATTERN, f"is {pattern!r}, must be a number or one flag a block"
        )
    r.values["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in sliding]


def _kimi_layers(r: Reading) -> None:
    linear = [r.tensor(T.SSM_A, n) for n in range(r.layers)]
    heads = {math.prod(tensor.shape) for tensor in linear if tensor is not None}
    r.values |= {
        "layer_types": r.choose({T.SSM_A: "linear_attention", T.ATTN_KV_A_MQA: "full_attention"}),
        "mlp_layer_types": r.choose({T.FFN_GATE_INP: "sparse", T.FFN_GATE: "dense"}),
        "linear_num_heads": heads.pop() if len(heads) == 1 else r.values["num_attention_heads"],
    }


def _gemma3(r: Reading) -> None:
    local = r.one(Keys.Rope.FREQ_BASE_SWA)
    full = r.values["rope_parameters"]
    r.values |= {
        "layer_types": ["sliding_attention" if (n + 1) % 6 else "full_attention" for n in range(r.layers)],
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0 if local is None else local},
        },
        # The one of 27B alone is not scaled by its head.
        "query_pre_attn_scalar": r.values["hidden_size"] // r.values["num_attention_heads"]
        if r.layers == 62
        else r.head_dim(),
    }
    r.values.setdefault("sliding_window", None)


def _gemma4(r: Reading) -> None:
    """Layers of two kinds, each with heads, rotation and, with shared keys, a width of its own."""
    if not isinstance(r.get(Keys.Attention.SLIDING_WINDOW_PATTERN), np.ndarray):
        r.wrong(Keys.Attention.SLIDING_WINDOW_PATTERN, "must have one flag a block")
    _sliding_layers(r)
    kinds = r.values["layer_types"]
    full = [n for n in range(r.layers) if kinds[n] == "full_attention"]
    heads = r.by_layer(Keys.Attention.HEAD_COUNT_KV)
    of_kind = {kind: {heads[n] for n in range(r.layers) if kinds[n] == kind} for kind in kinds}
    if any(len(found) > 1 for found in of_kind.values()):
        r.wrong(Keys.Attention.HEAD_COUNT_KV, f"is {heads}: more than one number for a kind of layers")
    (everywhere,) = of_kind.get("full_attention", set(heads))
    (sliding,) = of_kind.get("sliding_attention", {everywhere})
    # Of layers that do not take the keys of an earlier one.
    equal = {not r.has(T.ATTN_V, n) for n in full if r.has(T.ATTN_K, n)}
    if len(equal) > 1 or (everywhere != sliding and equal == {False}):
        r.wrong(Keys.Attention.HEAD_COUNT_KV, f"is {heads}, with values of their own in layers {full}")
    r.values |= {
        "num_key_value_heads": sliding,
        "num_global_key_value_heads": everywhere if everywhere != sliding else None,
        "attention_k_eq_v": equal == {True},
        "head_dim": r.number(Keys.Attention.KEY_LENGTH_SWA),
        "global_head_dim": r.number(Keys.Attention.KEY_LENGTH),
        "enable_moe_block": bool(r.values.get("num_experts")),
    }
    for key, name in (
        (Keys.Attention.VALUE_LENGTH_SWA, "head_dim"),
        (Keys.Attention.VALUE_LENGTH, "global_head_dim"),
        (Keys.Rope.DIMENSION_COUNT_SWA, "head_dim"),
        (Keys.Rope.DIMENSION_COUNT, "global_head_dim"),
    ):
        if r.one(key) not in (None, r.values[name]):
            r.wrong(key, f"is {r.one(key)}, but keys of such layers have {r.values[name]}")
    table = r.tensor(T.PER_LAYER_TOKEN_EMBD)
    r.values["vocab_size_per_layer_input"] = r.values["vocab_size"] if table is None else table.shape[0]
    _wide_layers(r)
    local = r.one(Keys.Rope.FREQ_BASE_SWA)
    r.values["rope_parameters"] = {
        "full_attention": {
            "rope_type": "proportional",
            "rope_theta": r.values["rope_parameters"]["rope_theta"],
            "partial_rotary_factor": _rotated_share(r),
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0 if local is None else local},
    }


def _wide_layers(r: Reading) -> None:
    """Layers that take the keys of an earlier one may have a feed-forward network of twice the width."""
    widths = r.by_layer(Keys.LLM.FEED_FORWARD_LENGTH)
    own = r.layers - r.values["num_kv_shared_layers"]
    if not 0 < own <= r.layers:
        r.wrong(Keys.Attention.SHARED_KV_LAYERS, f"is {r.layers - own}, of {r.layers} blocks")
    plain, wide = widths[0], widths[-1] == 2 * widths[0] and own < r.layers
    if widths != [plain] * own + [2 * plain if wide else plain] * (r.layers - own):
        r.wrong(Keys.LLM.FEED_FORWARD_LENGTH, f"is {widths}, which {r.arch.model_type} cannot")
    r.values |= {"intermediate_size": plain, "use_double_wide_mlp": wide}


def _rotated_share(r: Reading) -> float:
    """Frequencies that are not divided by a number beyond all positions."""
    factors = r.tensor(T.ROPE_FREQS)
    if factors is None:
        raise InputError(f"{r.found.path}: no tensor {TENSOR_NAMES[T.ROPE_FREQS]}.weight")
    values = r.read_floats(factors).astype(float).flatten().tolist()
    rotated = values.count(1.0)
    if values != [1.0] * rotated + [values[-1]] * (len(values) - rotated) or (
        rotated < len(values) and values[-1] < _BEYOND
    ):
        raise InputError(f"{r.found.path}: tensor {factors.name}: frequencies of another kind than known")
    return rotated / len(values)


# What ``Arch.derived`` names.
DERIVED: dict[str, Callable[[Reading], None]] = {
    "attention_bias": _attention_bias,
    "conv_layers": _conv_layers,
    "delta_layers": _delta_layers,
    "delta_values": _delta_values,
    "dense_layers": _dense_layers,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "granite_hybrid": _granite_hybrid,
    "head_bias": _head_bias,
    "jamba_layers": _jamba_layers,
    "kimi_layers": _kimi_layers,
    "latent": _latent,
    "leading_dense": _leading_dense,
    "llama4": _llama4,
    "mimo": _mimo,
    "mlp_bias": _mlp_bias,
    "nemotron_layers": _nemotron_layers,
    "qkv_bias": _qkv_bias,
    "query_norm": _query_norm,
    "rope_sections": _rope_sections,
    "sliding_layers": _sliding_layers,
    "temperature": _temperature,
    "top_k_method": _top_k_method,
    "untruncated_yarn": _untruncated_yarn,
    "use_bias": _use_bias,
}
