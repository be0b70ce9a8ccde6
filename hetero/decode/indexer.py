"""Attention with an indexer: beyond a budget, a token sees the blocks of tokens that the indexer chooses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import rms_norm

from hetero.decode.attention import AttentionMixer
from hetero.decode.build import Build
from hetero.decode.inputs import PAGE, Chunk, StepInputs
from hetero.decode.matrix import Part
from hetero.decode.prefill_attention import attend as attend_all
from hetero.decode.prefill_attention import rotated
from hetero.formats import Format
from hetero.ops.gpu.fused import Normed
from hetero.ops.gpu.indexer import (
    IndexerShape,
    IndexerWeights,
    IndexKeys,
    attend,
    indexed_attention_rows,
    select,
)

# Bytes of scores, and queries, at a time in a prefill.
_SCORES, _QUERIES = 64 << 20, 1024
_VALUES = Format("bf16")  # of rows that stay values


class IndexedAttentionMixer(AttentionMixer):
    """Of a ``Qwen4ExpTextAttention``: gated attention whose ``indexer`` chooses blocks of tokens."""

    def __init__(self, module: Any, build: Build) -> None:
        super().__init__(module, build, norm_offset=1.0)
        indexer = module.indexer
        self.index_shape = IndexerShape(
            indexer.index_n_heads, indexer.index_head_dim, indexer.compress_ratio, indexer.block_topk
        )
        self.index_weights = IndexerWeights(
            build.tensor(indexer.q_layernorm.weight),
            build.tensor(indexer.k_layernorm.weight),
            indexer.q_layernorm.eps,
        )
        pages = build.pages, PAGE
        self.index_keys = IndexKeys(self.index_shape, build.slots, pages, build.dtype, build.device)
        self.grain = self.index_shape.ratio

    def _inputs(self, module: Any) -> list[Part]:
        qk = module.indexer.index_qk_proj
        return [*super()._inputs(module), Part(qk, (qk.out_features,))]

    @property
    def nbytes(self) -> int:
        return super().nbytes + self.index_keys.nbytes

    def step(self, x: Normed, inputs: StepInputs) -> Tensor:
        q, k, v, qk = self._in.few(x, self._dtype)
        attention = self.shape, self.weights, self.cache
        indexer = self.index_shape, self.index_weights, self.index_keys
        where = inputs.pages, inputs.slots, inputs.positions
        rows = indexed_attention_rows(self._out.format, attention, indexer, (q, k, v, qk), where)
        return self._out.whole(rows, self._dtype)

    def prefill(self, x: Tensor, chunk: Chunk) -> Tensor:
        shape, index, count = self.shape, self.index_shape, x.shape[0]
        q, k, v, qk = self._in.many(x)
        asked, keys = torch.split(qk, [index.heads * index.dim, index.dim], 1)
        self._note(keys, chunk)
        q = torch.unflatten(q, 1, (shape.q_heads, 2 * shape.dim))
        k, v = (part.reshape(count, -1, shape.dim) for part in (k, v))
        k = rotated(shape, self.weights, k, self.weights.k_norm, chunk.start)
        # Tokens that see all before them, and those behind.
        whole = min(max(index.dense - chunk.start, 0), count)
        out = torch.empty(count, shape.q_heads, shape.dim, dtype=x.dtype, device=x.device)
        if whole:
            queries = self._queries(q[:whole], chunk.start)
            y = attend_all(shape, self.weights, self.cache, (queries, k[:whole], v[:whole]), chunk)
            gate = torch.sigmoid(q[:whole, :, shape.dim :].float())
            out[:whole] = y * gate
        if whole < count:
            self._store(k[whole:], v[whole:], chunk, whole)
            self._beyond(q, asked, chunk, whole, out)
        return self._out.many(out.flatten(1))[0]

    def states(self, slot: int) -> list[Tensor]:
        return [self.index_keys.ring[slot]]

    @property
    def paged(self) -> list[Tensor]:
        return [*super().paged, self.index_keys.blocks]

    def _queries(self, q: Tensor, start: int) -> Tensor:
        """Of q [n, heads, 2 * dim], with gates, of positions from ``start`` on: normed and rotated."""
        return rotated(self.shape, self.weights, q[..., : self.shape.dim], self.weights.q_norm, start)

    def _store(self, k: Tensor, v: Tensor, chunk: Chunk, first: int) -> None:
        """Keys and values of the chunk's tokens from ``first`` on."""
        at = torch.arange(chunk.start + first, chunk.start + first + len(k), device=k.device)
        places = chunk.pages[chunk.slot, at // PAGE].long() * PAGE + at % PAGE
        for stored, new in ((self.cache.keys, k), (self.cache.values, v)):
            stored.flatten(0, 1)[places] = new.to(stored.dtype)

    def _note(self, raw: Tensor, chunk: Chunk) -> None:
        """Keep the index keys [T, dim] of a chunk: the means of blocks, and the rest as they are."""
        shape, weights, keys = self.index_shape, self.index_weights, self.index_keys
        ring = keys.ring[chunk.slot]
        before = chunk.start % shape.ratio
        joined = torch.cat([ring[:before], raw.to(ring.dtype)])
        count = len(joined) // shape.ratio
        rest = joined[count * shape.ratio :]
        if count:
            first = chunk.start // shape.ratio
            blocks = torch.arange(first, first + count, device=raw.device)
            pooled = joined[: count * shape.ratio].view(count, shape.ratio, shape.dim).float().mean(1)
            made = self._turned(pooled.to(ring.dtype), weights.k_norm, blocks * shape.ratio)
            places = keys.places(shape.ratio, blocks, chunk.pages[chunk.slot])
            keys.blocks.flatten(0, 1)[places] = made.to(keys.blocks.dtype)
        ring[: len(rest)] = rest

    def _beyond(self, q: Tensor, asked: Tensor, chunk: Chunk, first: int, out: Tensor) -> None:
        """Attention of the chunk's tokens from ``first`` on, which do not see all: into ``out``."""
        shape, keys = self.index_shape, self.index_keys
        count, device = len(out), out.device
        blocks = torch.arange((chunk.start + count) // shape.ratio, device=device)
        places = keys.places(shape.ratio, blocks, chunk.pages[chunk.slot])
        known = keys.blocks.flatten(0, 1)[places].float().T
        each = min(max(_SCORES // (4 * shape.heads * len(blocks)), 1), _QUERIES)
        pages = chunk.pages[chunk.slot : chunk.slot + 1]
        for begin in range(first, count, each):
            rows = slice(begin, min(begin + each, count))
            positions = torch.arange(chunk.start + begin, chunk.start + rows.stop, device=device)
            mine = asked[rows].view(-1, shape.heads, shape.dim)
            mine = self._turned(mine, self.index_weights.q_norm, positions).to(keys.blocks.dtype).float()
            scores = torch.relu_(mine @ known).sum(1).mul_(shape.dim**-0.5)
            slots = torch.zeros_like(positions)
            chosen = select(shape, scores, slots, positions)
            queries = self._queries(q[rows], chunk.start + begin)
            where = pages, slots, positions
            made = attend(
                _VALUES, self.shape, shape, self.cache, (queries, chosen), where,
                gate=q[rows], dtype=out.dtype, parts=1,
            )  # fmt: skip
            out[rows] = made.q.view(out[rows].shape)

    def _turned(self, x: Tensor, norm: Tensor, positions: Tensor) -> Tensor:
        """Index queries or keys [n, (heads,) dim] normed and rotated, float32."""
        weights, half = self.weights, self.shape.rotary // 2
        x = rms_norm(x.float(), (x.shape[-1],), 1.0 + norm.float(), self.index_weights.eps)
        angles = positions.float()[:, None] * weights.inverse_frequencies
        cosine, sine = angles.cos() * weights.rope_scale, angles.sin() * weights.rope_scale
        if x.dim() == 3:
            cosine, sine = cosine.unsqueeze(1), sine.unsqueeze(1)
        first, second, rest = torch.split(x, [half, half, x.shape[-1] - 2 * half], -1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine, rest], -1)
