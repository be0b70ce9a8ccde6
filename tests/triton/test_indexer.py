"""Attention over chosen blocks, step by step, against transformers' module over the whole sequence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="triton is not installed")

from transformers.models.qwen4_exp import modeling_qwen4_exp as qwen4_exp

from hetero.formats import Format
from hetero.ops.gpu.attention import AttentionShape, AttentionWeights, PagedKeys
from hetero.ops.gpu.indexer import (
    IndexerShape,
    IndexerWeights,
    IndexKeys,
    indexed_attention_rows,
    select,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
pytestmark = [pytest.mark.gpu] if DEVICE == "cuda" else []
PAGE = 4
SHAPE = IndexerShape(heads=6, dim=16, ratio=3, top=2)


def layer() -> tuple[Any, Any]:
    """(attention, rotary embedding) of transformers with random weights."""
    config: Any = qwen4_exp.Qwen4ExpTextConfig(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_hidden_layers=1,
        layer_types=["indexed_attention"], indexer_n_heads=SHAPE.heads, indexer_kv_heads=1,
        indexer_head_dim=SHAPE.dim, indexer_budget=SHAPE.top * SHAPE.ratio,
        indexer_compress_ratio=SHAPE.ratio,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    made: Any = qwen4_exp.Qwen4ExpTextAttention(config, 0)
    with torch.no_grad():
        for parameter in made.parameters():
            nn.init.normal_(parameter, std=0.3)
    rotary: Any = qwen4_exp.Qwen4ExpTextRotaryEmbedding(config)
    return made.float().to(DEVICE).eval(), rotary.to(DEVICE)


def test_steps_equal_the_whole_sequence(generator: torch.Generator) -> None:
    """Two sequences side by side, one begun later, far beyond the budget; blocks lie across pages."""
    torch.manual_seed(int(torch.randint(2**31, (1,), generator=generator)))
    module, rotary = layer()
    length, late = 13, 1
    x = torch.randn(2, length, 32, generator=generator).to(DEVICE)
    shape = AttentionShape(4, 2, 16, 4, gated=True, norm_offset=1.0)
    frequencies = rotary.inv_freq.float()
    weights = AttentionWeights(frequencies, 1.0, module.q_norm.weight, module.k_norm.weight, 1e-6)
    cache = PagedKeys(shape, 9, PAGE, torch.float32, DEVICE)
    ix = module.indexer
    index_weights = IndexerWeights(ix.q_layernorm.weight, ix.k_layernorm.weight, 1e-6)
    keys = IndexKeys(SHAPE, 2, (9, PAGE), torch.float32, DEVICE)
    for held in (cache.keys, cache.values, keys.ring, keys.blocks):
        held.fill_(float("nan"))
    pages = torch.randperm(9, generator=generator)[:8].view(2, 4).int().to(DEVICE)
    with torch.no_grad():
        ids = torch.arange(length, device=DEVICE)[None, None].expand(3, 2, -1)
        mask = torch.ones(length, length, dtype=torch.bool, device=DEVICE).tril().expand(2, 1, -1, -1)
        wanted = module(x, rotary(x, ids), mask)[0]
        ix.token_budget, ix.block_topk = length, length // SHAPE.ratio
        assert float((module(x, rotary(x, ids), mask)[0] - wanted).norm() / wanted.norm()) > 1e-2
        got = torch.full_like(wanted, float("nan"))
        for time in range(length + late):
            at = [time, time - late]
            rows = [min(max(t, 0), length - 1) for t in at]
            slots = [slot if 0 <= t < length else -1 for slot, t in zip((1, 0), at, strict=True)]
            tokens = torch.stack([x[row, t] for row, t in enumerate(rows)])
            projected = [getattr(module, name)(tokens) for name in ("q_proj", "k_proj", "v_proj")]
            projected.append(ix.index_qk_proj(tokens))
            where = pages, torch.tensor(slots, device=DEVICE), torch.tensor(rows, device=DEVICE)
            one = indexed_attention_rows(
                Format("f32"), (shape, weights, cache), (SHAPE, index_weights, keys), tuple(projected), where
            ).q
            for row, slot in enumerate(slots):
                if slot >= 0:
                    got[row, at[row]] = module.o_proj(one[row])
    assert float((got - wanted).norm() / wanted.norm()) < 1e-5


@pytest.mark.parametrize("count", [7, 100, 5000])
def test_the_best_blocks_are_chosen(count: int, generator: torch.Generator) -> None:
    """Against a stable sort: of equal scores the first; rows of different lengths; few blocks: no choice."""
    shape = IndexerShape(1, 16, ratio=2, top=6)
    scores = torch.rand(4, count, generator=generator)
    scores[1] = (scores[1] * 3).floor() / 7  # mostly equal
    scores[2] = scores[2].exp() * 1e-30  # of like magnitudes
    scores[3, :4] = 0
    lengths = torch.tensor([2 * count + 1, 2 * count, 2 * count - 1, 2 * 6 + 1])
    slots = torch.zeros(4, dtype=torch.int64, device=DEVICE)
    chosen = select(shape, scores.to(DEVICE), slots, lengths.to(DEVICE) - 1).cpu()
    for row in range(3):
        complete = int(lengths[row]) // 2
        order = scores[row, :complete].sort(descending=True, stable=True).indices
        wanted = order[:6].sort().values if complete > 6 else chosen[row]
        assert chosen[row].tolist() == wanted.tolist()
