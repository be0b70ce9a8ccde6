"""The architectures that are read from GGUF files: a table of names, fields and conventions.

A line of it says which type of transformers runs an architecture, where its tensors go in that tree, what
the converter did to them, and which fields of the configuration its metadata give. The conventions are those
of llama.cpp's conversion scripts. The module is long because it is one table, a line of which is best read
beside the others.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gguf.constants import MODEL_ARCH_NAMES, MODEL_TENSORS, Keys
from gguf.constants import MODEL_TENSOR as T

from hetero.core import InputError
from hetero.model import gguf_make as make
from hetero.model.gguf_make import Make


@dataclass(frozen=True, slots=True)
class Rule:
    """Tensors of a block, or of the file, that make a parameter.

    ``to``: its name below the layer. Without ``whole`` it is a module's, and the tensor's own suffix,
    "weight" or "bias", follows. ``suffix``: only for tensors with this suffix. Rules without one take no
    "scale".
    """

    to: str
    of: tuple[Any, ...]
    make: Make = make.same
    whole: bool = False
    suffix: str | None = None


def _modules(names: Mapping[Any, str], how: Make = make.same) -> tuple[Rule, ...]:
    return tuple(Rule(to, (kind,), how) for kind, to in names.items())


def _whole(to: str, *of: Any, how: Make = make.same, suffix: str | None = None) -> Rule:
    return Rule(to, of, how, whole=True, suffix=suffix)


@dataclass(frozen=True, slots=True)
class Arch:
    """One architecture. ``model_type`` is that of transformers."""

    model_type: str
    rules: tuple[Rule, ...] = ()  # go before the common ones
    # Dotted name of the module of routed experts below a layer; None: a dense model.
    experts: str | None = None
    # Fields beyond the common ones: key of the metadata -> field of the configuration, "" for one that
    # ``derived`` reads.
    fields: dict[str, str] = field(default_factory=dict)
    # Fields that the architecture implies.
    implied: Mapping[str, Any] = field(default_factory=dict)
    permuted: bool = False  # rows of queries and keys: as make.query_rows
    norms_plus_one: bool = False
    # Names of what gguf_derived.DERIVED finds in the tensors.
    derived: tuple[str, ...] = ()


_EXPERTS = "mlp.experts"
# A key that the gguf package has no name for.
VALUE_SCALE = "{arch}.attention.value_scale"

_TOP = _modules({T.TOKEN_EMBD: "model.embed_tokens", T.OUTPUT_NORM: "model.norm", T.OUTPUT: "lm_head"})

_BLOCK = (
    *_modules({
        T.ATTN_NORM: "input_layernorm",
        T.ATTN_Q: "self_attn.q_proj",
        T.ATTN_K: "self_attn.k_proj",
        T.ATTN_V: "self_attn.v_proj",
        T.ATTN_OUT: "self_attn.o_proj",
        T.ATTN_Q_NORM: "self_attn.q_norm",
        T.ATTN_K_NORM: "self_attn.k_norm",
        T.FFN_NORM: "post_attention_layernorm",
        T.FFN_GATE: "mlp.gate_proj",
        T.FFN_UP: "mlp.up_proj",
        T.FFN_DOWN: "mlp.down_proj",
        T.FFN_GATE_INP: "mlp.gate",
        T.FFN_GATE_SHEXP: "mlp.shared_experts.gate_proj",
        T.FFN_UP_SHEXP: "mlp.shared_experts.up_proj",
        T.FFN_DOWN_SHEXP: "mlp.shared_experts.down_proj",
        T.ATTN_Q_A: "self_attn.q_a_proj",
        T.ATTN_Q_A_NORM: "self_attn.q_a_layernorm",
        T.ATTN_Q_B: "self_attn.q_b_proj",
        T.ATTN_KV_A_MQA: "self_attn.kv_a_proj_with_mqa",
        T.ATTN_KV_A_NORM: "self_attn.kv_a_layernorm",
        T.ATTN_KV_B: "self_attn.kv_b_proj",
    }),
    _whole("mlp.gate.e_score_correction_bias", T.FFN_EXP_PROBS_B),
    _whole("self_attn.sinks", T.ATTN_SINKS),
    _whole("self_attn.kv_b_proj.weight", T.ATTN_K_B, T.ATTN_V_B, how=make.latent_key_value),
)  # fmt: skip

_QWEN_SHARED = (
    *_modules({
        T.FFN_GATE_SHEXP: "mlp.shared_expert.gate_proj",
        T.FFN_UP_SHEXP: "mlp.shared_expert.up_proj",
        T.FFN_DOWN_SHEXP: "mlp.shared_expert.down_proj",
    }),
    _whole("mlp.shared_expert_gate.weight", T.FFN_GATE_INP_SHEXP, how=make.row),
)  # fmt: skip
_POST_NORM = _modules({T.ATTN_POST_NORM: "post_attention_layernorm"})
_SANDWICH = _modules({
    T.ATTN_POST_NORM: "post_attention_layernorm",
    T.FFN_NORM: "pre_feedforward_layernorm",
    T.FFN_POST_NORM: "post_feedforward_layernorm",
})  # fmt: skip
_SHARED_MLP = _modules({
    T.FFN_GATE_SHEXP: "mlp.shared_mlp.gate_proj",
    T.FFN_UP_SHEXP: "mlp.shared_mlp.up_proj",
    T.FFN_DOWN_SHEXP: "mlp.shared_mlp.down_proj",
})  # fmt: skip
_GRANITE_MOE = (
    *_modules({T.FFN_GATE_INP: "block_sparse_moe.router", T.FFN_DOWN_SHEXP: "shared_mlp.output_linear"}),
    _whole("shared_mlp.input_linear.weight", T.FFN_GATE_SHEXP, T.FFN_UP_SHEXP, how=make.concatenated),
)
_GRANITE_EXPERTS = "block_sparse_moe.experts"
_GRANITE = {
    Keys.Attention.SCALE: "attention_multiplier",
    Keys.LLM.EMBEDDING_SCALE: "embedding_multiplier",
    Keys.LLM.RESIDUAL_SCALE: "residual_multiplier",
    Keys.LLM.LOGIT_SCALE: "logits_scaling",
}


def _mamba(path: str, *, gated: bool) -> tuple[Rule, ...]:
    """A mamba mixer: of the second kind, which is ``gated`` by a norm, or of the first."""
    common = (
        *_modules({T.SSM_IN: f"{path}.in_proj", T.SSM_OUT: f"{path}.out_proj"}),
        _whole(f"{path}.conv1d.weight", T.SSM_CONV1D, how=make.convolution, suffix="weight"),
        _whole(f"{path}.conv1d.bias", T.SSM_CONV1D, suffix="bias"),
        _whole(f"{path}.D", T.SSM_D, how=make.flat),
    )
    if gated:
        return (
            *common,
            _whole(f"{path}.dt_bias", T.SSM_DT, suffix="bias"),
            _whole(f"{path}.A_log", T.SSM_A, how=make.log_decay),
            _whole(f"{path}.norm.weight", T.SSM_NORM, how=make.flat),
        )
    return (
        *common,
        *_modules({
            T.SSM_X: f"{path}.x_proj",
            T.SSM_DT: f"{path}.dt_proj",
            T.SSM_DT_NORM: f"{path}.dt_layernorm",
            T.SSM_B_NORM: f"{path}.b_layernorm",
            T.SSM_C_NORM: f"{path}.c_layernorm",
        }),
        _whole(f"{path}.A_log", T.SSM_A, how=make.log_decay_matrix),
    )  # fmt: skip


_DELTA = {
    Keys.SSM.CONV_KERNEL: "linear_conv_kernel_dim",
    Keys.SSM.STATE_SIZE: "linear_key_head_dim",
    Keys.SSM.GROUP_COUNT: "linear_num_key_heads",
    Keys.SSM.TIME_STEP_RANK: "linear_num_value_heads",
}
_QWEN_MOE = {
    Keys.LLM.EXPERT_COUNT: "num_experts",
    Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
    Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: "shared_expert_intermediate_size",
}
_LOCAL_EXPERTS = {Keys.LLM.EXPERT_COUNT: "num_local_experts"}
_ROUTED = {
    Keys.LLM.EXPERT_COUNT: "n_routed_experts",
    Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
    Keys.LLM.EXPERT_SHARED_COUNT: "n_shared_experts",
    Keys.LLM.EXPERT_WEIGHTS_SCALE: "routed_scaling_factor",
    Keys.LLM.EXPERT_WEIGHTS_NORM: "norm_topk_prob",
    Keys.LLM.EXPERT_GROUP_COUNT: "n_group",
    Keys.LLM.EXPERT_GROUP_USED_COUNT: "topk_group",
}
_LATENT = {
    Keys.Attention.Q_LORA_RANK: "q_lora_rank",
    Keys.Attention.KV_LORA_RANK: "kv_lora_rank",
    Keys.Rope.DIMENSION_COUNT: "qk_rope_head_dim",
}
_NO_GROUPS = {"n_group": 1, "topk_group": 1, "norm_topk_prob": False, "routed_scaling_factor": 1.0}

_QWEN3_MOE = Arch(
    "qwen3_moe",
    experts=_EXPERTS,
    fields=_QWEN_MOE,
    implied={"norm_topk_prob": True, "decoder_sparse_step": 1},
    derived=("dense_layers",),
)
_DEEPSEEK3 = Arch(
    "deepseek_v3",
    experts=_EXPERTS,
    fields=_ROUTED | _LATENT,
    implied=_NO_GROUPS,
    derived=("latent", "leading_dense", "attention_bias"),
)
_DEEPSEEK2 = replace(_DEEPSEEK3, model_type="deepseek_v2", derived=(*_DEEPSEEK3.derived, "top_k_method"))
_MIXTRAL = Arch("mixtral", experts=_EXPERTS, fields=_LOCAL_EXPERTS, implied={"sliding_window": None},
                permuted=True)  # fmt: skip
_LLAMA = Arch("llama", permuted=True, derived=("attention_bias", "mlp_bias"))
_GRANITE_SHARED = _GRANITE | _LOCAL_EXPERTS | {
    Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: "shared_intermediate_size"
}  # fmt: skip

# Name in the file -> architecture. Where experts or their kind decide, ``find_arch`` looks at the metadata.
ARCHS: dict[str, Arch] = {
    "qwen2moe": Arch(
        "qwen2_moe",
        rules=_QWEN_SHARED,
        experts=_EXPERTS,
        fields=_QWEN_MOE,
        implied={"norm_topk_prob": False, "decoder_sparse_step": 1, "use_sliding_window": False},
        derived=("dense_layers", "qkv_bias"),
    ),
    "qwen3moe": _QWEN3_MOE,
    # Text positions are the same in all three sections of its rotary frequencies.
    "qwen3vlmoe": _QWEN3_MOE,
    "qwen3next": Arch(
        "qwen3_next",
        rules=(
            *_QWEN_SHARED,
            *_POST_NORM,
            *_modules({
                T.SSM_BETA_ALPHA: "linear_attn.in_proj_ba",
                T.SSM_OUT: "linear_attn.out_proj",
                T.SSM_NORM: "linear_attn.norm",
                T.SSM_IN: "linear_attn.in_proj_qkvz",
            }),
            _whole("linear_attn.in_proj_qkvz.weight", T.ATTN_QKV, T.ATTN_GATE, how=make.grouped_qkvz),
            _whole("linear_attn.conv1d.weight", T.SSM_CONV1D, how=make.convolution),
            _whole("linear_attn.dt_bias", T.SSM_DT),
            _whole("linear_attn.A_log", T.SSM_A, how=make.log_decay),
        ),
        experts=_EXPERTS,
        fields=_QWEN_MOE | _DELTA,
        implied={"norm_topk_prob": True, "decoder_sparse_step": 1},
        norms_plus_one=True,
        derived=("dense_layers", "delta_layers", "delta_values"),
    ),
    "qwen35moe": Arch(
        "qwen3_5_moe_text",
        rules=(
            *_QWEN_SHARED,
            *_POST_NORM,
            _whole("linear_attn.in_proj_qkv.weight", T.ATTN_QKV, how=make.grouped_qkv),
            _whole("linear_attn.in_proj_z.weight", T.ATTN_GATE, how=make.grouped_rows),
            _whole("linear_attn.in_proj_a.weight", T.SSM_ALPHA, how=make.grouped_heads),
            _whole("linear_attn.in_proj_b.weight", T.SSM_BETA, how=make.grouped_heads),
            _whole("linear_attn.out_proj.weight", T.SSM_OUT, how=make.grouped_columns),
            _whole("linear_attn.conv1d.weight", T.SSM_CONV1D, how=make.grouped_convolution),
            _whole("linear_attn.dt_bias", T.SSM_DT, how=make.grouped_heads),
            _whole("linear_attn.A_log", T.SSM_A, how=make.grouped_log_decay),
            _whole("linear_attn.norm.weight", T.SSM_NORM),
        ),
        experts=_EXPERTS,
        fields=_QWEN_MOE | _DELTA,
        norms_plus_one=True,
        derived=("delta_layers", "delta_values", "rope_sections"),
    ),
    "glm4moe": Arch(
        "glm4_moe",
        rules=_POST_NORM,
        experts=_EXPERTS,
        fields=_ROUTED,
        implied=_NO_GROUPS,
        derived=("leading_dense", "qkv_bias", "query_norm"),
    ),
    "glm-dsa": replace(
        _DEEPSEEK3,
        model_type="glm_moe_dsa",
        rules=_modules({
            T.INDEXER_ATTN_Q_B: "self_attn.indexer.wq_b",
            T.INDEXER_ATTN_K: "self_attn.indexer.wk",
            T.INDEXER_K_NORM: "self_attn.indexer.k_norm",
            T.INDEXER_PROJ: "self_attn.indexer.weights_proj",
        }),
        fields=_DEEPSEEK3.fields | {
            Keys.Attention.Indexer.HEAD_COUNT: "index_n_heads",
            Keys.Attention.Indexer.KEY_LENGTH: "index_head_dim",
            Keys.Attention.Indexer.TOP_K: "index_topk",
        },
    ),
    "mistral4": replace(
        _DEEPSEEK3,
        model_type="mistral4",
        derived=("latent", "leading_dense", "attention_bias", "temperature"),
    ),
    "llama4": Arch(
        "llama4_text",
        rules=_modules({
            T.FFN_GATE_INP: "feed_forward.router",
            T.FFN_GATE: "feed_forward.gate_proj",
            T.FFN_UP: "feed_forward.up_proj",
            T.FFN_DOWN: "feed_forward.down_proj",
            T.FFN_GATE_SHEXP: "feed_forward.shared_expert.gate_proj",
            T.FFN_UP_SHEXP: "feed_forward.shared_expert.up_proj",
            T.FFN_DOWN_SHEXP: "feed_forward.shared_expert.down_proj",
        }),
        experts="feed_forward.experts",
        fields=_LOCAL_EXPERTS | {
            Keys.LLM.FEED_FORWARD_LENGTH: "intermediate_size_mlp",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "intermediate_size",
        },
        implied={"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1,
                 "attn_temperature_tuning": True, "no_rope_layer_interval": 4},
        derived=("attention_bias", "llama4"),
    ),
    "mimo2": Arch(
        "mimo_v2_flash",
        experts=_EXPERTS,
        fields={
            Keys.LLM.EXPERT_COUNT: "n_routed_experts",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
            Keys.LLM.EXPERT_WEIGHTS_SCALE: "routed_scaling_factor",
            Keys.LLM.EXPERT_GROUP_COUNT: "n_group",
            Keys.LLM.EXPERT_GROUP_USED_COUNT: "topk_group",
            Keys.Attention.HEAD_COUNT_KV: "",
            Keys.Attention.VALUE_LENGTH: "v_head_dim",
            VALUE_SCALE: "attention_value_scale",
        },
        implied={"n_group": 1, "topk_group": 1, "norm_topk_prob": True, "routed_scaling_factor": 1.0},
        derived=("mimo",),
    ),
    "gpt-oss": Arch(
        "gpt_oss",
        rules=_modules({T.FFN_GATE_INP: "mlp.router", T.ATTN_POST_NORM: "post_attention_layernorm"}),
        experts=_EXPERTS,
        fields=_LOCAL_EXPERTS | {Keys.Attention.SLIDING_WINDOW: "sliding_window"},
        implied={"attention_bias": True},
        derived=("untruncated_yarn",),
    ),
    "olmoe": Arch("olmoe", experts=_EXPERTS, fields={Keys.LLM.EXPERT_COUNT: "num_experts"},
                  implied={"norm_topk_prob": False, "clip_qkv": None}),
    "phimoe": Arch("phimoe", experts=_EXPERTS, fields=_LOCAL_EXPERTS | {
                       Keys.Attention.SLIDING_WINDOW: "sliding_window"},
                   derived=("attention_bias", "head_bias")),
    "granitemoe": Arch("granitemoe", rules=_GRANITE_MOE, experts=_GRANITE_EXPERTS, permuted=True,
                       fields=_GRANITE | _LOCAL_EXPERTS),
    "granitehybrid": Arch(
        "granitemoehybrid",
        rules=(
            *_GRANITE_MOE,
            *_modules({T.FFN_DOWN: "shared_mlp.output_linear"}),
            _whole("shared_mlp.input_linear.weight", T.FFN_GATE, T.FFN_UP, how=make.concatenated),
            *_mamba("mamba", gated=True),
        ),
        experts=_GRANITE_EXPERTS,
        fields=_GRANITE_SHARED | {
            Keys.SSM.CONV_KERNEL: "mamba_d_conv",
            Keys.SSM.STATE_SIZE: "mamba_d_state",
            Keys.SSM.GROUP_COUNT: "mamba_n_groups",
            Keys.SSM.TIME_STEP_RANK: "mamba_n_heads",
        },
        permuted=True,
        derived=("granite_hybrid",),
    ),
    "ernie4_5-moe": Arch(
        "ernie4_5_moe",
        rules=(_whole("mlp.gate.moe_statics.e_score_correction_bias", T.FFN_EXP_PROBS_B, how=make.row),),
        experts=_EXPERTS,
        fields={
            Keys.LLM.EXPERT_COUNT: "moe_num_experts",
            Keys.LLM.EXPERT_USED_COUNT: "moe_k",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
            Keys.LLM.EXPERT_SHARED_COUNT: "moe_num_shared_experts",
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: "moe_layer_start_index",
            Keys.LLM.INTERLEAVE_MOE_LAYER_STEP: "moe_layer_interval",
        },
        derived=("use_bias",),
    ),
    "hunyuan-moe": Arch(
        "hunyuan_v1_moe",
        rules=(
            *_SHARED_MLP,
            *_modules({
                T.FFN_GATE_INP: "mlp.gate.wg",
                T.ATTN_Q_NORM: "self_attn.query_layernorm",
                T.ATTN_K_NORM: "self_attn.key_layernorm",
            }),
        ),
        experts=_EXPERTS,
        fields={Keys.LLM.EXPERT_COUNT: "num_experts", Keys.LLM.EXPERT_USED_COUNT: "moe_topk"},
        derived=("attention_bias",),
    ),
    "minimax-m2": Arch(
        "minimax_m2",
        rules=(_whole("mlp.e_score_correction_bias", T.FFN_EXP_PROBS_B),),
        experts=_EXPERTS,
        fields=_LOCAL_EXPERTS,
    ),
    "lfm2moe": Arch(
        "lfm2_moe",
        rules=(
            *_modules({
                T.TOKEN_EMBD_NORM: "model.embedding_norm",
                T.OUTPUT_NORM: "model.embedding_norm",
                T.ATTN_NORM: "operator_norm",
                T.FFN_NORM: "ffn_norm",
                T.ATTN_OUT: "self_attn.out_proj",
                T.ATTN_Q_NORM: "self_attn.q_layernorm",
                T.ATTN_K_NORM: "self_attn.k_layernorm",
                T.FFN_GATE: "feed_forward.w1",
                T.FFN_UP: "feed_forward.w3",
                T.FFN_DOWN: "feed_forward.w2",
                T.FFN_GATE_INP: "feed_forward.gate",
                T.SHORTCONV_INPROJ: "conv.in_proj",
                T.SHORTCONV_OUTPROJ: "conv.out_proj",
            }),
            _whole("conv.conv.weight", T.SHORTCONV_CONV, how=make.convolution, suffix="weight"),
            _whole("conv.conv.bias", T.SHORTCONV_CONV, suffix="bias"),
            _whole("feed_forward.expert_bias", T.FFN_EXP_PROBS_B),
        ),
        experts="feed_forward.experts",
        fields={
            Keys.LLM.EXPERT_COUNT: "num_experts",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: "num_dense_layers",
            Keys.ShortConv.L_CACHE: "conv_L_cache",
            Keys.Attention.LAYERNORM_RMS_EPS: "norm_eps",
        },
        implied={"norm_topk_prob": True, "use_expert_bias": True, "routed_scaling_factor": 1.0},
        derived=("conv_layers",),
    ),
    "dots1": Arch(
        "dots1",
        experts=_EXPERTS,
        fields=_ROUTED,
        implied=_NO_GROUPS | {"sliding_window": None},
        derived=("leading_dense", "attention_bias"),
    ),
    "jamba": Arch(
        "jamba",
        rules=(
            *_modules({
                T.OUTPUT_NORM: "model.final_layernorm",
                T.FFN_NORM: "pre_ff_layernorm",
                T.FFN_GATE: "feed_forward.gate_proj",
                T.FFN_UP: "feed_forward.up_proj",
                T.FFN_DOWN: "feed_forward.down_proj",
                T.FFN_GATE_INP: "feed_forward.router",
            }),
            *_mamba("mamba", gated=False),
        ),
        experts="feed_forward.experts",
        fields={
            Keys.LLM.EXPERT_COUNT: "num_experts",
            Keys.SSM.CONV_KERNEL: "mamba_d_conv",
            Keys.SSM.STATE_SIZE: "mamba_d_state",
            Keys.SSM.TIME_STEP_RANK: "mamba_dt_rank",
        },
        implied={"use_mamba_kernels": False},
        derived=("jamba_layers",),
    ),
    "nemotron_h_moe": Arch(
        "nemotron_h",
        rules=(
            *_modules({
                T.TOKEN_EMBD: "model.embeddings",
                T.OUTPUT_NORM: "model.norm_f",
                T.ATTN_NORM: "norm",
                T.ATTN_Q: "mixer.q_proj",
                T.ATTN_K: "mixer.k_proj",
                T.ATTN_V: "mixer.v_proj",
                T.ATTN_OUT: "mixer.o_proj",
                T.FFN_UP: "mixer.up_proj",
                T.FFN_DOWN: "mixer.down_proj",
                T.FFN_GATE_INP: "mixer.gate",
                T.FFN_UP_SHEXP: "mixer.shared_experts.up_proj",
                T.FFN_DOWN_SHEXP: "mixer.shared_experts.down_proj",
                T.MOE_LATENT_DOWN: "mixer.fc1_latent_proj",
                T.MOE_LATENT_UP: "mixer.fc2_latent_proj",
            }),
            _whole("mixer.gate.e_score_correction_bias", T.FFN_EXP_PROBS_B),
            *_mamba("mixer", gated=True),
        ),
        experts="mixer.experts",
        fields=_ROUTED | {
            Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH: "moe_shared_expert_intermediate_size",
            Keys.LLM.MOE_LATENT_SIZE: "moe_latent_size",
            Keys.SSM.CONV_KERNEL: "conv_kernel",
            Keys.SSM.STATE_SIZE: "ssm_state_size",
            Keys.SSM.GROUP_COUNT: "n_groups",
            Keys.SSM.TIME_STEP_RANK: "mamba_num_heads",
            Keys.Attention.LAYERNORM_RMS_EPS: "layer_norm_epsilon",
        },
        implied=_NO_GROUPS | {"use_mamba_kernels": False, "moe_latent_size": None},
        derived=("attention_bias", "nemotron_layers"),
    ),
    "afmoe": Arch(
        "afmoe",
        rules=(
            *_modules({
                T.ATTN_GATE: "self_attn.gate_proj",
                T.ATTN_POST_NORM: "post_attention_layernorm",
                T.FFN_NORM: "pre_mlp_layernorm",
                T.FFN_POST_NORM: "post_mlp_layernorm",
                T.FFN_GATE_INP: "mlp.router.gate",
            }),
            _whole("mlp.expert_bias", T.FFN_EXP_PROBS_B),
        ),
        experts=_EXPERTS,
        fields={
            Keys.LLM.EXPERT_COUNT: "num_experts",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
            Keys.LLM.EXPERT_SHARED_COUNT: "num_shared_experts",
            Keys.LLM.LEADING_DENSE_BLOCK_COUNT: "num_dense_layers",
            Keys.LLM.EXPERT_WEIGHTS_SCALE: "route_scale",
            Keys.Attention.SLIDING_WINDOW: "sliding_window",
        },
        implied={"mup_enabled": True, "global_attn_every_n_layers": 4},
    ),
    "exaone-moe": Arch(
        "exaone_moe",
        experts=_EXPERTS,
        fields=_ROUTED | {
            Keys.LLM.EXPERT_COUNT: "num_experts",
            Keys.LLM.EXPERT_SHARED_COUNT: "num_shared_experts",
            Keys.Attention.SLIDING_WINDOW: "sliding_window",
        },
        implied=_NO_GROUPS,
        derived=("leading_dense", "sliding_layers"),
    ),
    "kimi-linear": Arch(
        "kimi_linear",
        rules=(
            *_modules({
                T.SSM_F_A: "self_attn.forget_gate.f_a_proj",
                T.SSM_F_B: "self_attn.forget_gate.f_b_proj",
                T.SSM_BETA: "self_attn.b_proj",
                T.SSM_G_A: "self_attn.g_a_proj",
                T.SSM_G_B: "self_attn.g_b_proj",
                T.SSM_NORM: "self_attn.o_norm",
            }),
            _whole("self_attn.conv1d.weight", T.SSM_CONV1D_Q, T.SSM_CONV1D_K, T.SSM_CONV1D_V,
                   how=make.convolution),
            _whole("self_attn.forget_gate.dt_bias", T.SSM_DT),
            _whole("self_attn.forget_gate.A_log", T.SSM_A, how=make.log_decay_heads),
        ),
        experts=_EXPERTS,
        fields=_ROUTED | _LATENT | {
            Keys.LLM.EXPERT_COUNT: "num_local_experts",
            Keys.SSM.CONV_KERNEL: "linear_conv_kernel_dim",
            Keys.KDA.HEAD_DIM: "linear_head_dim",
        },
        implied=_NO_GROUPS | {"norm_topk_prob": True, "q_lora_rank": None},
        derived=("latent", "kimi_layers"),
    ),
    # Dense ones, so that every such file runs.
    "qwen2": Arch("qwen2", implied={"use_sliding_window": False}),
    "qwen3": Arch("qwen3", implied={"use_sliding_window": False}, derived=("attention_bias",)),
    "smollm3": Arch("smollm3", permuted=True, implied={"no_rope_layer_interval": 4}),
    "granite": Arch("granite", permuted=True, fields=_GRANITE),
    "ernie4_5": Arch("ernie4_5", derived=("use_bias",)),
    "gemma3": Arch(
        "gemma3_text",
        rules=_SANDWICH,
        fields={
            Keys.Attention.SLIDING_WINDOW: "sliding_window",
            Keys.LLM.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
        },
        implied={"final_logit_softcapping": None},
        norms_plus_one=True,
        derived=("gemma3",),
    ),
    # With experts, or dense.
    "gemma4": Arch(
        "gemma4_text",
        rules=(
            *_SANDWICH,
            *_modules({
                T.FFN_PRE_NORM_2: "pre_feedforward_layernorm_2",
                T.FFN_POST_NORM_1: "post_feedforward_layernorm_1",
                T.FFN_POST_NORM_2: "post_feedforward_layernorm_2",
                T.PER_LAYER_INP_GATE: "per_layer_input_gate",
                T.PER_LAYER_PROJ: "per_layer_projection",
                T.PER_LAYER_POST_NORM: "post_per_layer_input_norm",
                T.PER_LAYER_TOKEN_EMBD: "model.embed_tokens_per_layer",
                T.PER_LAYER_MODEL_PROJ: "model.per_layer_model_projection",
                T.PER_LAYER_PROJ_NORM: "model.per_layer_projection_norm",
            }),
            _whole("router.scale", T.FFN_GATE_INP, suffix="scale"),
            _whole("router.proj.weight", T.FFN_GATE_INP, suffix="weight"),
            _whole("router.per_expert_scale", T.FFN_DOWN_EXP, suffix="scale"),
            _whole("layer_scalar", T.LAYER_OUT_SCALE),
        ),
        experts="experts",
        fields={
            Keys.LLM.EXPERT_COUNT: "num_experts",
            Keys.LLM.EXPERT_USED_COUNT: "top_k_experts",
            Keys.LLM.EXPERT_FEED_FORWARD_LENGTH: "moe_intermediate_size",
            Keys.LLM.EMBD_LENGTH_PER_LAYER_INP: "hidden_size_per_layer_input",
            Keys.LLM.FINAL_LOGIT_SOFTCAPPING: "final_logit_softcapping",
            Keys.LLM.FEED_FORWARD_LENGTH: "",
            Keys.Attention.HEAD_COUNT_KV: "",
            Keys.Attention.SLIDING_WINDOW: "sliding_window",
            Keys.Attention.SHARED_KV_LAYERS: "num_kv_shared_layers",
        },
        implied={
            "final_logit_softcapping": None,
            "hidden_size_per_layer_input": 0,
            "num_experts": None,
            "moe_intermediate_size": None,
            "num_kv_shared_layers": 0,
        },
        derived=("gemma4",),
    ),
}  # fmt: skip

# Architectures with experts that are not read, and why.
UNREAD: dict[str, str] = dict.fromkeys(
    (
        *("deci", "grok", "arctic", "deepseek", "deepseek2-ocr", "bailingmoe", "bailingmoe2", "smallthinker"),
        *("llada-moe", "grovemoe", "rnd1", "minicpm", "llama-embed"),
    ),
    "transformers has no tree for it",
) | {
    "dbrx": "transformers' experts of it are outside the interface that hetero runs",
    "nomic-bert-moe": "it is an encoder",
    "mistral3": "its experts have no tree in transformers",
    "step35": "transformers has its successor alone, which computes other rotary factors than files have",
}


def moe_names() -> list[str]:
    """Architectures that the gguf package names and that have routed experts."""
    experts = {T.FFN_UP_EXP, T.FFN_GATE_UP_EXP}
    return sorted(MODEL_ARCH_NAMES[arch] for arch, tensors in MODEL_TENSORS.items() if experts & set(tensors))


def find_arch(metadata: Mapping[str, Any], name: str, where: str) -> Arch:
    """The architecture ``name`` of a file. Raises InputError, with the list of known ones, for another."""
    experts = metadata.get(Keys.LLM.EXPERT_COUNT.format(arch=name), 0)
    match name:
        case "llama":
            return _MIXTRAL if experts else _LLAMA
        case "deepseek2" if experts:
            sigmoid = metadata.get(Keys.LLM.EXPERT_GATING_FUNC.format(arch=name)) == 2
            return _DEEPSEEK3 if sigmoid else _DEEPSEEK2
        case "granitemoe" if Keys.LLM.EXPERT_SHARED_FEED_FORWARD_LENGTH.format(arch=name) in metadata:
            return replace(ARCHS[name], model_type="granitemoeshared", fields=_GRANITE_SHARED)
    if name in ARCHS and (name != "llama4" or experts):
        return ARCHS[name]
    known = sorted({*ARCHS, "llama", "deepseek2"})
    reason = UNREAD.get(name) or ("without experts" if name in ("deepseek2", "llama4") else "")
    raise InputError(
        f"{where}: architecture {name!r} is not supported{f' ({reason})' if reason else ''}; supported: "
        f"{', '.join(known)}"
    )


def all_rules(arch: Arch) -> tuple[Rule, ...]:
    """All rules of an architecture, its own ones first.

    Experts' matrices become modules of their own, [E, n, k], in the order of the file.
    """
    experts = (
        {kind: f"{arch.experts}.{name}" for kind, name in EXPERT_MODULES.items()} if arch.experts else {}
    )
    return (*arch.rules, *_modules(experts), *_TOP, *_BLOCK)


EXPERT_MODULES = {
    T.FFN_GATE_EXP: "gate_proj",
    T.FFN_UP_EXP: "up_proj",
    T.FFN_DOWN_EXP: "down_proj",
    T.FFN_GATE_UP_EXP: "gate_up_proj",
}
"""Kind of tensor -> name below the experts module."""

__all__ = ["ARCHS", "EXPERT_MODULES", "UNREAD", "Arch", "Rule", "all_rules", "find_arch", "moe_names"]
