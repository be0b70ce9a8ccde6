"""Tiny random models of every MoE type that transformers knows.

Sizes come from one table of configuration names (``SIZES``); ``OVERRIDES`` holds what a type needs beyond it,
so that a few layers cover every kind of layer that the type has.
"""

from __future__ import annotations

import math
import re
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.models.auto import modeling_auto as auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES
from transformers.models.auto.configuration_auto import model_type_to_module_name as module_of

VOCAB = 96

# name in the configuration -> value; used where the default configuration has the name with a value
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 48, "moe_intermediate_size": 40,
    "shared_expert_intermediate_size": 24, "shared_intermediate_size": 24, "dense_intermediate_size": 48,
    "moe_shared_expert_intermediate_size": 24, "shared_experts_intermediate_size": 24,
    "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "moe_num_experts": 8,
    "num_experts_per_tok": 3, "num_experts_per_token": 3, "moe_topk": 3, "moe_k": 3, "top_k_experts": 3,
    "num_shared_experts": 1, "n_shared_experts": 1,
    "n_group": 4, "num_expert_group": 4, "topk_group": 2, "n_groups": 2,
    "q_lora_rank": 24, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "max_position_embeddings": 128, "model_max_length": 128, "sliding_window": 6, "sliding_window_size": 6,
    "first_k_dense_replace": 1, "num_nextn_predict_layers": 0,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_head_dim": 16, "linear_num_heads": 4,
    "index_n_heads": 4, "index_head_dim": 16, "index_topk": 8,
    "swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 16, "rel_extent": 32,
    "mamba_d_state": 8, "mamba_d_head": 16, "mamba_n_heads": 8, "mamba_dt_rank": 8, "mamba_n_groups": 2,
    "mamba_num_heads": 8, "mamba_head_dim": 16, "ssm_state_size": 8, "chunk_size": 16, "mamba_chunk_size": 16,
    "rotary_dim": 8, "router_hidden_size": 24, "moe_hidden_size": 32, "block_size": 4,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB, "global_head_dim": 16,
    "swiglu_limit": 0.75, "routed_scaling_factor": 1.7, "moe_routed_scaling_factor": 1.7,
}  # fmt: skip

# the towers of multimodal types never run; they exist because the reference builds the whole model
TOWER_SIZES: dict[str, Any] = {
    "hidden_size": 32, "embed_dim": 32, "d_model": 32, "intermediate_size": 32, "num_hidden_layers": 1,
    "depth": 1, "num_heads": 2, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
    "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32, "decoder_layers": 1,
    "patch_size": 4, "image_size": 16, "num_position_embeddings": 16, "vocab_size": VOCAB,
    "out_hidden_size": 64, "output_dim": 64, "text_hidden_size": 64, "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0], "num_experts": 4, "num_local_experts": 4, "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16, "num_experts_per_tok": 2, "audio_hidden_size": 32,
    "blank_token_id": VOCAB - 1,
}  # fmt: skip

