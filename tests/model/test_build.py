"""Trees on meta: real buffers, nothing else real, described for the rules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers import GptOssConfig, Qwen3MoeConfig

from hetero.core import HeteroError, InputError
from hetero.model.build import (
    assert_only_experts_on_meta,
    build_meta,
    choose_class,
    describe,
    find_moe,
    is_experts,
    materialise_buffers,
    meta_tensors,
)
from hetero.model.moe_types import refusal
from tests.model.tiny_moe import moe_types, tiny_config

TYPES = tuple(name for name in moe_types() if refusal(name) is None)


@pytest.mark.parametrize("model_type", TYPES)
def test_computed_buffers_are_those_of_transformers(model_type: str) -> None:
    """All types: rotary frequencies of every kind, hash multipliers, scales, masks, and where they belong."""
    config = tiny_config(model_type)
    model = build_meta(config, torch.float32)
    chosen = choose_class(config)
    reference = dict(chosen.cls._from_config(chosen.config, dtype=torch.float32).named_buffers())
    learned = set(model.state_dict())
    for name, buffer in model.named_buffers():
        expected = reference[name]
        assert buffer.dtype == expected.dtype
        if buffer.device.type == "meta":
            assert name in learned, f"{name} is computed, and was not"
            assert buffer.is_floating_point() or not expected.any()
        else:
            assert torch.equal(buffer, expected), name
    assert all(parameter.device.type == "meta" for parameter in model.parameters())
    assert not any(parameter.requires_grad for parameter in model.parameters())
    names = {name for name, _ in [*model.named_parameters(), *model.named_buffers()]}
    plain = set(meta_tensors(model)) - names - learned
    assert not plain, f"tensors that are neither parameters nor buffers are lost: {plain}"


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64},
        {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ],
    ids=lambda rope: rope["rope_type"],
)
def test_every_kind_of_rotary_frequencies(rope: dict[str, Any]) -> None:
    config = tiny_config("qwen3_moe").to_dict() | {"rope_parameters": rope, "max_position_embeddings": 512}
    config = Qwen3MoeConfig(**config)
    model = build_meta(config)
    reference = choose_class(config).cls(config)
    got, expected = model.model.rotary_emb, reference.model.rotary_emb
    assert got.inv_freq.device.type == "cpu"
    assert torch.equal(got.inv_freq, expected.inv_freq)
    assert got.attention_scaling == expected.attention_scaling


def test_a_buffer_that_nobody_fills_is_an_error() -> None:
    model = build_meta(tiny_config("qwen3_moe"))
    with torch.device("meta"):
        model.model.register_buffer("lost", torch.ones(3), persistent=False)
    with pytest.raises(HeteroError, match=r"model\.lost"):
        materialise_buffers(model)


def test_building_leaves_the_random_state_and_the_configuration_alone() -> None:
    config = tiny_config("qwen4_exp_text")
    before, state = config.to_dict(), torch.random.get_rng_state()
    build_meta(config, torch.bfloat16)
    assert config.to_dict() == before
    assert torch.equal(torch.random.get_rng_state(), state)


def test_only_experts_may_stay_on_meta() -> None:
    model = build_meta(tiny_config("qwen3_moe"))
    experts = [name for name, module in model.named_modules() if is_experts(module)]
    assert len(experts) == len(find_moe(model)) > 1
    with pytest.raises(HeteroError, match=r"model\.embed_tokens\.weight"):
        assert_only_experts_on_meta(model, experts)
    for _, module in model.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is not None and not is_experts(module):
                module._parameters[name] = nn.Parameter(torch.zeros(parameter.shape), requires_grad=False)
    assert_only_experts_on_meta(model, experts)
    with pytest.raises(HeteroError, match=experts[0]):
        assert_only_experts_on_meta(model, experts[1:])
    model.model.scale = torch.empty(1, device="meta")
    with pytest.raises(HeteroError, match=r"model\.scale"):
        assert_only_experts_on_meta(model, experts)


def test_description() -> None:
    model = build_meta(tiny_config("qwen3_next"))
    modules = {module.name: module for module in describe(model)}
    assert list(modules) == [name for name, _ in model.named_modules()]
    assert modules[""].params == sum(p.numel() for p in model.parameters())
    assert modules[""].layer is None
    assert modules["lm_head"].layer is None
    assert modules["model.layers.2.mlp.shared_expert.up_proj"].layer == 2
    block = modules["model.layers.2.mlp"]
    assert block.own_params == 0
    children = [module for name, module in modules.items() if name.startswith("model.layers.2.mlp.")]
    assert block.params == sum(module.own_params for module in children)
    assert block.classes[0] == "Qwen3NextSparseMoeBlock"
    assert "Module" in block.classes
    experts = modules["model.layers.2.mlp.experts"]
    assert experts.own_params == experts.params > block.params / 2


def test_a_tied_weight_counts_once() -> None:
    config = tiny_config("qwen3_next")
    config.tie_word_embeddings = True
    model = build_meta(config)
    modules = {module.name: module for module in describe(model)}
    assert modules[""].params == sum(p.numel() for p in model.parameters())
    assert modules["lm_head"].own_params == 0
    assert modules["model.embed_tokens"].own_params == config.vocab_size * config.hidden_size


def test_towers_are_dropped_and_named() -> None:
    model = build_meta(tiny_config("qwen3_vl_moe"))
    assert model.dropped_towers == ("model.visual",)
    assert model.model.visual is None
    assert not any("visual" in module.name for module in describe(model))


@pytest.mark.parametrize("model_type", ["t5", "vit", "openai_privacy_filter"])
def test_what_is_no_causal_language_model_is_refused_by_name(model_type: str) -> None:
    from transformers import AutoConfig

    with pytest.raises(InputError, match=model_type):
        build_meta(AutoConfig.for_model(model_type))


def test_fields_that_do_not_go_together() -> None:
    config = GptOssConfig(num_hidden_layers=2, num_local_experts=2, hidden_size=32, head_dim=8)
    config.layer_types = None
    with pytest.raises(InputError, match="does not build a GptOssForCausalLM"):
        build_meta(config)
