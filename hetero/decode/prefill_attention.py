"""Attention of many tokens of one sequence, by torch, over the pages that steps use."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention as attention

from hetero.decode import rotate_kernels
from hetero.decode.inputs import Chunk
from hetero.ops.gpu.attention import AttentionShape, AttentionWeights, PagedKeys

# Queries that are scored at once where a mask or sinks are needed, so that scores stay small.
_QUERIES = 512
_ROWS = 8  # tokens of a program that rotates


def rotated(
    shape: AttentionShape,
    weights: AttentionWeights,
    x: Tensor,
    norm: Tensor | None,
    start: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """Queries or keys [T, heads, dim] of positions from ``start`` on, normed and rotated, in ``dtype``; rows
    and heads of ``x`` may be any distance apart."""
    count, heads, dim = x.shape
    out = torch.empty(count, heads, dim, dtype=dtype, device=x.device)
    normed = shape.norm_offset is not None and norm is not None
    rotate_kernels.rotate[(-(-count // _ROWS), heads)](
        x, norm if normed else x, weights.inverse_frequencies, out, count, start, x.stride(0), x.stride(1),
        weights.eps, weights.rope_scale, HEADS=heads, DIM=dim, WIDTH=triton.next_power_of_2(dim),
        ROTARY=shape.rotary, ROWS=_ROWS, HAS_NORM=normed, NORM_OFFSET=shape.norm_offset or 0.0,
    )  # fmt: skip
    return out


def attend(
    shape: AttentionShape,
    weights: AttentionWeights,
    cache: PagedKeys,
    projected: tuple[Tensor, Tensor, Tensor],
    chunk: Chunk,
) -> Tensor:
    """Store keys and values [T, kv_heads, dim] in the pages, and attend: [T, q_heads, dim] in the dtype of
    the pages. Queries and keys are normed and rotated already."""
    q, k, v = projected
    count, end = q.shape[0], chunk.start + q.shape[0]
    pages = chunk.pages[chunk.slot, : -(-end // cache.page)].long()
    at = torch.arange(chunk.start, end, device=q.device)
    places = pages[at // cache.page] * cache.page + at % cache.page
    # The first token that any query sees, rounded down to its page.
    begin = max(chunk.start - shape.window + 1, 0) // cache.page if shape.window else 0
    seen = []
    for stored, new in ((cache.keys, k), (cache.values, v)):
        stored.flatten(0, 1)[places] = new.to(stored.dtype)
        tokens = stored[pages[begin:]].flatten(0, 1)[: end - begin * cache.page]
        seen.append(tokens.transpose(0, 1).unsqueeze(0))
    q = q.to(cache.keys.dtype).transpose(0, 1).unsqueeze(0)
    offset = chunk.start - begin * cache.page  # of the first query among the keys
    if offset == 0 and not shape.window and weights.sinks is None:
        gqa = shape.q_heads != shape.kv_heads
        out = attention(q, seen[0], seen[1], is_causal=True, scale=shape.scale, enable_gqa=gqa)
        return out[0].transpose(0, 1)
    outputs = [
        _masked(shape, weights, (q[:, :, first : first + _QUERIES], seen[0], seen[1]), offset + first)
        for first in range(0, count, _QUERIES)
    ]
    return torch.cat(outputs, 2)[0].transpose(0, 1)


def _masked(
    shape: AttentionShape, weights: AttentionWeights, heads: tuple[Tensor, Tensor, Tensor], offset: int
) -> Tensor:
    """Queries [1, q_heads, T, dim] whose first one is at ``offset`` among the keys [1, kv_heads, L, dim],
    with windows and sinks."""
    q, keys, values = heads
    last = offset + q.shape[2]
    first = max(offset - shape.window + 1, 0) if shape.window else 0
    row = torch.arange(offset, last, device=q.device)[:, None]
    column = torch.arange(first, last, device=q.device)[None, :]
    mask = column <= row
    if shape.window:
        mask &= column > row - shape.window
    # Heads of queries that share keys as a batch of their own: keys are not repeated.
    group = shape.q_heads // shape.kv_heads
    grouped = q.view(shape.kv_heads, group, *q.shape[2:])
    keys, values = (part[0, :, None, first:last].expand(-1, group, -1, -1) for part in (keys, values))
    if weights.sinks is None:
        return attention(grouped, keys, values, attn_mask=mask, scale=shape.scale).reshape(q.shape)
    # A sink is a score that has no value.
    scale = shape.scale or shape.dim**-0.5
    scores = (grouped.float() @ keys.float().transpose(2, 3) * scale).masked_fill(~mask, float("-inf"))
    sinks = weights.sinks.float().view(-1, group, 1, 1).expand(-1, -1, q.shape[2], -1)
    weight = torch.softmax(torch.cat([scores, sinks], -1), -1)[..., :-1]
    return (weight @ values.float()).to(q.dtype).reshape(q.shape)
