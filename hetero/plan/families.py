"""Every tensor of the families whose shapes are shipped, by arithmetic on the configuration.

Names and shapes are those of transformers' module tree; a test compares them one by one. For another type, or
a configuration that leaves a field to a default of transformers, ``inventory`` gives None: the tree has to be
built.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

from hetero.core import Activation, ActKind, ExpertSpec
from hetero.plan.inventory import Inventory, Kind, Site, Weight, text_config
from hetero.plan.kv import head_dim, layer_kinds, states

Config = Mapping[str, Any]


class _Tree:
    """Collects tensors below a prefix."""

    def __init__(self) -> None:
        self.weights: list[Weight] = []
        self.sites: list[Site] = []
        self.layer: int | None = None
        self.prefix = ""

    def add(self, name: str, kind: Kind, *shape: int, matrix: bool = False, head: bool = False) -> None:
        weight = Weight(self.prefix + name, kind, prod(shape), self.layer, shape, matrix, head)
        self.weights.append(weight)

    def linear(self, name: str, kind: Kind, out: int, inputs: int, bias: bool = False) -> None:
        self.add(f"{name}.weight", kind, out, inputs, matrix=True)
        if bias:
            self.add(f"{name}.bias", kind, out)

    def norm(self, name: str, size: int) -> None:
        self.add(f"{name}.weight", Kind.NORM, size)

    def mlp(self, name: str, kind: Kind, hidden: int, intermediate: int) -> None:
        self.linear(f"{name}.gate_proj", kind, intermediate, hidden)
        self.linear(f"{name}.up_proj", kind, intermediate, hidden)
        self.linear(f"{name}.down_proj", kind, hidden, intermediate)

    def experts(self, name: str, spec: ExpertSpec, *, transposed: bool = False) -> None:
        e, h, i = spec.num_experts, spec.hidden, spec.intermediate
        up, down = ((h, 2 * i), (i, h)) if transposed else ((2 * i, h), (h, i))
        self.add(f"{name}.gate_up_proj", Kind.EXPERTS, e, *up)
        self.add(f"{name}.down_proj", Kind.EXPERTS, e, *down)
        if spec.has_bias:
            self.add(f"{name}.gate_up_proj_bias", Kind.EXPERTS, e, 2 * i)
            self.add(f"{name}.down_proj_bias", Kind.EXPERTS, e, h)
        self.sites.append(Site(self.prefix + name, self.layer, spec))


def inventory(config: Config) -> Inventory | None:
    """The inventory of a configuration of a known family; None for any other."""
    text = text_config(config)
    build = _FAMILIES.get(str(text.get("model_type", "")))
    if build is None:
        return None
    try:
        return _build(config, text, build)
    except (KeyError, TypeError, ValueError):
        return None  # a field is left to a default that only transformers knows


def _build(config: Config, text: Config, build: Callable[[_Tree, Config, int, str], None]) -> Inventory:
    tree = _Tree()
    hidden, vocabulary, layers = text["hidden_size"], text["vocab_size"], text["num_hidden_layers"]
    tied = bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))
    tree.add("model.embed_tokens.weight", Kind.EMBEDDING, vocabulary, hidden, head=tied)
    kinds = layer_kinds(text)
    for index in range(layers):
        tree.layer, tree.prefix = index, f"model.layers.{index}."
        build(tree, text, index, kinds[index])
    tree.layer, tree.prefix = None, ""
    if "hc_count" in text:
        _hyper(tree, "model.hyper_connection_mixer", text, inject=False)
    else:
        tree.norm("model.norm", hidden)
    if not tied:
        tree.add("lm_head.weight", Kind.HEAD, vocabulary, hidden, matrix=True)
    kept, notes = states(text)
    return Inventory(
        model_type=str(config.get("model_type", "")),
        hidden=hidden,
        layers=layers,
        weights=tuple(tree.weights),
        sites=tuple(tree.sites),
        states=kept,
        context=text.get("max_position_embeddings"),
        vocabulary=vocabulary,
        notes=notes,
    )


def _attention(
    tree: _Tree,
    c: Config,
    *,
    bias: bool = False,
    o_bias: bool = False,
    norms: bool = True,
    gated: bool = False,
) -> None:
    """Grouped-query attention; ``gated``: queries come with a gate of their size."""
    hidden, dim = c["hidden_size"], head_dim(c)
    heads, kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
    kind = Kind.ATTENTION
    tree.linear("self_attn.q_proj", kind, heads * dim * (2 if gated else 1), hidden, bias)
    tree.linear("self_attn.k_proj", kind, kv_heads * dim, hidden, bias)
    tree.linear("self_attn.v_proj", kind, kv_heads * dim, hidden, bias)
    tree.linear("self_attn.o_proj", kind, hidden, heads * dim, o_bias)
    if norms:
        tree.norm("self_attn.q_norm", dim)
        tree.norm("self_attn.k_norm", dim)


def _norms(tree: _Tree, c: Config) -> None:
    tree.norm("input_layernorm", c["hidden_size"])
    tree.norm("post_attention_layernorm", c["hidden_size"])


def _spec(c: Config, experts: str, intermediate: str = "moe_intermediate_size") -> ExpertSpec:
    return ExpertSpec(c[experts], c["hidden_size"], c[intermediate], c["num_experts_per_tok"])


def _is_sparse(c: Config, index: int) -> bool:
    step = c.get("decoder_sparse_step") or 1
    return index not in (c.get("mlp_only_layers") or ()) and (index + 1) % step == 0


def _qwen_moe(tree: _Tree, c: Config, index: int) -> None:
    """Router and experts, and the shared expert of the types that have one."""
    hidden = c["hidden_size"]
    if not _is_sparse(c, index):
        tree.mlp("mlp", Kind.DENSE, hidden, c["intermediate_size"])
        return
    tree.add("mlp.gate.weight", Kind.ROUTER, c["num_experts"], hidden)
    tree.experts("mlp.experts", _spec(c, "num_experts"))
    if "shared_expert_intermediate_size" in c:
        tree.mlp("mlp.shared_expert", Kind.SHARED, hidden, c["shared_expert_intermediate_size"])
        tree.linear("mlp.shared_expert_gate", Kind.SHARED, 1, hidden)


def _qwen3_moe(tree: _Tree, c: Config, index: int, kind: str) -> None:
    _attention(tree, c, bias=bool(c["attention_bias"]), o_bias=bool(c["attention_bias"]))
    _qwen_moe(tree, c, index)
    _norms(tree, c)


def _delta_net(tree: _Tree, c: Config, *, joined: bool) -> None:
    """Gated delta net; ``joined``: its projections are one matrix for q, k, v, z and one for b and a."""
    hidden = c["hidden_size"]
    keys = c["linear_num_key_heads"] * c["linear_key_head_dim"]
    heads = c["linear_num_value_heads"]
    values = heads * c["linear_value_head_dim"]
    kind, at = Kind.LINEAR, "linear_attn"
    tree.add(f"{at}.dt_bias", kind, heads)
    tree.add(f"{at}.A_log", kind, heads)
    tree.add(f"{at}.conv1d.weight", kind, 2 * keys + values, 1, c["linear_conv_kernel_dim"])
    tree.norm(f"{at}.norm", c["linear_value_head_dim"])
    tree.linear(f"{at}.out_proj", kind, hidden, values)
    if joined:
        tree.linear(f"{at}.in_proj_qkvz", kind, 2 * keys + 2 * values, hidden)
        tree.linear(f"{at}.in_proj_ba", kind, 2 * heads, hidden)
        return
    tree.linear(f"{at}.in_proj_qkv", kind, 2 * keys + values, hidden)
    tree.linear(f"{at}.in_proj_z", kind, values, hidden)
    tree.linear(f"{at}.in_proj_b", kind, heads, hidden)
    tree.linear(f"{at}.in_proj_a", kind, heads, hidden)


def _qwen_hybrid(tree: _Tree, c: Config, index: int, kind: str) -> None:
    """qwen3_next and qwen3_5_moe: delta net, every few layers gated attention."""
    if kind == "linear_attention":
        _delta_net(tree, c, joined=c["model_type"] == "qwen3_next")
    else:
        bias = bool(c["attention_bias"])
        _attention(tree, c, bias=bias, o_bias=bias, gated=True)
    _qwen_moe(tree, c, index)
    _norms(tree, c)


def _hyper(tree: _Tree, name: str, c: Config, *, inject: bool = True) -> None:
    wide = c["hidden_size"] * c["hc_count"]
    tree.norm(f"{name}.hc_norm", wide)
    tree.linear(f"{name}.input_mix_weight_down", Kind.HYPER, c["hc_lowrank"], wide)
    tree.linear(f"{name}.input_mix_weight_up", Kind.HYPER, wide, c["hc_lowrank"])
    if inject:
        tree.linear(f"{name}.block_inject_weight", Kind.HYPER, c["hc_count"], wide)


def _qwen4_exp(tree: _Tree, c: Config, index: int, kind: str) -> None:
    if kind == "linear_attention":
        _delta_net(tree, c, joined=False)
    else:
        bias = bool(c["attention_bias"])
        _attention(tree, c, bias=bias, o_bias=bias, gated=True)
        at, dim = "self_attn.indexer", c["indexer_head_dim"]
        rows = (c["indexer_n_heads"] + c["indexer_kv_heads"]) * dim
        tree.linear(f"{at}.index_qk_proj", Kind.ATTENTION, rows, c["hidden_size"])
        tree.norm(f"{at}.q_layernorm", dim)
        tree.norm(f"{at}.k_layernorm", dim)
    _qwen_moe(tree, c, index)
    _hyper(tree, "attn_hyper_connection", c)
    _hyper(tree, "mlp_hyper_connection", c)
    if index + 1 in c["ple_layer_ids"]:
        _ple(tree, c, c["ple_layer_ids"].index(index + 1))


def _ple(tree: _Tree, c: Config, position: int) -> None:
    """The n-gram embedding of one layer (layer ids count from 1)."""
    hidden, wide, embed = c["hidden_size"], c["hidden_size"] * c["hc_count"], c["ple_embed_dim"]
    heads = (c["ngram_size"] - 1) * c["heads_per_ngram"]
    rows = ngram_rows(c["ngram_vocab_size_base"], heads, position, c["make_ngram_vocab_size_divisible_by"])
    tree.add("ple.ple_embedding.ngram_embedding.weight", Kind.TABLE, rows, embed // heads)
    tree.linear("ple.key_proj", Kind.OTHER, wide, embed)
    tree.linear("ple.value_proj", Kind.OTHER, hidden, embed)
    for name in ("norm_key", "norm_query", "norm_conv"):
        tree.norm(f"ple.{name}", wide)
    tree.add("ple.conv1d.weight", Kind.OTHER, wide, 1, c["ple_conv_kernel_size"])


def ngram_rows(base: int, heads: int, position: int, divisor: int) -> int:
    """Rows of the table of the ``position``-th layer that has one: a prime of rows for each head, the primes
    from ``base`` on in order over all such layers, rounded up to ``divisor``."""
    total, prime = 0, base - 1
    for index in range((position + 1) * heads):
        prime += 1
        while not _is_prime(prime):
            prime += 1
        if index >= position * heads:
            total += prime
    return -(-total // divisor) * divisor


def _is_prime(n: int) -> bool:
    """Miller-Rabin with bases that are exact below 3e23."""
    bases = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
    if n < 2:
        return False
    if any(n % p == 0 for p in bases):
        return n in bases
    odd, twos = n - 1, 0
    while odd % 2 == 0:
        odd, twos = odd // 2, twos + 1
    for base in bases:
        x = pow(base, odd, n)
        if x in (1, n - 1):
            continue
        for _ in range(twos - 1):
            x = x * x % n
            if x == n - 1:
                break
        else:
            return False
    return True


def _deepseek(tree: _Tree, c: Config, index: int, kind: str) -> None:
    """Multi-head latent attention, then a dense MLP in the first layers and MoE in the others."""
    hidden, heads, rank = c["hidden_size"], c["num_attention_heads"], c["q_lora_rank"]
    rope, nope, value, latent = (
        c["qk_rope_head_dim"],
        c["qk_nope_head_dim"],
        c["v_head_dim"],
        c["kv_lora_rank"],
    )
    at, bias = Kind.ATTENTION, bool(c["attention_bias"])
    if rank is None:
        tree.linear("self_attn.q_proj", at, heads * (nope + rope), hidden)
    else:
        tree.linear("self_attn.q_a_proj", at, rank, hidden, bias)
        tree.norm("self_attn.q_a_layernorm", rank)
        tree.linear("self_attn.q_b_proj", at, heads * (nope + rope), rank)
    tree.linear("self_attn.kv_a_proj_with_mqa", at, latent + rope, hidden, bias)
    tree.norm("self_attn.kv_a_layernorm", latent)
    tree.linear("self_attn.kv_b_proj", at, heads * (nope + value), latent)
    tree.linear("self_attn.o_proj", at, hidden, heads * value, bias)
    _first_dense(tree, c, index)
    _norms(tree, c)


def _first_dense(tree: _Tree, c: Config, index: int) -> None:
    hidden = c["hidden_size"]
    if index < c["first_k_dense_replace"]:
        tree.mlp("mlp", Kind.DENSE, hidden, c["intermediate_size"])
        return
    tree.experts("mlp.experts", _spec(c, "n_routed_experts"))
    tree.add("mlp.gate.weight", Kind.ROUTER, c["n_routed_experts"], hidden)
    shared = c["moe_intermediate_size"] * c["n_shared_experts"]
    tree.mlp("mlp.shared_experts", Kind.SHARED, hidden, shared)


def _glm4_moe(tree: _Tree, c: Config, index: int, kind: str) -> None:
    _attention(tree, c, bias=bool(c["attention_bias"]), norms=bool(c["use_qk_norm"]))
    _first_dense(tree, c, index)
    _norms(tree, c)


def _gpt_oss(tree: _Tree, c: Config, index: int, kind: str) -> None:
    bias = bool(c["attention_bias"])
    tree.add("self_attn.sinks", Kind.ATTENTION, c["num_attention_heads"])
    _attention(tree, c, bias=bias, o_bias=bias, norms=False)
    tree.add("mlp.router.weight", Kind.ROUTER, c["num_local_experts"], c["hidden_size"])
    tree.add("mlp.router.bias", Kind.ROUTER, c["num_local_experts"])
    limit = float(c.get("swiglu_limit") or 7.0)
    spec = ExpertSpec(
        c["num_local_experts"],
        c["hidden_size"],
        c["intermediate_size"],
        c["num_experts_per_tok"],
        Activation(ActKind.SILU, 1.702, limit, limit, up_offset=1.0),
        has_bias=True,
    )
    tree.experts("mlp.experts", spec, transposed=True)
    _norms(tree, c)


def _mixtral(tree: _Tree, c: Config, index: int, kind: str) -> None:
    _attention(tree, c, norms=False)
    tree.add("mlp.gate.weight", Kind.ROUTER, c["num_local_experts"], c["hidden_size"])
    tree.experts("mlp.experts", _spec(c, "num_local_experts", "intermediate_size"))
    _norms(tree, c)


_FAMILIES: Mapping[str, Callable[[_Tree, Config, int, str], None]] = {
    "qwen3_moe": _qwen3_moe,
    "qwen3_next": _qwen_hybrid,
    "qwen3_5_moe_text": _qwen_hybrid,
    "qwen4_exp_text": _qwen4_exp,
    "deepseek_v3": _deepseek,
    "glm4_moe": _glm4_moe,
    "gpt_oss": _gpt_oss,
    "mixtral": _mixtral,
}


def families() -> tuple[str, ...]:
    """Model types (of the text part) whose inventory needs no tree."""
    return tuple(_FAMILIES)
