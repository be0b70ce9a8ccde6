"""How the MoE blocks of transformers are wired: one short description per shape of block.

Almost every block is ``experts(x, ids, weights) + shared(x)`` with the router in ``gate``. Only what differs
is written down here. Blocks are known by class name, so that one this file has not seen is never guessed at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

# What a block's forward returns from (hidden states, what the router returned).
Returns = Callable[[Any, tuple[Any, ...]], Any]
Choice = Callable[[Any, tuple[Any, ...]], tuple[Any, Any, Any]]


@dataclass(frozen=True, slots=True)
class Recipe:
    """Attributes of the block that take part. A name may be absent or None on an instance: it is skipped."""

    router: str = "gate"
    # Attributes of the block that the router takes after the hidden states, where they are there.
    router_attrs: tuple[str, ...] = ()
    # Keyword argument of the router -> keyword argument of the block that it takes.
    router_kwargs: dict[str, str] = field(default_factory=dict)
    # The router wants [batch, sequence, hidden], not [tokens, hidden].
    router_unflattened: bool = False
    # Modules on the way into the experts and out of them.
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    # A number that the experts' output is multiplied by.
    scale: str = ""
    shared: tuple[str, ...] = ("shared_experts", "shared_expert", "shared_mlp")
    # A linear layer whose sigmoid weighs the shared expert.
    shared_gate: str = "shared_expert_gate"
    # Keyword argument of the shared expert -> index in what the router returned.
    shared_kwargs: dict[str, int] = field(default_factory=dict)
    # An attribute that is "sum" or "average".
    strategy: str = ""
    # An attribute that is true where experts and shared expert are added in float32.
    float32_sum: str = ""
    # A norm of the sum.
    norm: str = ""
    # (router, what it returned) -> (logits, weights [T, k], ids [T, k]), where it returns something else.
    choice: Choice | None = None
    # Weights are of the experts' inputs, and not of their outputs.
    weighs_inputs: bool = False
    returns: Returns = lambda hidden, routed: hidden


def _of_all_experts(router: Any, returned: tuple[Any, ...]) -> tuple[Any, Any, Any]:
    """From scores [T, E], zero but for the chosen ones, and logits [T, E]."""
    scores, logits = returned
    ids = logits.topk(router.top_k, dim=1).indices
    return logits, scores.gather(1, ids), ids


_PLAIN = Recipe()
_ROUTER = Recipe(router="router")
_SCALED = Recipe(scale="routed_scaling_factor")
_CORRECTED = Recipe(router_attrs=("e_score_correction_bias",))

_PLAIN_BLOCKS = """
    AXK2MoE BailingHybridMoE DeepseekOcr2TextMoe DeepseekV2Moe DeepseekV3MoE DeepseekV32MoE Dots1MoE
    Dots3NoteTextMoE Ernie4_5_MoeSparseMoeBlock ExaoneMoeSparseMoEBlock FlexOlmoSparseMoeBlock
    FlintSparseMoeBlock Glm4MoeMoE Glm4MoeLiteMoE Glm4vMoeTextMoE Glm5NextTextMoE GlmMoeDsaMoE HYV4MoE
    HunYuanMoEV1Moe Inkling2SparseMoeBlock KimiLinearMoE Kolibri1SparseMoeBlock MellumSparseMoeBlock
    MiMoV2FlashMoE MiniMaxSparseMoeBlock Mistral4MoE MistralLarge4TextMoE MixtralSparseMoeBlock
    OlmoeSparseMoeBlock Qwen2MoeSparseMoeBlock Qwen3MoeSparseMoeBlock Qwen3NextSparseMoeBlock
    Qwen3OmniMoeThinkerTextSparseMoeBlock Qwen3VLMoeTextSparseMoeBlock Qwen3_5MoeSparseMoeBlock
    Qwen4ExpTextSparseMoeBlock SolarOpenMoE UnlimitedOcrTextMoe
"""
_ROUTER_BLOCKS = """
    AriaTextMoELayer GraniteMoeMoE GraniteMoeSWAMoE GraniteMoeHybridMoE GraniteMoeSharedMoE
    JambaSparseMoeBlock PhimoeSparseMoeBlock
"""

_SCALED_BLOCKS = "BeamMoE LagunaSparseMoeBlock MiniMaxM3VLSparseMoeBlock Step3p7SparseMoeBlock"

# Class name of a block -> how it is wired.
RECIPES: dict[str, Recipe] = {
    **dict.fromkeys(_PLAIN_BLOCKS.split(), _PLAIN),
    **dict.fromkeys(_ROUTER_BLOCKS.split(), _ROUTER),
    **dict.fromkeys(_SCALED_BLOCKS.split(), _SCALED),
    "AXK1MoE": Recipe(norm="post_mlp_layernorm"),
    "AfmoeSparseMoeBlock": replace(_ROUTER, router_attrs=("expert_bias",), router_unflattened=True),
    "Cohere2MoeSparseMoeBlock": Recipe(strategy="shared_expert_combination_strategy"),
    "DeepseekV4SparseMoeBlock": Recipe(router_kwargs={"input_ids": "input_ids"}),
    "Ernie4_5_VLMoeSparseMoeBlock": Recipe(
        returns=lambda hidden, routed: (hidden.flatten(), routed[0].flatten())
    ),
    "GptOssMLP": replace(_ROUTER, returns=lambda hidden, routed: (hidden, routed[1])),
    "HYV3MoE": replace(_CORRECTED, float32_sum="enable_moe_fp32_combine"),
    "InklingMoE": Recipe(shared_kwargs={"gammas": 3}),
    "Lfm2MoeSparseMoeBlock": Recipe(router_attrs=("expert_bias",)),
    "Llama4TextMoe": replace(
        _ROUTER,
        choice=_of_all_experts,
        weighs_inputs=True,
        returns=lambda hidden, routed: (hidden, routed[0]),
    ),
    "MiniMaxM2SparseMoeBlock": _CORRECTED,
    "MuseSparkMoE": Recipe(before=("pre_expert_proj", "pre_expert_norm"), after=("post_expert_proj",)),
    "NemotronHMoE": Recipe(before=("fc1_latent_proj",), after=("fc2_latent_proj",)),
    "ZayaSparseMoeBlock": Recipe(
        router_unflattened=True,
        router_kwargs={"router_states": "prev_router_hidden_states"},
        returns=lambda hidden, routed: (hidden, routed[3]),
    ),
}
