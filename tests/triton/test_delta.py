"""The fused step of gated delta nets against transformers' modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next
from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from hetero.ops.gpu.delta import DeltaShape, DeltaState, DeltaWeights, delta_step

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
SHAPE = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 24,
    "linear_conv_kernel_dim": 4,
    "num_hidden_layers": 1,
}


def module_of(kind: str) -> Any:
    """A gated delta net of transformers with random weights, float32, on the device."""
    made: Any
    if kind == "qwen3_next":
        config: Any = qwen3_next.Qwen3NextConfig(hidden_size=32, layer_types=["linear_attention"], **SHAPE)
        made = qwen3_next.Qwen3NextGatedDeltaNet(config, 0)
    else:
        config = qwen4_exp.Qwen4ExpTextConfig(hidden_size=32, layer_types=["linear_attention"], **SHAPE)
        made = qwen4_exp.Qwen4ExpTextGatedDeltaNet(config, 0)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
        made.norm.weight.add_(1.0)
    return made.float().to(DEVICE).eval()


def projections(module: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """qkv, z, a and b of tokens [T, hidden], each [T, ...]."""
    if hasattr(module, "in_proj_qkv"):
        names = ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b")
        return tuple(getattr(module, name)(x).contiguous() for name in names)
    parts = module.fix_query_key_value_ordering(module.in_proj_qkvz(x)[None], module.in_proj_ba(x)[None])
    query, key, value, z, b, a = (part[0].flatten(1) for part in parts)
    return torch.cat([query, key, value], 1), z.contiguous(), a.contiguous(), b.contiguous()


@pytest.mark.parametrize("kind", ["qwen3_next", "qwen4_exp"])
def test_steps_equal_the_whole_sequence(kind: str, generator: torch.Generator) -> None:
    """Two sequences side by side, one of them begun later, in slots that others have used."""
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    module = module_of(kind)
    shape = DeltaShape(2, 4, 16, 24, 4)
    weights = DeltaWeights(
        module.conv1d.weight[:, 0].contiguous(), module.A_log, module.dt_bias, module.norm.weight, 1e-6
    )
    x = torch.randn(2, 9, 32, generator=generator).to(DEVICE)
    with torch.no_grad():
        wanted = module(x)
        state = DeltaState(shape, 3, DEVICE)
        state.rings.fill_(7)
        state.states.fill_(7)
        state.clear(2)
        state.clear(0)
        got = torch.full_like(wanted, float("nan"))
        for time in range(11):
            at = [time, time - 2]
            rows = [min(max(t, 0), 8) for t in at]
            slots = [slot if 0 <= t < 9 else -1 for slot, t in zip((2, 0), at, strict=True)]
            tokens = torch.stack([x[row, t] for row, t in enumerate(rows)])
            one = delta_step(
                state, weights, projections(module, tokens),
                torch.tensor(slots, device=DEVICE), torch.tensor(rows, device=DEVICE),
            )  # fmt: skip
            for row, slot in enumerate(slots):
                if slot >= 0:
                    got[row, at[row]] = module.out_proj(one[row])
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5
    assert bool((state.states[1] == 7).all())


def test_a_step_goes_on_after_a_prefill(generator: torch.Generator) -> None:
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    module = module_of("qwen4_exp")
    shape = DeltaShape(2, 4, 16, 24, 4)
    weights = DeltaWeights(
        module.conv1d.weight[:, 0].contiguous(), module.A_log, module.dt_bias, module.norm.weight, 1e-6
    )
    x = torch.randn(7, 32, generator=generator).to(DEVICE)
    slots = torch.tensor([0], device=DEVICE)
    with torch.no_grad():
        for prefix in (1, 2, 6):
            stepped, filled = DeltaState(shape, 1, DEVICE), DeltaState(shape, 1, DEVICE)
            parts = projections(module, x)
            for time in range(prefix):
                one = tuple(part[time : time + 1] for part in parts)
                delta_step(stepped, weights, one, slots, torch.tensor([time], device=DEVICE))
            filled.fill(0, parts[0][:prefix].T, stepped.states[0], prefix)
            last = tuple(part[prefix : prefix + 1] for part in parts)
            position = torch.tensor([prefix], device=DEVICE)
            assert torch.equal(
                delta_step(stepped, weights, last, slots, position),
                delta_step(filled, weights, last, slots, position),
            )
