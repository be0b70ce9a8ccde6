"""A model of transformers as a GGUF file, by the conventions of llama.cpp's conversion scripts.

Written apart from ``hetero.model``: names come from the gguf package's own map, and each architecture's order
of rows, heads and matrices is done here forwards, where the package undoes it.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import MODEL_TENSOR as T
from gguf import TENSOR_NAMES, GGUFWriter
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn

from tests.cpu.ggml_blocks import HALVES, random_blocks

Named = Iterator[tuple[str, Tensor]]
# The type of a tensor by its name in the file and its values; None: F32.
KindOf = Callable[[str, np.ndarray[Any, Any]], Kind | None]

PERMUTED = ("llama", "granite", "granitemoe", "granitehybrid", "smollm3")
PLUS_ONE = ("qwen3next", "qwen35moe", "gemma3")
LATENT = ("deepseek2", "glm-dsa", "kimi-linear", "mistral4")
EXPERT = {"gate": T.FFN_GATE_EXP, "up": T.FFN_UP_EXP, "down": T.FFN_DOWN_EXP}


def write(
    model: nn.Module,
    path: Path,
    arch: str,
    *,
    kind_of: KindOf = lambda name, values: None,
    split: int = 0,
    fuse: bool = False,
    whole_kv: bool = False,
    more: Callable[[GGUFWriter], None] | None = None,
) -> dict[str, np.ndarray[Any, Any]]:
    """Write a file; the values that it stands for, by tensor name.

    Where the gguf package cannot quantise to a type, the blocks are random. ``split``: the most tensors of a
    part; ``fuse``: gate and up in one tensor; ``whole_kv``: kv_b as old files have it.
    """
    config: Any = model.config
    config = copy.copy(config.get_text_config())
    config.allow_global_per_layer_attribute_access = True  # of types whose layers differ
    writer = GGUFWriter(path, arch, split_max_tensors=split)
    metadata(writer, config, arch, model)
    if more is not None:
        more(writer)
    held = {}
    for name, tensor in tensors(model, config, arch, fuse=fuse, whole_kv=whole_kv):
        values = np.ascontiguousarray(tensor.detach().float().numpy())
        kind = kind_of(name, values) or Kind.F32
        raw = values if kind == Kind.F32 else quantised(values, kind)
        writer.add_tensor(name, raw, raw_dtype=kind)
        held[name] = values if kind == Kind.F32 else gguf.quants.dequantize(raw, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held


def quantised(values: np.ndarray[Any, Any], kind: Kind) -> np.ndarray[Any, Any]:
    """Blocks near the values, or random ones of about the same size."""
    try:
        return gguf.quants.quantize(values, kind)
    except NotImplementedError:
        pass
    rows = values.size // values.shape[-1]
    blocks = random_blocks(kind.name, rows, values.shape[-1], np.random.default_rng())
    size = gguf.GGML_QUANT_SIZES[kind][1]
    each = blocks.reshape(-1, size)

    def scale(by: float) -> None:
        for at in HALVES.get(kind.name, ()):
            spread = np.random.default_rng().uniform(0.5, 1.0, len(each)) * by
            each[:, at : at + 2] = spread.astype(np.float16).view(np.uint8).reshape(-1, 2)

    if kind == Kind.MXFP4:
        each[:, 0] = np.random.default_rng().integers(119, 122, len(each))
    scale(1.0)
    scale(float(values.std() / gguf.quants.dequantize(blocks, kind).std()))
    return blocks.reshape(*values.shape[:-1], -1)


def first(c: Any, *names: str) -> Any:
    return next((value for name in names if (value := getattr(c, name, None)) is not None), None)


def metadata(w: GGUFWriter, c: Any, arch: str, model: nn.Module) -> None:
    """What the scripts write for every model, then for this architecture."""
    w.add_block_count(c.num_hidden_layers)
    w.add_context_length(c.max_position_embeddings)
    w.add_embedding_length(c.hidden_size)
    if getattr(c, "intermediate_size", None):
        w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(1 if arch in LATENT else c.num_key_value_heads)
    rope = getattr(c, "rope_parameters", None) or {}
    full = rope.get("full_attention", rope)
    if (theta := full.get("rope_theta")) is not None:
        w.add_rope_freq_base(theta)
    if full.get("rope_type") == "yarn":
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(full["factor"])
        w.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    w.add_layer_norm_rms_eps(first(c, "rms_norm_eps", "norm_eps", "layer_norm_epsilon"))
    if experts := first(c, "num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts"):
        w.add_expert_count(experts)
        w.add_expert_used_count(first(c, "num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts"))
    for key, add in (("n_group", w.add_expert_group_count), ("topk_group", w.add_expert_group_used_count)):
        if (value := getattr(c, key, None)) is not None:
            add(value)
    if (
        "head_dim" in vars(c)
        and c.head_dim
        and arch not in (*LATENT, "granite", "granitemoe", "granitehybrid")
    ):
        w.add_key_length(c.head_dim)
        w.add_value_length(c.head_dim)
    if arch in LATENT:
        latent(w, c)
    if arch in EXTRA:
        EXTRA[arch](w, c)


def latent(w: GGUFWriter, c: Any) -> None:
    if c.q_lora_rank:
        w.add_q_lora_rank(c.q_lora_rank)
    w.add_kv_lora_rank(c.kv_lora_rank)
    w.add_key_length(c.kv_lora_rank + c.qk_rope_head_dim)
    w.add_value_length(c.kv_lora_rank)
    w.add_key_length_mla(c.qk_nope_head_dim + c.qk_rope_head_dim)
    w.add_value_length_mla(c.v_head_dim)
    w.add_rope_dimension_count(c.qk_rope_head_dim)


def routed(w: GGUFWriter, c: Any) -> None:
    if (dense := getattr(c, "first_k_dense_replace", None)) is not None:
        w.add_leading_dense_block_count(dense)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(first(c, "n_shared_experts", "num_shared_experts"))
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_expert_weights_norm(c.norm_topk_prob)


def partial_rope(w: GGUFWriter, c: Any) -> None:
    head = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_rope_dimension_count(int(head * c.rope_parameters.get("partial_rotary_factor", 1.0)))


def qwen2moe(w: GGUFWriter, c: Any) -> None:
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if (shared := getattr(c, "shared_expert_intermediate_size", None)) is not None:
        w.add_expert_shared_feed_forward_length(shared)


def qwen3next(w: GGUFWriter, c: Any) -> None:
    qwen2moe(w, c)
    w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    w.add_ssm_state_size(c.linear_key_head_dim)
    w.add_ssm_group_count(c.linear_num_key_heads)
    w.add_ssm_time_step_rank(c.linear_num_value_heads)
    w.add_ssm_inner_size(c.linear_value_head_dim * c.linear_num_value_heads)
    w.add_full_attention_interval(4)
    partial_rope(w, c)


def qwen35moe(w: GGUFWriter, c: Any) -> None:
    qwen3next(w, c)
    w.add_rope_dimension_sections([*c.rope_parameters.get("mrope_section", [11, 11, 10]), 0])


def deepseek2(w: GGUFWriter, c: Any) -> None:
    routed(w, c)
    w.add_vocab_size(c.vocab_size)
    if c.model_type != "deepseek_v2":
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if (scale := c.rope_parameters.get("mscale_all_dim")) is not None:
        w.add_rope_scaling_yarn_log_mul(0.1 * scale)


def mistral4(w: GGUFWriter, c: Any) -> None:
    deepseek2(w, c)
    w.add_attn_temperature_scale(c.rope_parameters["llama_4_scaling_beta"])


def llama4(w: GGUFWriter, c: Any) -> None:
    w.add_feed_forward_length(c.intermediate_size_mlp)
    w.add_expert_feed_forward_length(c.intermediate_size)
    w.add_interleave_moe_layer_step(c.interleave_moe_layer_step)
    w.add_rope_dimension_count(c.head_dim)


def mimo2(w: GGUFWriter, c: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    w.add_head_count_kv([c.num_key_value_heads * (1 + flag) for flag in sliding])
    w.add_sliding_window(c.sliding_window - 1)
    w.add_sliding_window_pattern(sliding)
    w.add_value_length(c.v_head_dim)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    rope = c.rope_parameters
    w.add_rope_dimension_count(int(c.head_dim * rope["full_attention"]["partial_rotary_factor"]))
    w.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    w.add_float32("mimo2.attention.value_scale", c.attention_value_scale)


def glm4moe(w: GGUFWriter, c: Any) -> None:
    routed(w, c)
    partial_rope(w, c)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def glm_dsa(w: GGUFWriter, c: Any) -> None:
    deepseek2(w, c)
    w.add_indexer_head_count(c.index_n_heads)
    w.add_indexer_key_length(c.index_head_dim)
    w.add_indexer_top_k(c.index_topk)


def gpt_oss(w: GGUFWriter, c: Any) -> None:
    w.add_sliding_window(c.sliding_window)
    w.add_expert_feed_forward_length(c.intermediate_size)


def llama(w: GGUFWriter, c: Any) -> None:
    w.add_vocab_size(c.vocab_size)
    w.add_rope_dimension_count(getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads)


def granite(w: GGUFWriter, c: Any) -> None:
    llama(w, c)
    w.add_attention_scale(c.attention_multiplier)
    w.add_embedding_scale(c.embedding_multiplier)
    w.add_residual_scale(c.residual_multiplier)
    w.add_logit_scale(c.logits_scaling)
    if (shared := getattr(c, "shared_intermediate_size", None)) is not None:
        w.add_expert_shared_feed_forward_length(shared)


def granitehybrid(w: GGUFWriter, c: Any) -> None:
    granite(w, c)
    w.add_ssm_conv_kernel(c.mamba_d_conv)
    w.add_ssm_state_size(c.mamba_d_state)
    w.add_ssm_group_count(c.mamba_n_groups)
    w.add_ssm_inner_size(c.mamba_expand * c.hidden_size)
    w.add_ssm_time_step_rank(c.mamba_n_heads)
    attention = [kind == "full_attention" for kind in c.layer_types]
    w.add_array("granitehybrid.attention.head_count_kv", [c.num_key_value_heads * a for a in attention])
    w.add_rope_scaling_finetuned(False)


def ernie(w: GGUFWriter, c: Any) -> None:
    w.add_interleave_moe_layer_step(c.moe_layer_interval)
    w.add_leading_dense_block_count(c.moe_layer_start_index)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(c.moe_num_shared_experts)


def hunyuan(w: GGUFWriter, c: Any) -> None:
    w.add_expert_shared_feed_forward_length(c.intermediate_size)
    w.add_expert_feed_forward_length(c.intermediate_size)
    w.add_expert_shared_count(1)


def lfm2(w: GGUFWriter, c: Any) -> None:
    heads = [c.num_key_value_heads * (kind == "full_attention") for kind in c.layer_types]
    w.add_array("lfm2moe.attention.head_count_kv", heads)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_leading_dense_block_count(c.num_dense_layers)
    w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    w.add_shortconv_l_cache(c.conv_L_cache)


def jamba(w: GGUFWriter, c: Any) -> None:
    kinds = c.layers_block_type
    w.add_array("jamba.attention.head_count_kv", [c.num_key_value_heads * (k == "attention") for k in kinds])
    w.add_ssm_conv_kernel(c.mamba_d_conv)
    w.add_ssm_inner_size(c.mamba_expand * c.hidden_size)
    w.add_ssm_state_size(c.mamba_d_state)
    w.add_ssm_time_step_rank(c.mamba_dt_rank)


def nemotron(w: GGUFWriter, c: Any) -> None:
    kinds = c.layers_block_type
    w.add_array(
        "nemotron_h_moe.attention.head_count_kv",
        [c.num_key_value_heads * (k == "full_attention") for k in kinds],
    )
    w.add_array(
        "nemotron_h_moe.feed_forward_length",
        [c.intermediate_size * (k in ("mlp", "moe")) for k in kinds],
    )
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_feed_forward_length(c.moe_shared_expert_intermediate_size)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_expert_weights_norm(c.norm_topk_prob)
    w.add_expert_weights_scale(c.routed_scaling_factor)
    w.add_moe_latent_size(c.moe_latent_size)
    w.add_ssm_conv_kernel(c.conv_kernel)
    w.add_ssm_state_size(c.ssm_state_size)
    w.add_ssm_group_count(c.n_groups)
    w.add_ssm_inner_size(c.mamba_num_heads * c.mamba_head_dim)
    w.add_ssm_time_step_rank(c.mamba_num_heads)


def afmoe(w: GGUFWriter, c: Any) -> None:
    llama(w, c)
    w.add_expert_shared_count(c.num_shared_experts)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_leading_dense_block_count(c.num_dense_layers)
    w.add_expert_weights_norm(True)
    w.add_expert_weights_scale(c.route_scale)
    w.add_sliding_window(c.sliding_window)


def exaone(w: GGUFWriter, c: Any) -> None:
    routed(w, c)
    w.add_sliding_window(c.sliding_window)
    w.add_sliding_window_pattern([kind == "sliding_attention" for kind in c.layer_types])


def kimi(w: GGUFWriter, c: Any) -> None:
    w.add_array("kimi-linear.attention.head_count_kv", [int(k == "full_attention") for k in c.layer_types])
    w.add_ssm_conv_kernel(c.linear_conv_kernel_dim)
    w.add_kda_head_dim(c.linear_head_dim)
    w.add_expert_feed_forward_length(c.moe_intermediate_size)
    w.add_expert_shared_count(c.n_shared_experts)
    w.add_leading_dense_block_count(c.mlp_layer_types.index("sparse"))
    w.add_expert_weights_scale(c.routed_scaling_factor)


def gemma3(w: GGUFWriter, c: Any) -> None:
    w.add_sliding_window(c.sliding_window)


def gemma4(w: GGUFWriter, c: Any) -> None:
    sliding = [kind == "sliding_attention" for kind in c.layer_types]
    kinds = [c.per_layer_config[kind] for kind in ("full_attention", "sliding_attention")]
    w.add_shared_kv_layers(c.num_kv_shared_layers)
    w.add_embedding_length_per_layer_input(c.hidden_size_per_layer_input or 0)
    w.add_sliding_window(c.sliding_window)
    w.add_sliding_window_pattern(sliding)
    w.add_key_length(kinds[0].head_dim)
    w.add_value_length(kinds[0].head_dim)
    w.add_key_length_swa(kinds[1].head_dim)
    w.add_value_length_swa(kinds[1].head_dim)
    w.add_rope_dimension_count(kinds[0].head_dim)
    w.add_rope_dimension_count_swa(kinds[1].head_dim)
    w.add_rope_freq_base_swa(c.rope_parameters["sliding_attention"]["rope_theta"])
    if c.enable_moe_block:
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if c.use_double_wide_mlp:
        own = c.num_hidden_layers - c.num_kv_shared_layers
        sizes = [c.intermediate_size * (1 if n < own else 2) for n in range(c.num_hidden_layers)]
        w.add_feed_forward_length(sizes)
    if kinds[0].num_key_value_heads != kinds[1].num_key_value_heads:
        w.add_head_count_kv([kinds[flag].num_key_value_heads for flag in sliding])
    if c.final_logit_softcapping:
        w.add_final_logit_softcapping(c.final_logit_softcapping)


EXTRA: dict[str, Callable[[GGUFWriter, Any], None]] = {
    "afmoe": afmoe,
    "deepseek2": deepseek2,
    "dots1": routed,
    "ernie4_5-moe": ernie,
    "exaone-moe": exaone,
    "gemma3": gemma3,
    "gemma4": gemma4,
    "glm-dsa": glm_dsa,
    "glm4moe": glm4moe,
    "gpt-oss": gpt_oss,
    "granite": granite,
    "granitehybrid": granitehybrid,
    "granitemoe": granite,
    "hunyuan-moe": hunyuan,
    "jamba": jamba,
    "kimi-linear": kimi,
    "lfm2moe": lfm2,
    "llama": llama,
    "llama4": llama4,
    "mimo2": mimo2,
    "minimax-m2": partial_rope,
    "mistral4": mistral4,
    "nemotron_h_moe": nemotron,
    "qwen2moe": qwen2moe,
    "qwen35moe": qwen35moe,
    "qwen3moe": qwen2moe,
    "qwen3next": qwen3next,
    "qwen3vlmoe": qwen2moe,
    "smollm3": llama,
}


def tensors(model: nn.Module, c: Any, arch: str, *, fuse: bool, whole_kv: bool) -> Named:
    """Every tensor of the file."""
    state = dict(model.named_parameters()) | {
        name: buffer for name, buffer in model.named_buffers() if name in model.state_dict()
    }
    gguf_arch = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(gguf_arch, c.num_hidden_layers)
    if arch == "gemma4":
        full = c.rope_parameters["full_attention"]["partial_rotary_factor"]
        half = c.per_layer_config["full_attention"].head_dim // 2
        rotated = int(half * full)
        yield "rope_freqs.weight", torch.tensor([1.0] * rotated + [1e30] * (half - rotated))
    for name, tensor in state.items():
        found = re.search(r"layers\.(\d+)\.", name)
        block = int(found[1]) if found else None
        for to, value in _Tensor(name, c, arch, block, fuse, whole_kv).convert(tensor.detach()):
            mapped = to if to in state else names.get_name(to, (".weight", ".bias")) or to
            if mapped in state:
                mapped = names.get_name(mapped, (".weight", ".bias"))
            assert mapped is not None, f"{arch}: the gguf package has no name for {name}"
            yield mapped, value


def tiled(x: Tensor, dim: int, size: int, c: Any) -> Tensor:
    """Value heads from groups of a key head to turns of all key heads."""
    keys = c.linear_num_key_heads
    shape = x.shape
    split = x.reshape(*shape[:dim], keys, c.linear_num_value_heads // keys, size, *shape[dim + 1 :])
    return split.transpose(dim, dim + 1).reshape(shape)


@dataclass
class _Tensor:
    """One parameter of transformers on its way into the file."""

    name: str
    c: Any
    arch: str
    block: int | None
    fuse: bool
    whole_kv: bool

    def __post_init__(self) -> None:
        self.path, _, self.leaf = self.name.rpartition(".")
        self.module = self.path.rpartition(".")[2]

    def as_kind(self, kind: Any, suffix: str = ".weight") -> str:
        return str(TENSOR_NAMES[kind].format(bid=self.block)) + suffix

    def convert(self, x: Tensor) -> Named:
        """(name, tensor) in the file; a name of transformers where the gguf package's map has it."""
        if self.module == "experts":
            yield from self.experts(x)
            return
        if self.leaf in ("e_score_correction_bias", "expert_bias"):
            yield self.as_kind(T.FFN_EXP_PROBS_B, ".bias"), x.reshape(-1)
            return
        if self.arch == "gemma4" and self.leaf in ("scale", "per_expert_scale"):
            kind = T.FFN_GATE_INP if self.leaf == "scale" else T.FFN_DOWN_EXP
            yield self.as_kind(kind, ".scale"), x
            return
        if self.leaf == "layer_scalar":
            yield f"{self.name}.weight", x
            return
        if self.leaf == "sinks":
            yield self.as_kind(T.ATTN_SINKS), x
            return
        if self.arch in PLUS_ONE and self.name.endswith("norm.weight") and "linear_attn" not in self.name:
            x = x + 1
        if self.arch in PERMUTED and self.module in ("q_proj", "k_proj"):
            heads = self.c.num_attention_heads if self.module == "q_proj" else self.c.num_key_value_heads
            x = x.reshape(heads, 2, -1, *x.shape[1:]).swapaxes(1, 2).reshape(x.shape)
        if self.module == "kv_b_proj" and not self.whole_kv:
            both = x.view(self.c.num_attention_heads, self.c.qk_nope_head_dim + self.c.v_head_dim, -1)
            keys, values = both.split([self.c.qk_nope_head_dim, self.c.v_head_dim], dim=1)
            yield self.as_kind(T.ATTN_K_B), keys.transpose(1, 2)
            yield self.as_kind(T.ATTN_V_B), values
            return
        if self.module == "input_linear":
            shared = getattr(self.c, "num_local_experts", 0)
            kinds = (T.FFN_GATE_SHEXP, T.FFN_UP_SHEXP) if shared else (T.FFN_GATE, T.FFN_UP)
            for kind, half in zip(kinds, x.chunk(2), strict=True):
                yield self.as_kind(kind), half
            return
        if "block_sparse_moe.router" in self.name:
            yield self.as_kind(T.FFN_GATE_INP), x
            return
        if (
            re.search(r"layers\.\d+\.(linear_attn|mamba|mixer|conv)\.", self.name)
            or self.arch == "kimi-linear"
        ):
            yield from self.recurrent(x)
            return
        if self.arch in ("qwen3moe", "qwen3next") and self.module in ("gate_proj", "up_proj", "down_proj"):
            # The map of these has experts alone, and layers without any are as elsewhere.
            yield from self.dense(x)
            return
        if self.arch == "lfm2moe" and self.name == "model.embedding_norm.weight":
            yield self.as_kind(T.TOKEN_EMBD_NORM), x
            return
        if self.module == "shared_expert_gate":
            x = x.reshape(-1)
        yield self.name, x

    def dense(self, x: Tensor) -> Named:
        if "shared_expert" in self.name:
            yield self.name, x
            return
        kinds = {"gate_proj": T.FFN_GATE, "up_proj": T.FFN_UP, "down_proj": T.FFN_DOWN}
        yield self.as_kind(kinds[self.module]), x

    def experts(self, x: Tensor) -> Named:
        suffix = ".bias" if self.leaf.endswith("_bias") else ".weight"
        part = self.leaf.removesuffix("_bias").removesuffix("_proj")
        if self.arch in ("gpt-oss", "llama4") and suffix == ".weight":
            x = x.transpose(1, 2)
        if part != "gate_up":
            yield self.as_kind(EXPERT[part], suffix), x
        elif self.arch == "gpt-oss":
            yield self.as_kind(T.FFN_GATE_EXP, suffix), x[:, 0::2]
            yield self.as_kind(T.FFN_UP_EXP, suffix), x[:, 1::2]
        elif self.fuse:
            yield self.as_kind(T.FFN_GATE_UP_EXP, suffix), x
        else:
            gate, up = x.chunk(2, dim=1)
            yield self.as_kind(T.FFN_GATE_EXP, suffix), gate
            yield self.as_kind(T.FFN_UP_EXP, suffix), up

    def recurrent(self, x: Tensor) -> Named:
        """State-space, delta and convolution layers."""
        if (
            self.arch == "kimi-linear"
            and self.leaf not in ("A_log", "dt_bias")
            and self.module not in ("conv1d", "o_norm")
        ):
            forget = {"f_a_proj": T.SSM_F_A, "f_b_proj": T.SSM_F_B}
            yield (self.as_kind(forget[self.module]) if self.module in forget else self.name), x
            return
        if self.leaf == "A_log":
            a = -torch.exp(x)
            if self.arch == "qwen35moe":
                a = tiled(a, 0, 1, self.c)
            if self.arch in ("granitehybrid", "nemotron_h_moe"):
                a = a.reshape(-1, 1)
            yield self.as_kind(T.SSM_A, ""), a
        elif self.leaf == "dt_bias":
            yield self.as_kind(T.SSM_DT, ".bias"), tiled(x, 0, 1, self.c) if self.arch == "qwen35moe" else x
        elif self.leaf == "D":
            yield self.as_kind(T.SSM_D, ""), x if self.arch == "jamba" else x.reshape(-1, 1)
        elif self.module == "conv1d" and self.arch == "kimi-linear":
            for kind, part in zip((T.SSM_CONV1D_Q, T.SSM_CONV1D_K, T.SSM_CONV1D_V), x.chunk(3), strict=True):
                yield self.as_kind(kind), part.reshape(1, part.shape[0], 1, -1)
        elif self.module == "conv1d":
            if self.leaf == "weight":
                x = x.squeeze(1)
            if self.arch == "qwen35moe":
                fixed = 2 * self.c.linear_num_key_heads * self.c.linear_key_head_dim
                x = torch.cat((x[:fixed], tiled(x[fixed:], 0, self.c.linear_value_head_dim, self.c)))
            yield self.as_kind(T.SSM_CONV1D, f".{self.leaf}"), x
        elif self.module == "conv" and self.leaf in ("weight", "bias") and "conv.conv" in self.name:
            yield (
                self.as_kind(T.SHORTCONV_CONV, f".{self.leaf}"),
                x.squeeze(1) if self.leaf == "weight" else x,
            )
        elif self.arch in ("granitehybrid", "nemotron_h_moe") and self.module == "norm":
            groups = self.c.mamba_n_groups if self.arch == "granitehybrid" else self.c.n_groups
            yield self.as_kind(T.SSM_NORM), x.reshape(groups, -1)
        elif self.arch == "qwen3next" and self.module == "in_proj_qkvz":
            keys, per = (
                self.c.linear_num_key_heads,
                self.c.linear_num_value_heads // self.c.linear_num_key_heads,
            )
            sizes = [self.c.linear_key_head_dim] * 2 + [per * self.c.linear_value_head_dim] * 2
            q, k, v, z = (part.flatten(0, 1) for part in x.view(keys, sum(sizes), -1).split(sizes, dim=1))
            yield self.as_kind(T.ATTN_QKV), torch.cat((q, k, v))
            yield self.as_kind(T.ATTN_GATE), z
        elif self.arch == "qwen35moe" and self.module.startswith(("in_proj", "out_proj")):
            size = self.c.linear_value_head_dim
            if self.module == "in_proj_qkv":
                fixed = 2 * self.c.linear_num_key_heads * self.c.linear_key_head_dim
                x = torch.cat((x[:fixed], tiled(x[fixed:], 0, size, self.c)))
            elif self.module == "in_proj_z":
                x = tiled(x, 0, size, self.c)
            elif self.module == "out_proj":
                x = tiled(x, 1, size, self.c)
            else:
                x = tiled(x, 0, 1, self.c)
            yield self.name, x
        elif self.arch == "nemotron_h_moe":
            kinds = {
                "in_proj": T.SSM_IN, "out_proj": T.SSM_OUT, "q_proj": T.ATTN_Q, "k_proj": T.ATTN_K,
                "v_proj": T.ATTN_V, "o_proj": T.ATTN_OUT, "gate": T.FFN_GATE_INP, "up_proj": T.FFN_UP,
                "down_proj": T.FFN_DOWN, "fc1_latent_proj": T.MOE_LATENT_DOWN,
                "fc2_latent_proj": T.MOE_LATENT_UP,
            }  # fmt: skip
            if "shared" in self.name:
                kinds |= {"up_proj": T.FFN_UP_SHEXP, "down_proj": T.FFN_DOWN_SHEXP}
            yield self.as_kind(kinds[self.module], f".{self.leaf}"), x
        else:
            yield self.name, x
