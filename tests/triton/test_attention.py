"""The fused step of attention against transformers' modules over the whole sequence, and against float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe
from transformers.models.qwen3_next import modeling_qwen3_next as qwen3_next

from hetero.formats import Format, parse_format
from hetero.ops.gpu.attention import (
    AttentionShape,
    AttentionWeights,
    PagedKeys,
    attention_rows,
)
from hetero.ops.gpu.fused import plain_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PAGE = 4
PLAIN = Format("bf16")  # rows of values as they are


def layer(kind: str) -> tuple[Any, Any, AttentionShape, AttentionWeights]:
    """(attention, rotary embedding) of transformers with random weights, and what we make of it."""
    sizes: dict[str, Any] = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    sizes["num_hidden_layers"] = 1
    made: Any
    if kind == "qwen3_moe":
        config: Any = qwen3_moe.Qwen3MoeConfig(**sizes)
        made, rotary = qwen3_moe.Qwen3MoeAttention(config, 0), qwen3_moe.Qwen3MoeRotaryEmbedding(config)
        shape = AttentionShape(4, 2, 16, 16, norm_offset=0.0)
    else:
        config = qwen3_next.Qwen3NextConfig(**sizes, layer_types=["full_attention"])
        made, rotary = qwen3_next.Qwen3NextAttention(config, 0), qwen3_next.Qwen3NextRotaryEmbedding(config)
        shape = AttentionShape(4, 2, 16, 4, gated=True, norm_offset=1.0)
    config._attn_implementation = "eager"
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    made, rotary = made.float().to(DEVICE).eval(), rotary.to(DEVICE)
    weights = AttentionWeights(
        rotary.inv_freq.float(), 1.0, made.q_norm.weight, made.k_norm.weight, config.rms_norm_eps
    )
    return made, rotary, shape, weights


@pytest.mark.parametrize("kind", ["qwen3_moe", "qwen3_next"])
def test_steps_equal_the_whole_sequence(kind: str, generator: torch.Generator) -> None:
    """Two sequences side by side, one begun later, their pages in any order."""
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    module, rotary, shape, weights = layer(kind)
    length = 11
    x = torch.randn(2, length, 32, generator=generator).to(DEVICE)
    mask = torch.full((length, length), float("-inf"), device=DEVICE).triu(1)[None, None]
    cache = PagedKeys(shape, 7, PAGE, torch.float32, DEVICE)
    cache.keys.fill_(float("nan"))
    cache.values.fill_(float("nan"))
    pages = torch.randperm(7, generator=generator)[: 2 * 3].view(2, 3).int().to(DEVICE)
    with torch.no_grad():
        ids = torch.arange(length, device=DEVICE)[None]
        wanted = module(x, position_embeddings=rotary(x, ids), attention_mask=mask)[0]
        got = torch.full_like(wanted, float("nan"))
        for time in range(length + 3):
            at = [time, time - 3]
            rows = [min(max(t, 0), length - 1) for t in at]
            slots = [slot if 0 <= t < length else -1 for slot, t in zip((1, 0), at, strict=True)]
            tokens = torch.stack([x[row, t] for row, t in enumerate(rows)])
            projected = tuple(getattr(module, name)(tokens) for name in ("q_proj", "k_proj", "v_proj"))
            where = pages, torch.tensor(slots, device=DEVICE), torch.tensor(rows, device=DEVICE)
            one = attention_rows(PLAIN, shape, weights, cache, projected, where).q
            for row, slot in enumerate(slots):
                if slot >= 0:
                    got[row, at[row]] = module.o_proj(one[row])
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("window", [0, 5, 33])
def test_windows_and_sinks(window: int, generator: torch.Generator) -> None:
    """Against float64; no norm, no rotation at position 0's frequency."""
    shape = AttentionShape(6, 2, 24, 8, window=window)
    length, device = 75, DEVICE
    cache = PagedKeys(shape, 20, PAGE, torch.float32, device)
    cache.keys.copy_(torch.randn(cache.keys.shape, generator=generator))
    cache.values.copy_(torch.randn(cache.values.shape, generator=generator))
    pages = torch.randperm(20, generator=generator).int()[None].to(device)
    q = torch.randn(1, 6 * 24, generator=generator).to(device)
    k, v = (torch.randn(1, 2 * 24, generator=generator).to(device) for _ in range(2))
    sinks = torch.randn(6, generator=generator).to(device)
    weights = AttentionWeights(torch.zeros(4, device=device), sinks=sinks)
    where = pages, torch.tensor([0], device=device), torch.tensor([length - 1], device=device)
    got = attention_rows(PLAIN, shape, weights, cache, (q, k, v), where).q.double().cpu()

    order = pages[0].long()
    keys, values = (part[order].flatten(0, 1)[:length].double().cpu() for part in (cache.keys, cache.values))
    assert torch.equal(keys[-1].flatten().float(), k.cpu()[0])
    first = max(0, length - window) if window else 0
    for head in range(6):
        scores = keys[first:, head // 3] @ q.double().cpu()[0].view(6, 24)[head] * 24**-0.5
        weight = torch.softmax(torch.cat([scores, sinks[head : head + 1].double().cpu()]), 0)[:-1]
        wanted = weight @ values[first:, head // 3]
        assert float((got[0].view(6, 24)[head] - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("dim", [32, 24])
def test_rows_are_those_of_the_values(dim: int, generator: torch.Generator) -> None:
    """Queries, keys and values as slices of one projection; a row without a sequence is zero."""
    shape, fmt = AttentionShape(3, 1, dim, 8, gated=True), parse_format("int8 g128")
    cache = PagedKeys(shape, 3, PAGE, torch.float32, DEVICE)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    joined = torch.randn(2, 8 * dim, generator=generator).to(DEVICE)
    pages = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=DEVICE)
    weights = AttentionWeights(torch.rand(4, generator=generator).to(DEVICE))
    where = pages, torch.tensor([-1, 0], device=DEVICE), torch.tensor([7, 9], device=DEVICE)
    given = shape, weights, cache, joined.split([6 * dim, dim, dim], 1), where
    values = attention_rows(PLAIN, *given).q  # type: ignore[arg-type]
    assert not values[0].any()
    for ours, plain in zip(attention_rows(fmt, *given), plain_rows(fmt, values), strict=True):  # type: ignore[arg-type]
        assert torch.equal(ours, plain)