# model type -> values for its own configuration, which for a multimodal type is not the text model's
OVERRIDES: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"layer_group_size": 2},
    "beam": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "cohere2_moe": {"num_shared_experts": 2, "logit_scale": 1.0},
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
                           "num_experts_per_tok": 3},
    "deepseek_v2": {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2,
                    "topk_method": "group_limited_greedy"},
    "deepseek_v4": {"compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
                    "layer_types": ["heavily_compressed_attention", "compressed_sparse_attention"] * 2,
                    "mlp_layer_types": ["hash_moe", "hash_moe", "moe", "moe"]},
    "dots1": {"n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 3, "max_window_layers": 2,
              "first_k_dense_replace": 1},
    "dots3_note_text": {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 24,
                        "swa_kv_lora_rank": 16, "swa_head_dim": 24, "swa_qk_nope_head_dim": 16,
                        "swa_qk_rope_head_dim": 8, "swa_v_head_dim": 16, "head_dim": 24},
    "dots3_note_vision_encoder": {"pyramid_num_routed": [4], "adapter_in_dim": 32, "adapter_out_dim": 64},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 64},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [40, 24], "rope_parameters": {
        "rope_type": "default", "rope_theta": 500000.0, "mrope_section": [3, 3, 2]}},
    "gemma4_text": {"pad_token_id": 0, "enable_moe_block": True, "num_experts": 8, "top_k_experts": 3,
                    "moe_intermediate_size": 40,
                    "layer_types": ["sliding_attention", "full_attention"] * 2},
    "glm4v_moe_text": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0,
                                           "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}},
    "glm5_next_text": {"qk_rope_head_dim": 0, "head_dim": 0, "index_kpool": 2,
                       "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2, "num_local_experts": 8},
    "hunyuan_v1_moe": {"head_dim": 16, "moe_topk": 3, "num_experts": 8},
    "inkling2_text": {"layer_types": ["hybrid_sliding", "hybrid"] * 2},
    "inkling_text": {"logits_mup_width_multiplier": 1.0, "layer_types": ["hybrid_sliding", "hybrid"] * 2,
                     "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "inkling_vision": {"num_hidden_layers": 8, "num_channels": 1},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3,
              "expert_layer_offset": 0, "use_mamba_kernels": False},
    "kimi_linear": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "kolibri1": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2, "num_dense_layers": 1},
    "llama4_text": {"floor_scale": 4, "attention_chunk_size": 8, "no_rope_layer_interval": 2,
                    "intermediate_size_mlp": 48, "moe_layers": [0, 1, 3]},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "minimax_m3_vl_text": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "muse_spark": {"projector_hidden_size": 64},
    "muse_spark_audio": {"patch_sizes": [4], "hidden_sizes": [32], "depths": [1]},
    "nemotron_h": {"moe_latent_size": 32},
    "nemotron_h_omni": {"projector_hidden_size": 64},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 1, "audio_token_id": 1, "image_token_id": 1,
                               "video_token_id": 1, "audio_start_token_id": 1},
    "qwen3_moe": {"mlp_only_layers": [1]},
    "qwen3_next": {"mlp_only_layers": [1]},
    "qwen4_exp_text": {"eos_token_id": 2, "ple_layer_ids": [1, 3],
                       "ple_embed_dim": 32, "hc_lowrank": 8, "heads_per_ngram": 2,
                       "ngram_vocab_size_base": 61, "make_ngram_vocab_size_divisible_by": 8,
                       "split_ngram_parts": 2, "indexer_n_heads": 2, "indexer_kv_heads": 1,
                       "indexer_head_dim": 16, "indexer_budget": 4, "indexer_compress_ratio": 2},
    "step3p5": {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 6,
                "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"], "share_expert_dim": 24,
                "num_sliding_attention_heads": 4, "swiglu_limits": [None, None, 0.5, 0.5],
                "swiglu_limits_shared": [None, 0.5, None, 0.5], "pad_token_id": 0},
    "radio": {"video_temporal_patch_size": 2, "max_img_size": 256},
    "zaya": {"num_experts_per_tok": 1, "sliding_window": 6,
             "layer_types": ["hybrid", "hybrid_sliding"] * 2},
}  # fmt: skip

TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
CAUSAL = (
    auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
)
TEXT_CONFIGS = ("text_config", "thinker_config")


@cache
def moe_modules() -> frozenset[str]:
    """Packages under transformers/models whose modelling file uses the experts interface."""
    root = Path(auto.__file__).parents[1]
    files = root.glob("*/modeling_*.py")
    return frozenset(f.parent.name for f in files if "@use_experts_implementation" in f.read_text())


def has_language_model(model_type: str) -> bool:
    """Whether transformers maps this type to a class with a language-model head."""
    return any(model_type in mapping for mapping in CAUSAL)


def contains_moe(model_type: str) -> bool:
    if module_of(model_type) in moe_modules():
        return True
    config_class = CONFIG_MAPPING[model_type]
    subs = (_sub_class(config_class, name, sub) for name, sub in config_class.sub_configs.items())
    return any(module_of(sub.model_type) in moe_modules() for sub in subs if sub is not None)


@cache
def moe_types() -> tuple[str, ...]:
    """Every model type with a language-model head whose experts go through the interface, and every type
    that uses the interface without such a head and is not a part of another type."""
    found = [t for t in CONFIG_MAPPING_NAMES if contains_moe(t)]
    headed = [t for t in found if has_language_model(t)]
    modules = {module_of(t) for t in headed}
    return tuple(sorted(headed + [t for t in found if module_of(t) not in modules]))


_FOREIGN = re.compile(r"^class \w*(?:Experts|MoE|Moe|SparseMLP|SparseMoeBlock)\(", re.MULTILINE)


