"""The inventory equals the module tree, tensor by tensor; a sequence keeps what a cache holds."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from hetero.core import ExpertSpec
from hetero.model.build import build_meta, describe
from hetero.model.config import choose_class, load_config
from hetero.model.shapes import resolve_model, shape_names
from hetero.plan.families import families, inventory, ngram_rows
from hetero.plan.inventory import Inventory, Kind, from_modules, text_config
from hetero.plan.kv import sequence_bytes, states
from hetero.plan.tiers import all_expert_bytes, dense_bytes
from hetero.rules.explain import explain, totals
from hetero.rules.load import load_rules
from hetero.rules.matching import match
from tests.model.tiny_moe import tiny_config, tiny_model
from tests.plan.example import QWEN3_MOE, shape

# Shapes with one thing changed, cut down to a few layers. A field of the text part is meant.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3-30b-a3b", {"tie_word_embeddings": True}),
    ("qwen3-30b-a3b", {"mlp_only_layers": [0, 2], "attention_bias": True}),
    ("qwen3-30b-a3b", {"decoder_sparse_step": 2}),
    ("qwen3-next-80b-a3b", {"full_attention_interval": 2}),
    ("qwen3.5-122b-a10b", {"linear_num_value_heads": 16}),
    ("qwen3.8-flash-next-125b", {"ple_layer_ids": [1, 3], "ngram_vocab_size_base": 1000}),
    ("qwen3.8-flash-next-125b", {"ple_layer_ids": [], "hc_count": 2}),
    ("deepseek-v3", {"q_lora_rank": None, "first_k_dense_replace": 0}),
    ("deepseek-v3", {"n_shared_experts": 2, "attention_bias": True}),
    ("glm-4.5-air", {"use_qk_norm": True, "attention_bias": False}),
    ("gpt-oss-120b", {"attention_bias": False}),
    ("mixtral-8x7b", {"sliding_window": 4096, "head_dim": 64}),
]


def variant(name: str, changes: dict[str, Any]) -> dict[str, Any]:
    config: dict[str, Any] = json.loads(json.dumps(shape(name)))
    text = config.get("text_config", config)
    text.update({"num_hidden_layers": 4, **changes})
    if "layer_types" in text:
        text["layer_types"] = text["layer_types"][:4]
    if "tie_word_embeddings" in changes:
        config["tie_word_embeddings"] = changes["tie_word_embeddings"]
    return config


def known(config: dict[str, Any]) -> Inventory:
    found = inventory(config)
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "changes"), [*((n, None) for n in shape_names()), *VARIANTS], ids=lambda v: str(v)[:40]
)
def test_the_inventory_is_the_tree(name: str, changes: dict[str, Any] | None) -> None:
    config = shape(name) if changes is None else variant(name, changes)
    tree = build_meta(load_config(config), torch.bfloat16)
    found = known(config)
    ours = {w.name: w.shape for w in found.weights}
    assert ours == {name: tuple(p.shape) for name, p in tree.named_parameters()}
    modules = describe(tree)
    assert found.params == modules[0].params
    assert [(s.name, s.layer, s.spec) for s in found.sites] == [
        (m.name, m.layer, m.experts) for m in modules if m.experts is not None
    ]
    # The other way to an inventory agrees in everything that a plan uses.
    by_tree = from_modules(config, modules)
    assert by_tree.by_kind() == found.by_kind()
    assert (by_tree.read_params, by_tree.active_params) == (found.read_params, found.active_params)
    assert (by_tree.layers, by_tree.hidden, by_tree.states) == (found.layers, found.hidden, found.states)
    assert by_tree.context == found.context


@pytest.mark.parametrize("name", shape_names())
def test_bytes_are_those_that_rules_explain(name: str) -> None:
    config = shape(name)
    modules = describe(build_meta(load_config(config), torch.float32))
    placed = match(load_rules("default-gpu"), modules, devices=("cpu", "cuda:0"))
    explained = totals(explain(placed, modules, "bfloat16"))
    found = known(config)
    fmt = placed.ruleset.variables["experts"]
    from hetero.rules.options import expected_format

    assert explained["cuda:0"] == dense_bytes(found, "bfloat16")
    assert explained["cpu"] == all_expert_bytes(found, expected_format(str(fmt))) + 2 * found.of(Kind.TABLE)


def test_known_figures() -> None:
    found = known(shape("qwen3.8-flash-next-125b"))
    assert found.of(Kind.TABLE) == 320_001_536 * 160
    assert found.of(Kind.EXPERTS) == 48 * 512 * 3 * 2560 * 640
    assert round(found.active_params / 1e9, 1) == 6.7
    assert found.sites[0].spec == ExpertSpec(512, 2560, 640, 10)
    # Dense layers in bfloat16 as they were measured on a GPU, in GB.
    dense = {n: dense_bytes(known(shape(n)), "bfloat16") / 1e9 for n in shape_names()}
    assert [round(dense[n], 1) for n in ("qwen3-30b-a3b", "qwen3-next-80b-a3b", "qwen3.5-122b-a10b")] == [
        3.1,
        4.7,
        12.3,
    ]


def test_rows_of_an_ngram_table() -> None:
    assert ngram_rows(20_000_000, 16, 0, 128) == 320_001_536
    # 2, 3 and 5, 7; with a base between primes the next ones count.
    assert ngram_rows(2, 2, 0, 1) == 5
    assert ngram_rows(2, 2, 1, 1) == 12
    assert ngram_rows(8, 2, 0, 10) == 30


def test_what_is_unknown_needs_the_tree() -> None:
    assert inventory({"model_type": "olmoe"}) is None
    assert inventory({"model_type": "qwen3_moe"}) is None  # everything left to defaults
    assert inventory({**QWEN3_MOE, "head_dim": "wide"}) is None
    assert {text_config(shape(n))["model_type"] for n in shape_names()} == set(families())


@pytest.mark.parametrize(
    "model_type",
    [
        "olmoe",
        "nemotron_h",
        "jamba",
        "lfm2_moe",
        "granitemoehybrid",
        "deepseek_v4",
        "minimax",
        "aria",
        "dots1",
    ],
)
def test_other_types_have_an_inventory(model_type: str) -> None:
    config = tiny_config(model_type)
    modules = describe(build_meta(config))
    found = from_modules(config.to_dict(), modules)
    assert found.params == modules[0].params
    assert found.sites
    assert found.of(Kind.EXPERTS) > 0
    assert 0 < found.read_params <= found.dense_params
    assert len(found.states) == found.layers > 0


_OPAQUE = (torch.nn.Module, type, PreTrainedConfig)


def _tensors(held: Any, found: dict[int, torch.Tensor], depth: int = 0) -> None:
    if isinstance(held, torch.Tensor):
        found[id(held)] = held
    elif isinstance(held, list | tuple | dict):
        for one in held.values() if isinstance(held, dict) else held:
            _tensors(one, found, depth + 1)
    elif hasattr(held, "__dict__") and depth < 6 and not isinstance(held, _OPAQUE):
        _tensors(vars(held), found, depth + 1)


@pytest.mark.parametrize(
    "model_type",
    ["qwen3_moe", "qwen3_next", "qwen3_5_moe", "qwen4_exp", "deepseek_v3", "glm4_moe", "gpt_oss", "mixtral"],
)
def test_a_sequence_keeps_what_a_cache_holds(model_type: str) -> None:
    tokens = 40
    config = tiny_config(model_type)
    chosen = choose_class(config)
    model = tiny_model(chosen.cls, chosen.config, 0)
    with torch.no_grad():
        cache = model(input_ids=torch.randint(0, 50, (1, tokens)), use_cache=True).past_key_values
    held: dict[int, torch.Tensor] = {}
    _tensors(cache, held)
    total = sum(t.numel() * t.element_size() for t in held.values() if t.dim())
    kept, notes = states(text_config(config.to_dict()))
    assert notes == ()
    assert sequence_bytes(kept, tokens, 4) == total


def test_states_that_are_not_counted_are_told() -> None:
    text = {"num_hidden_layers": 2, "hidden_size": 8, "layer_types": ["mamba", "full_attention"]}
    kept, notes = states(text)
    assert [s.kind for s in kept] == ["recurrent", "attention"]
    assert notes == ("the state of 'mamba' layers is not counted",)


def test_an_unknown_type_is_found_by_its_tree() -> None:
    from hetero.cli_plan import take_inventory

    config = tiny_config("olmoe").to_dict()
    assert take_inventory(config).sites
    assert resolve_model("synthetic:qwen3-30b-a3b").model_type == "qwen3_moe"