@cache
def foreign_moe_types() -> tuple[str, ...]:
    """Model types whose modelling file has experts of its own kind, outside the interface, and that generate
    text."""
    root = Path(auto.__file__).parents[1]
    files = [f for f in root.glob("*/modeling_*.py") if f.parent.name not in moe_modules()]
    foreign = {f.parent.name for f in files if _FOREIGN.search(f.read_text())}
    generating = (*CAUSAL, auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES)
    return tuple(
        t for t in CONFIG_MAPPING_NAMES if module_of(t) in foreign and any(t in m for m in generating)
    )


def tiny_config(model_type: str, **changes: Any) -> PretrainedConfig:
    """A configuration of this type with a few small layers; towers of multimodal types are smaller still.

    ``changes`` are for a type whose text model has no configuration of its own.
    """
    config_class = CONFIG_MAPPING[model_type]
    if changes:
        return config_class(**_values(config_class, SIZES) | changes)
    return _tiny(config_class, SIZES)


def _tiny(config_class: type[PretrainedConfig], sizes: dict[str, Any]) -> PretrainedConfig:
    values = _values(config_class, sizes)
    for name, declared in config_class.sub_configs.items():
        sub_class = _sub_class(config_class, name, declared)
        if name not in values and sub_class is not None:
            values[name] = _tiny(sub_class, SIZES if name in TEXT_CONFIGS else TOWER_SIZES)
    return config_class(**values)


def _values(config_class: type[PretrainedConfig], sizes: dict[str, Any]) -> dict[str, Any]:
    """The entries of ``sizes`` that this configuration has with a value of its own, and its overrides."""
    fields = getattr(config_class, "__dataclass_fields__", {})
    values = {k: v for k, v in sizes.items() if k in fields and fields[k].default is not None}
    values |= {k: None for k in TOKENS if k in fields}
    if "kv_lora_rank" in values:  # latent attention has one key head per query head
        values["num_key_value_heads"] = values["num_attention_heads"]
    return values | OVERRIDES.get(config_class.model_type, {})


def _sub_class(config_class: type[PretrainedConfig], name: str, declared: Any) -> Any:
    if getattr(declared, "model_type", ""):
        return declared
    try:
        default = getattr(config_class(), name, None)  # declared as AutoConfig: ask a default instance
    except Exception:  # a type without a valid default raises errors of many kinds
        return None
    return type(default) if isinstance(default, PretrainedConfig) else None


def randomise(model: nn.Module, seed: int) -> None:
    """Random weights that keep the signal alive: matrices of gain about one, nothing left at zero.

    State-space parameters (``A_log`` and the like) keep their initial values, which must lie in a range, and
    so do buffers that follow from each other (the decays of MiniMax).
    """
    generator = torch.Generator().manual_seed(seed)

    def noise(t: torch.Tensor) -> torch.Tensor:
        return torch.randn(t.shape, generator=generator, dtype=torch.float32).to(t.dtype)

    transposed = tuple(f"{n}." for n, m in model.named_modules() if getattr(m, "is_transposed", False))
    tied = bool(getattr(model, "all_tied_weights_keys", None))
    with torch.no_grad():
        for name, p in model.named_parameters():
            leaf = name.rsplit(".", 1)[-1]
            if "A_log" in leaf or leaf in ("dt_bias", "D"):
                continue
            if "embed" in name and p.ndim == 2:
                p.copy_(noise(p) / (math.sqrt(p.shape[-1]) if tied else 1.0))
            elif p.ndim >= 2:
                fan_in = p.shape[-2] if name.startswith(transposed) and p.ndim == 3 else p.shape[-1]
                if "conv" in name and p.ndim > 2:
                    fan_in = p[0].numel()
                p.copy_(noise(p) / math.sqrt(fan_in))
            else:
                p.copy_(torch.nan_to_num(p) + 0.1 * noise(p))
        persistent = set(model.state_dict())
        for name, b in model.named_buffers():
            leaf = name.rsplit(".", 1)[-1]
            if leaf == "tid2eid":  # token -> its experts
                b.copy_(torch.stack([torch.randperm(8, generator=generator)[: b.shape[1]] for _ in b]))
            elif name in persistent and b.is_floating_point() and not leaf.endswith(("decay", "slope_rate")):
                b.add_(0.1 * noise(b))


def tiny_model(model_class: type[PreTrainedModel], config: PretrainedConfig, seed: int) -> PreTrainedModel:
    torch.manual_seed(seed)
    model = model_class._from_config(config, dtype=torch.float32).eval()
    randomise(model, seed)
    return model
